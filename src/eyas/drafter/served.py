"""A server that drafts for itself: started, asked for greedy replies, its own counts read.

SGLang counts by request: `spec_verify_ct` verifications, and a histogram of how many drafts each
accepted. Its `spec_accept_length` counts the token of the prefill too; ours does not. Drafts past
the end of a reply count in the histogram, so the last verification's gain is cut here.
Source: SGLang 0.5.23, POST /generate with ids, GET /server_info.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from eyas.drafter.acceptance import Verified
from eyas.errors import EyasError
from eyas.settings import Serving

LOG = Path("var/sglang/evaluate.log")
STOP_S = 20
IN_FLIGHT = 16
_ANSWER_S = 600
_LOG_LINES = 15
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # now, and before 0.5.23


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the server answered; no verification where the prefill was enough."""

    ids: tuple[int, ...]
    verifications: int
    histogram: tuple[int, ...]  # verifications by drafts accepted

    def verified(self, num_drafts: int) -> Verified:
        """Return the verifications, fewest accepted drafts first, as their order is not known."""
        accepted = [k for k, count in enumerate(self.histogram) for _ in range(count)]
        gains, left = list[int](), len(self.ids) - 1
        for number, drafts in enumerate(accepted):
            behind = len(accepted) - number - 1  # each of them gains a token or more
            gains.append(min(drafts + 1, left - behind))
            left -= gains[-1]
        return Verified(
            gains=tuple(gains),
            accepted=tuple(accepted),
            judged=tuple(min(drafts + 1, num_drafts) for drafts in accepted),
        )


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def drafting(knobs: Serving, target: Path, drafter: Path, num_drafts: int) -> Generator[str]:
    """Give the address of a server with a drafter: the one that runs already, or one of our own.

    Raises: EyasError if it does not come up, or drafts by other rules.
    """
    if knobs.url is not None:
        url = knobs.url.rstrip("/")
        check_server(server_info(url), num_drafts)
        yield url
        return
    port = free_port()
    words = {
        "target": target.resolve(),
        "drafter": drafter.resolve(),
        "steps": num_drafts,
        "tokens": num_drafts + 1,  # the last committed token is one of them
        "port": port,
    }
    command = [word.format(**words) for word in knobs.command]
    with serving(
        command, port, environment=knobs.environment, log=LOG, start_s=knobs.start_s
    ) as url:
        check_server(server_info(url), num_drafts)
        yield url


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    port: int,
    *,
    environment: Mapping[str, str],
    log: Path,
    start_s: float,
) -> Generator[str]:
    """Run a server on this machine and give its address.

    Raises: EyasError with the end of the log if it does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | dict(environment),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EyasError(f"the server cannot be started: {error}") from None
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url, process, log, start_s)
        yield url
    finally:
        _stop(process)


def _await(url: str, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    until = time.monotonic() + start_s
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    state = "ended" if process.poll() is not None else f"gave no answer for {start_s:.0f} s"
    raise EyasError("\n".join([f"the server {state}; the end of its log:", *end]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children, which share its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def ask_all(
    url: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> list[Reply]:
    """Send all prompts as ids, `IN_FLIGHT` at once; replies in order."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stop_ids),
    }

    def ask(ids: Sequence[int]) -> Reply:
        body = {"input_ids": list(ids), "sampling_params": sampling}
        return reply_of(_fetch(f"{url}/generate", body))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(ask, prompts))


def reply_of(answer: Mapping[str, Any]) -> Reply:
    """Return ids and counts; the counts are left out of an answer without a verification.

    Raises: EyasError if the histogram of accepted drafts does not add up to the verifications.
    """
    meta = answer["meta_info"]
    count = meta.get("spec_verify_ct", 0)
    histogram = next((meta[name] for name in _HISTOGRAMS if name in meta), ())
    if sum(histogram) != count:
        raise EyasError(
            f"/generate: expected a histogram of {count} verifications, got {list(histogram)}",
            hint="this reads SGLang 0.5.23; is the server another version, or without a drafter?",
        )
    return Reply(ids=tuple(answer["output_ids"]), verifications=count, histogram=tuple(histogram))


def server_info(url: str) -> dict[str, Any]:
    """Return the server's settings, and its counts under `internal_states`."""
    return _fetch(f"{url}/server_info", None)


def check_server(info: Mapping[str, Any], num_drafts: int) -> None:
    """Refuse a server that drafts by other rules.

    Raises: EyasError naming the setting.
    """
    for name, expected in (
        ("speculative_algorithm", "EAGLE3"),
        ("speculative_num_steps", num_drafts),
        ("speculative_eagle_topk", 1),
    ):
        if info.get(name) != expected:
            raise EyasError(
                f"/server_info: {name}: expected {expected}, got {info.get(name)}",
                hint="start the server with the exported drafter and evaluate.headline_steps",
            )


def _fetch(url: str, body: object) -> dict[str, Any]:
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise EyasError(f"{url}: HTTP {error.code}: {error.read(500).decode()}") from None
    except OSError as error:
        raise EyasError(f"{url}: no answer ({error})", hint="runtime.serving.url") from None
