"""Say how a run goes: a live line on a terminal, a log line now and then elsewhere.

Pure: describe, clock. Edge: Progress (standard error).
"""

import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from eyas.generation.facts import View
from eyas.status import Status

_EVERY_S = 15.0  # between log lines
log = logging.getLogger("eyas")


def describe(facts: Mapping[str, Any]) -> str:
    """Return one line: rows, rates, money, time left, and in words what is being waited for."""
    rows, money, limit = facts["rows"], facts["money"], facts["limit"]
    parts = [
        f"{facts['done']:,}/{facts['total']:,} rows",
        f"{facts['answers_per_s']:.2f} answers/s",
        f"{facts['tokens_per_s']:,.0f} tokens/s",
        f"${money['held_usd'] + money['new_usd']:.4f}",
        f"ETA {clock(facts['eta_s'])}",
        f"{rows['in_flight']:,} of {limit['now']:,} in flight",
    ]
    parts += [f"{n:,} wait after {reason}" for reason, n in sorted(rows["waiting"].items())]
    if limit["paused_s"]:
        parts.append(f"all paused for {limit['paused_s']:.0f} s")
    if failed := sum(rows["failed"].values()):
        parts.append(f"{failed:,} failed")
    return " | ".join(parts)


def clock(seconds: float | None) -> str:
    """Return m:ss, or h:mm:ss from an hour on; ? for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Shows views of a run while it is entered, and keeps the status file."""

    def __init__(
        self, title: str, console: Console | None = None, status: Status | None = None
    ) -> None:
        self._title = title
        self._last: View | None = None
        self._status = status
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._told_s = time.monotonic()

    def __enter__(self) -> Self:
        self._told_s = time.monotonic()
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
        if self._status and self._last:
            self._status.tell(self._last.state, self._last.facts, reason=self._last.reason)

    def show(self, view: View) -> None:
        """Draw the state now, or log it if the last line is 15 s old."""
        now_s, self._last = time.monotonic(), view
        if self._status and self._status.due(now_s):
            self._status.tell(view.state, view.facts, reason=view.reason)
        line = f"{self._title}: {describe(view.facts)}"
        if self._console.is_terminal:
            self._live.update(Text(line), refresh=True)
        elif now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            log.info("%s", line)
