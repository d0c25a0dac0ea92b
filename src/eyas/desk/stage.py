"""The frame of every stage: parameters in, metrics and a tracked run out, errors in one line.

Writes: var/status/<stage>[-<data set>].json (the last word), metrics/<the same>.json where the
stage has any (report, which reads them all, has none: its own file among its deps would make it
stale).
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.workers import end_with_parent
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.settings import Runtime
from eyas.status import Status

CONF = "../../../conf"  # relative to a module in stages/, as hydra.main wants it
_BEAT_S = 5.0
_TELL_THEMSELVES = ("generate", "extract", "train")  # silence of theirs is a stall
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a stage tells of itself: numbers for DVC and MLflow, and a line for the reader."""

    summary: str
    metrics: Mapping[str, float | int]  # unit in the name; every stage's rows add up
    inputs: tuple[Path, ...] = ()  # files whose DVC digests are logged as data sets
    artifacts: tuple[Path, ...] = ()  # small files kept with the run
    curves: tuple[tuple[str, int, float], ...] = field(default=())  # (metric, step, value)


def run_stage(name: str, work: Callable[[Params], Report], config: DictConfig) -> None:
    """Run `work`, write its metrics, record it; exit 1 with one line on a user's error."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    _end_with_dvc()
    started = time.time()
    params = Params(config)
    title = f"{name}@{params.value('select')}" if params.value("select") else name
    status = Status(title)
    status.tell("run", {})
    try:
        runtime = params.knob("runtime", Runtime)
        with contextlib.nullcontext() if name in _TELL_THEMSELVES else _beating(status):
            report = work(params)
        if report.metrics:
            write_json(Path("metrics") / f"{title.replace('@', '-')}.json", dict(report.metrics))
    except (EyasError, OSError) as error:
        log.debug("%s failed", title, exc_info=True)
        status.end("failed", str(error))
        sys.exit(f"{title}: error: {error}")
    except KeyboardInterrupt:
        status.end("failed", "interrupted")
        sys.exit(
            f"{title}: interrupted; what was finished is kept, run the same command again to go on"
        )
    except BaseException as error:  # a defect: it keeps its traceback
        status.end("failed", f"{type(error).__name__}: {error}")
        raise
    if runtime.tracking != "off":
        from eyas.desk import tracking

        tracking.record(title, params, report, started_s=started)
    status.end("done", report.summary)
    print(f"{title}: {report.summary}")


def run_beside(name: str, work: Callable[[Params], Report], config: DictConfig) -> None:
    """Run `work` beside the process that tells of it: no status, no metrics, no tracked run."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        work(Params(config))
    except (EyasError, OSError) as error:
        sys.exit(f"{name}: error: {error}")


def _end_with_dvc() -> None:
    """Let Linux end this process when DVC is killed: an orphan would go on holding the journal.

    DVC must be the parent, not a shell between: hence `exec` in dvc.yaml.
    """
    if os.environ.get("DVC_STAGE"):
        end_with_parent()


@contextlib.contextmanager
def _beating(status: Status) -> Generator[None]:
    """Say every few seconds that the stage is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_S):
            status.tell("run", {})

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
