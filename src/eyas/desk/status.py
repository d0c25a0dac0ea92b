"""Show how the stages at work are getting on: `eyas status [--watch] [--json] [PATH]`.

Reads: var/status/*.json, here or over ssh. A running stage whose last word is 30 s old is stalled.
"""

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eyas.desk import words
from eyas.errors import EyasError
from eyas.generation.progress import clock, describe
from eyas.status import EVERY_S, SCHEMA

STALLED_S = 30.0
_RECENT_S = 3600.0
_EXIT = {"stalled": 3, "failed": 4}
_STYLES = {"failed": "bold red", "stalled": "bold yellow", "done": "green", "paused": "yellow"}
_SSH_S = 30.0
_MISSED = 5  # readings in a row that may fail while watching: a line that is down comes back
Word = dict[str, Any]  # one status file


def read_status(source: str) -> list[Word]:
    """Return the status files of a folder, or one file; the newest last word comes last.

    Raises: EyasError if there is none, or if it is not of this version.
    """
    texts = _fetch_over_ssh(source) if source.startswith("ssh://") else _read_here(Path(source))
    found = [_parse(text, source) for text in texts]
    if not found:
        raise EyasError(f"{source}: no status file", hint="no stage has run here yet")
    return sorted(found, key=lambda word: word["heartbeat_s"])


def state_of(word: Mapping[str, Any], now_s: float) -> str:
    """Return its state; one that should be at work and is silent for 30 s is `stalled`."""
    ended = word["state"] in ("done", "failed")
    return word["state"] if ended or now_s - word["heartbeat_s"] <= STALLED_S else "stalled"


def exit_code(found: Sequence[Mapping[str, Any]], now_s: float) -> int:
    """Return 4 if a stage failed, 3 if one is stalled, else 0; last week's stages do not count."""
    return max((_EXIT.get(state_of(word, now_s), 0) for word in recent(found)), default=0)


def recent(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stages heard of within an hour of the newest word."""
    newest_s = max((word["heartbeat_s"] for word in found), default=0.0)
    return [word for word in found if word["heartbeat_s"] > newest_s - _RECENT_S]


def render(found: Sequence[Word], now_s: float) -> Group:
    """Return a line a stage, and below it everything known of a generation at work."""
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "state", "done", "rate", "left", "spent"):
        table.add_column(title, no_wrap=title != "spent")
    details: list[Any] = []
    for word in found:
        state = state_of(word, now_s)
        table.add_row(*_cells(word, state))
        if word["reason"] and (state != "done" or word is found[-1]):
            details.append(Text(f"{name_of(word)}: {word['reason']}", _STYLES.get(state, "")))
        if word.get("shares") and state not in ("done", "failed"):
            details.append(Text(f"{name_of(word)}: time: {words.shares(word['shares'])}"))
        if "budget" in word and state not in ("done",):
            details += _generation(word, now_s)
    return Group(table, *details)


def name_of(word: Mapping[str, Any]) -> str:
    """Return stage@data set."""
    return f"{word['stage']}@{word['dataset']}" if word["dataset"] else word["stage"]


def _cells(word: Word, state: str) -> list[Text]:
    done, total = word.get("done"), word.get("total")
    share = f" {100 * done / total:.0f} %" if done is not None and total else ""
    rate, money = word.get("tokens_per_s"), word.get("money")
    dollars = words.dollars(money["held_usd"] + money["new_usd"]) if money else ""
    texts = (
        name_of(word),
        state,
        f"{done:,}/{total:,} {word['unit']}{share}" if total else "",
        f"{rate:,.0f} tokens/s" if rate else "",
        "" if state in ("done", "failed") else clock(word.get("eta_s")),
        f"${dollars}" if dollars else "",
    )
    return [Text(text, _STYLES.get(state, "") if i == 1 else "") for i, text in enumerate(texts)]


def _generation(word: Word, now_s: float) -> list[Any]:
    """Return what a run waits for in words, then budget, latencies, limit and providers."""
    budget, limit, rows, money = word["budget"], word["limit"], word["rows"], word["money"]
    silent = now_s - word["heartbeat_s"]
    lines = [describe(word)]
    if silent > STALLED_S:
        lines.append(f"no word for {words.seconds(silent)} from process {word['pid']}")
    if budget["limit_tokens"] is not None:
        lines.append(
            f"budget {budget['limit_tokens']:,} tokens: {budget['spent_tokens']:,} spent, "
            f"{budget['reserved_tokens']:,} reserved, {budget['projected_tokens']:,} projected"
        )
    lines.append(f"money  {_money(money)}")
    lines.append(
        f"latency {_quantiles(word['latency_s'])}; oldest in flight "
        f"{word['oldest_in_flight_s']:.0f} s; loop lag {_quantiles(word['loop_lag_s'])}"
    )
    lines.append(f"limit  {_limit(limit, word)}")
    told = {k: rows[k] for k in ("truncated", "abandoned", "maybe_billed", "settled") if rows[k]}
    failed = {**word["failures_last_minute"]}
    if told:
        lines.append("rows   " + ", ".join(f"{n:,} {k.replace('_', ' ')}" for k, n in told.items()))
    if failed:
        each = ", ".join(f"{n:,} {reason}" for reason, n in sorted(failed.items()))
        lines.append(f"failed attempts in the last minute: {each}")
    blocks = [Padding(line, (0, 0, 0, 2)) for line in lines]
    return [*blocks, Padding(_providers(word["providers"]), (0, 0, 0, 2))]


def _money(money: Mapping[str, Any]) -> str:
    parts = [f"${words.dollars(money['new_usd'])} new, ${words.dollars(money['held_usd'])} held"]
    if money["projected_usd"] is not None:
        parts.append(f"${words.dollars(money['projected_usd'])} projected")
    if money.get("unexplained_usd") is not None:
        parts.append(f"${words.dollars(money['unexplained_usd'])} of the key's use unexplained")
    if money.get("limit_left_usd") is not None:
        parts.append(f"${words.dollars(money['limit_left_usd'])} left on the key")
    return ", ".join(parts)


def _limit(limit: Mapping[str, Any], word: Mapping[str, Any]) -> str:
    """Return the limit's last moves: time since the start, value, and why."""
    moves = [
        f"{clock(change['at_s'])} {change['limit']:,} ({change['reason']})"
        for change in limit["changes"][-4:]
    ]
    flying = f"{word['rows']['in_flight']:,} of {limit['now']:,} in flight, at most "
    return f"{flying}{limit['maximum']:,}" + (f"; {', '.join(moves)}" if moves else "")


def _quantiles(values: Mapping[str, float]) -> str:
    return " ".join(f"{q} {value:.2g} s" for q, value in values.items()) or words.UNKNOWN


def _providers(providers: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("provider", "answers", "tokens", "tokens/s", "spent", "truncated", "failed"):
        table.add_column(title, justify="left" if title == "provider" else "right")
    for name, part in providers.items():
        tokens = part["prompt_tokens"] + part["completion_tokens"]
        table.add_row(
            name,
            words.number(part["answers"]),
            words.number(tokens),
            f"{part['tokens_per_s']:.0f}",
            f"${words.dollars(part['usd'])}",
            words.percent(part["truncated"] / max(part["answers"], 1)),
            words.number(sum(part["failures"].values())),
        )
    return table


def watch(source: str, console: Console) -> int:
    """Draw again every two seconds until all has ended or Ctrl-C; return the exit code."""
    found, now_s, missed = read_status(source), time.time(), 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                found, now_s, missed = read_status(source), time.time(), 0
            except EyasError:
                missed += 1
                if missed > _MISSED:
                    raise
            else:
                live.update(render(found, now_s), refresh=True)
                if all(state_of(word, now_s) in ("done", "failed") for word in recent(found)):
                    return exit_code(found, now_s)
            try:
                time.sleep(EVERY_S)
            except KeyboardInterrupt:
                return exit_code(found, now_s)


def _read_here(path: Path) -> list[bytes]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.is_file() else []
    return [file.read_bytes() for file in files]


def _fetch_over_ssh(address: str) -> list[bytes]:
    """Read the files with one `ssh`; user, host and port as in any ssh address.

    Raises: EyasError with ssh's own words.
    """
    parts = urlsplit(address)
    if not parts.hostname or not parts.path:
        raise EyasError(f"{address}: expected ssh://[user@]host[:port]/path/to/var/status")
    target = f"{parts.username}@{parts.hostname}" if parts.username else parts.hostname
    port = ["-p", str(parts.port)] if parts.port else []
    path = shlex.quote(parts.path)
    script = (
        f"cd {path} 2>/dev/null && set -- *.json || set -- {path}; "
        'for f; do cat "$f" && echo || exit 1; done'
    )
    command = ["ssh", "-o", "BatchMode=yes", *port, target, script]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_SSH_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EyasError(f"{address}: {error}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise EyasError(f"{address}: ssh ended with {done.returncode}: {said}")
    return [line for line in done.stdout.splitlines() if line.strip()]


def _parse(text: bytes, source: str) -> Word:
    try:
        word = orjson.loads(text)
        fits = word["schema"] == SCHEMA
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise EyasError(f"{source}: not a status file") from None
    if not fits:
        raise EyasError(
            f"{source}: status of version {word['schema']}, expected {SCHEMA}",
            hint="the other side runs another version of eyas",
        )
    return word
