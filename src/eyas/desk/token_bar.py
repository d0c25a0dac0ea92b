"""Show how many tokens of a long pass are done: to `eyas status`, and to a terminal or a log."""

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from eyas.status import Status

_LOG_EVERY_S = 20.0
log = logging.getLogger("eyas")


@contextmanager
def token_bar(
    stage: str, total: int, doing: str = ""
) -> Generator[Callable[[int], None], None, None]:
    """Show tokens done, rate and time left: a bar on a terminal, else a line now and then.

    `doing` says what a stage that does more is at. `train` has a bar of its own: a terminal shows
    one at a time.
    """
    status, started, done = Status(stage), time.monotonic(), 0
    shown = _bar if sys.stderr.isatty() and stage != "train" else _lines
    with shown(f"{stage} {doing}".strip(), total) as show:

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            now = time.monotonic()
            rate = done / max(now - started, 1e-9)
            if status.due(now):
                facts = {"done": done, "total": total, "unit": "tokens"}
                eta_s = round((total - done) / rate, 1) if done else None
                facts |= {"tokens_per_s": round(rate, 1), "eta_s": eta_s}
                status.tell("run", facts, reason=doing)
            show(done, rate)

        yield advance


@contextmanager
def _lines(stage: str, total: int) -> Generator[Callable[[int, float], None], None, None]:
    last = time.monotonic()

    def show(done: int, rate: float) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= _LOG_EVERY_S:
            last, left_s = now, (total - done) / rate
            log.info("%s: %d of %d tokens, %.0f/s, %.0f s left", stage, done, total, rate, left_s)

    yield show


@contextmanager
def _bar(stage: str, total: int) -> Generator[Callable[[int, float], None], None, None]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(stage),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        progress.TextColumn("{task.fields[rate]:,.0f}/s"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(stage, total=total, rate=0.0)
        yield lambda done, rate: bar.update(task, completed=done, rate=rate)
