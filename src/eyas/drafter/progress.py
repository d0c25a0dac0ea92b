"""Say how training goes on standard error: a bar on a terminal, else a line now and then."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from eyas.drafter.clock import Clock
from eyas.drafter.packing import predictions
from eyas.drafter.ranks import leads
from eyas.drafter.schedule import Row, best_epoch
from eyas.drafter.training import Progress
from eyas.settings import Train
from eyas.status import Status

_LINE_EVERY_S = 20.0
log = logging.getLogger("eyas")


class Meter:
    """Turns steps into one line: rate since the start, time left, loss, accuracy."""

    def __init__(self, now_s: float, clock: Clock) -> None:
        self._started_s, self._clock = now_s, clock
        self._status = Status("train")
        self._steps = 0
        self._tokens = 0

    def line(self, progress: Progress, now_s: float) -> str:
        """Count a step, describe the run after it, and keep the status file."""
        self._steps += 1
        self._tokens += progress.tokens
        elapsed_s = max(now_s - self._started_s, 1e-9)
        left_s = (progress.total - progress.step) * elapsed_s / self._steps
        row = progress.row
        if self._status.due(now_s):
            rate = round(self._tokens / elapsed_s, 1)
            facts = {"done": progress.step, "total": progress.total, "unit": "steps", **row}
            facts |= {"tokens_per_s": rate, "eta_s": round(left_s, 1)}
            self._status.tell("run", facts | {"shares": self._clock.shares()})
        return (
            f"step {progress.step}/{progress.total} | epoch {row['epoch']} | "
            f"loss {row['loss_step1']:.3f} | accuracy {row['accuracy_step1']:.3f} | "
            f"acceptance length {row['simulated_acceptance_length']:.2f} | "
            f"{self._tokens / elapsed_s:,.0f} tokens/s | ETA {left_s / 60:.1f} min"
        )


@contextlib.contextmanager
def reporting(every_steps: int, clock: Clock) -> Generator[Callable[[Progress], None]]:
    """Yield what training calls after each step; the bar is redrawn every so many steps.

    Of several ranks only the leading one tells anything.
    """
    if not leads():
        yield lambda _: None
        return
    meter = Meter(time.monotonic(), clock)
    if not sys.stderr.isatty():
        yield _logging(meter)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("train"), BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            line = meter.line(progress, time.monotonic())
            if progress.step % every_steps == 0 or progress.step == progress.total:
                bar.update(task, total=progress.total, completed=progress.step, description=line)

        yield show


def _logging(meter: Meter) -> Callable[[Progress], None]:
    last_s = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        line = meter.line(progress, now_s)
        if now_s - last_s >= _LINE_EVERY_S or progress.step == progress.total:
            last_s = now_s
            log.info("train: %s", line)

    return show


def summarise(
    replies: Sequence[Tensor], settings: Train, curve: Sequence[Row], vocabulary_coverage: float
) -> dict[str, float]:
    """Return the run in numbers, of the weights that were kept; equal inputs give equal ones."""
    steps = [row for row in curve if row["split"] == "train"]
    checks = [row for row in curve if row["split"] == "val"]
    best = next((row for row in checks if row["epoch"] == best_epoch(curve)), None)
    last = checks[-1] if checks else steps[-1]
    kept = best if best and settings.patience is not None else last
    facts: dict[str, float] = {
        "documents": len(replies),
        "tokens": sum(map(len, replies)),
        "predictions": sum(len(predictions(reply_T)) for reply_T in replies),
        "steps": len(steps),
        "ttt_steps": settings.ttt_steps,
        "vocabulary_coverage": round(vocabulary_coverage, 5),
        "loss_last": round(steps[-1]["loss"], 5),
    }
    figures = {k: round(v, 5) for k, v in kept.items() if k not in ("split", "step", "epoch", "lr")}
    name = "val" if checks else "train"
    facts |= {f"{name}_{key}": value for key, value in figures.items()}
    if best and settings.patience is not None:
        facts["best_epoch"] = best["epoch"]
    if checks:
        key = "simulated_acceptance_length"
        facts[f"val_{key}_at_start"] = round(checks[0][key], 5)
    return facts
