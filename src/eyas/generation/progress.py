"""Say how a run goes: a live line on a terminal, a log line now and then elsewhere.

Pure: Tally, describe. Edge: Progress (standard error).
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_EVERY_S = 15.0  # between log lines
log = logging.getLogger("eyas")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run has done so far."""

    total: int  # rows wanted
    resumed: int  # of them answered before this run
    budget_tokens: int | None = None
    held_tokens: int = 0  # of the resumed rows
    held_usd: float = 0.0
    new: int = 0
    truncated: int = 0
    new_prompt_tokens: int = 0
    new_completion_tokens: int = 0
    new_usd: float = 0.0  # failed attempts included
    requests_sent: int = 0
    abandoned: int = 0
    in_flight: int = 0
    limit: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # attempts, by reason
    failed_rows: Counter[str] = field(default_factory=Counter)  # given up, by reason
    waiting: Counter[str] = field(default_factory=Counter)  # rows to be asked again, by reason

    @property
    def done(self) -> int:
        """Return the rows with an end, answered or given up."""
        return self.resumed + self.new + self.failed_rows.total()

    @property
    def new_tokens(self) -> int:
        """Return the tokens of the answers of this run."""
        return self.new_prompt_tokens + self.new_completion_tokens


def describe(tally: Tally, elapsed_s: float, *, waits_s: float = 0.0) -> str:
    """Return one line: rows, rates, money, time left, and in words what is being waited for."""
    rate = tally.new / elapsed_s if elapsed_s > 0 else 0.0
    speed = tally.new_completion_tokens / elapsed_s if elapsed_s > 0 else 0.0
    parts = [
        f"{tally.done:,}/{tally.total:,} rows",
        f"{rate:.2f} answers/s",
        f"{speed:,.0f} tokens/s",
        f"${tally.held_usd + tally.new_usd:.4f}",
        f"ETA {_eta(tally, elapsed_s)}",
        f"{tally.in_flight} of {tally.limit} in flight",
    ]
    parts += [f"{n} wait after {reason}" for reason, n in sorted(tally.waiting.items()) if n]
    if waits_s > 0:
        parts.append(f"all paused for {waits_s:.0f} s")
    if failed := tally.failed_rows.total():
        parts.append(f"{failed} failed")
    return " | ".join(parts)


def _eta(tally: Tally, elapsed_s: float) -> str:
    """Return the time to the end of the prompts or of the budget, whichever is nearer."""
    if not tally.new or elapsed_s <= 0:
        return "?"
    left_s = (tally.total - tally.done) / tally.new * elapsed_s
    if tally.budget_tokens is not None:
        free = tally.budget_tokens - tally.held_tokens - tally.new_tokens
        left_s = min(left_s, max(free, 0) / max(tally.new_tokens, 1) * elapsed_s)
    return f"{int(left_s) // 60}:{int(left_s) % 60:02d}"


class Progress:
    """Shows a Tally while it is entered."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._started_s = self._told_s = time.monotonic()

    def __enter__(self) -> Self:
        self._started_s = self._told_s = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, tally: Tally, *, waits_s: float = 0.0) -> None:
        """Draw the state now, or log it if the last line is 15 s old."""
        now_s = time.monotonic()
        line = f"{self._title}: {describe(tally, now_s - self._started_s, waits_s=waits_s)}"
        if self._console.is_terminal:
            self._live.update(Text(line), refresh=True)
        elif now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            log.info("%s", line)
