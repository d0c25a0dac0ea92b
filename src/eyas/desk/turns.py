"""Have shards made, and let capture and training take turns over a disk of fixed size.

With extract.window_gb the training shards are cut into windows. One window lies on the disk at a
time: what is not of it is deleted before its own shards are made, by the code that extract uses, in
processes that end before training goes on. Of a deleted shard the description stays, as .seen: the
same shard made again must have the same sha256.

Reads: data/mixture, models/target. Writes: shards under runtime.store, var/status/STAGE.json.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eyas.desk import ray_workers
from eyas.desk.params import fill
from eyas.desk.token_bar import token_bar
from eyas.desk.workers import alongside
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.settings import Extract, Runtime
from eyas.states import shards
from eyas.states.capturing import about_target, keep, read_job, run_worker
from eyas.states.claims import claimed
from eyas.states.job import Job, build_manifest
from eyas.states.store import Manifest, Store

SEEN = ".seen"
_POLL_S = 0.2
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What had to be made, and what it took."""

    shards: list[int]
    reused: int  # shards that were there
    seconds: dict[str, float]  # of all workers, by kind of work
    wall_s: float


class Windows:
    """Brings windows, one at a time; counts what that takes."""

    def __init__(self, job: Job, runtime: Runtime, stage: str) -> None:
        self.job = job
        self.tokens, self.wall_s = 0, 0.0  # captured, and what that took
        self._runtime, self._stage = runtime, stage

    def bring(self, window: int) -> Made:
        """Leave on the disk the shards of one window and those of validation, and no others.

        Raises: EyasError if there is no room for the largest window, or a shard comes out anew with
            other bytes.
        """
        job, wanted = self.job, [*self.job.windows[window], *self.job.kept]
        if not self._runtime.extract.keep_windows:
            clear(job, wanted)
        there = [number for number in wanted if job.is_there(number)]
        most_bytes = max(map(job.disk_bytes, job.windows)) + job.disk_bytes(job.kept)
        shards.check_space(job.folder, most_bytes - job.disk_bytes(there))
        doing = f"captures window {window + 1} of {len(job.windows)}"
        made = make_missing(job, self._runtime, wanted, self._stage, doing)
        check_again(job, wanted)
        self.tokens += sum(map(job.tokens, made.shards))
        self.wall_s += made.wall_s
        return made

    def store_of(self, window: int) -> Store:
        """Return the readable shards of a window; waits where another process brings them."""
        wanted = self.job.windows[window]
        while not all(map(self.job.is_there, wanted)):
            time.sleep(_POLL_S)
        return Store(build_manifest(self.job, about_target(), wanted), self.job.folder.parent)


@contextlib.contextmanager
def taking_turns(
    path: Path, manifest: Manifest, runtime: Runtime, *, leads: bool
) -> Generator[Windows | None]:
    """Yield the windows of the store that the manifest at `path` describes; None if it has none.

    Raises: EyasError if they are of another mixture, or another run is at the store.
    """
    if manifest.windows is None:
        yield None
        return
    job = read_job(fill(Extract, manifest.windows, f"{path}: windows"), Path(runtime.store))
    if (key := job.folder.name) != manifest.meta.key:
        raise EyasError(
            f"{path}: expected windows of {key}, this mixture and target, got {manifest.meta.key}",
            hint="re-run extract",
        )
    with alone(job) if leads else contextlib.nullcontext():
        yield Windows(job, runtime, "train")


@contextlib.contextmanager
def alone(job: Job) -> Generator[None]:
    """Keep other runs from deleting and making shards of the store meanwhile.

    Raises: EyasError if another run is at it.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with claimed(job.folder / "turns") as mine:
        if not mine:
            raise EyasError(
                f"{job.folder}: another run makes and deletes shards here",
                hint="wait for its end, or give this one another runtime.store",
            )
        yield


def clear(job: Job, wanted: Sequence[int]) -> None:
    """Delete every shard but the wanted ones that are whole, and what kills have left.

    A shard's description becomes its note; a kill at any place leaves what the next call ends.
    """
    kept = {job.path(number).stem for number in wanted if job.is_there(number)}
    for path in sorted(job.folder.glob("*shard-*")):
        if path.suffix == SEEN or path.stem in kept:
            continue
        if path.suffix == ".json":
            path.replace(path.with_suffix(SEEN))
        else:
            path.unlink()


def check_again(job: Job, there: Sequence[int]) -> None:
    """Compare shards with what was noted of them when they were deleted.

    Raises: EyasError if one differs; the sglang backend, which promises no equal bytes, only warns.
    """
    for number in there:
        path = job.path(number)
        if not (note := path.with_suffix(SEEN)).is_file():
            continue
        before, now = (read_json(p)["sha256"] for p in (note, path.with_suffix(".json")))
        if before == now:
            continue
        told = f"{path}: made again: expected sha256 {before}, got {now}"
        if job.settings.backend == "sglang":
            log.warning("%s; a server may round otherwise", told)
            continue
        path.with_suffix(".json").unlink()
        raise EyasError(
            told,
            hint="were threads, workers, torch and machine the same? removing the folder begins "
            "anew",
        )


def make_missing(
    job: Job, runtime: Runtime, wanted: Sequence[int], stage: str, doing: str = ""
) -> Made:
    """Make those shards that are not there, with as many workers as asked.

    Where there are windows every worker is a process, whose target leaves the memory again.

    Raises: EyasError if the disk has no room for them.
    """
    missing = [number for number in wanted if not keep(job, number)]
    shards.check_space(job.folder, sum(map(job.size_bytes, missing)))
    started_s = time.monotonic()
    seconds = _make(job, runtime, missing, stage, doing) if missing else {}
    wall_s, reused = time.monotonic() - started_s, len(wanted) - len(missing)
    return Made(shards=missing, reused=reused, seconds=seconds, wall_s=wall_s)


def _make(
    job: Job, runtime: Runtime, missing: Sequence[int], stage: str, doing: str
) -> dict[str, float]:
    extract = runtime.extract
    servers = extract.servers if job.settings.backend == "sglang" else ()
    workers = [server for server in servers or (None,) for _ in range(extract.workers)]
    given = [(job.settings, runtime, job.folder.name, missing, server) for server in workers]
    waiting = set(missing)
    with token_bar(stage, sum(map(job.tokens, missing)), doing) as advance:
        if len(workers) == 1 and not job.windows and extract.ray is None:
            return run_worker(*given[0], advance)

        def tick() -> None:
            made = {number for number in waiting if job.is_there(number)}
            waiting.difference_update(made)
            advance(sum(map(job.tokens, made)))

        start = alongside if extract.ray is None else partial(ray_workers.alongside, extract.ray)
        spent = start(run_worker, given, tick)
        return {name: sum(seconds[name] for seconds in spent) for name in spent[0]}
