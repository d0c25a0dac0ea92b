"""Spread a pure function over processes, or let processes work alongside one another.

Spread: results come back in the order of the items. What a worker needs besides the item (a
tokenizer) it makes itself, once. A few chunks are under way at a time, so neither items nor results
pile up, whoever is slower.
"""

import ctypes
import functools
import logging
import os
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from eyas.errors import EyasError

T = TypeVar("T")
R = TypeVar("R")
_CHUNK_ITEMS = 16
_CHUNKS_EACH = 2  # under way at a time: one at work, one that waits
_MOST = 16  # a process takes about 200 MB
_TICK_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Generic[T, R]):
    """How a worker makes the function that it applies: `make(*arguments)`, by name, importable."""

    make: Callable[..., Callable[[T], R]]
    arguments: tuple[Any, ...]


_recipe: Recipe[Any, Any] | None = None  # of this worker: a pool has no other place for it


def num_workers(size_bytes: int, worth_bytes: int) -> int:
    """Return one process for little data, else one for each core that this process may use."""
    if size_bytes < worth_bytes:
        return 1
    return min(_MOST, len(os.sched_getaffinity(0)) if sys.platform == "linux" else 2)


def spread(recipe: Recipe[T, R], items: Iterable[T], processes: int) -> Iterator[tuple[T, R]]:
    """Yield each item with its result, in order; one process is this one.

    Raises: EyasError if a worker was killed; what an item or the function raises.
    """
    if processes == 1:
        work = recipe.make(*recipe.arguments)
        yield from ((item, work(item)) for item in items)
        return
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_begin, initargs=(recipe,)
    )
    try:
        yield from _ordered(pool, iter(items), processes * _CHUNKS_EACH)
    except BrokenProcessPool:
        raise EyasError(
            "a worker process has ended before its work was done",
            hint="is there memory enough? run the same command again",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _ordered(pool: ProcessPoolExecutor, items: Iterator[T], most: int) -> Iterator[tuple[T, Any]]:
    waiting: deque[tuple[list[T], Future[list[Any]]]] = deque()
    while chunk := list(islice(items, _CHUNK_ITEMS)):
        waiting.append((chunk, pool.submit(_apply, chunk)))
        if len(waiting) == most:
            yield from _pairs(*waiting.popleft())
    while waiting:
        yield from _pairs(*waiting.popleft())


def _pairs(chunk: list[T], results: Future[list[Any]]) -> Iterator[tuple[T, Any]]:
    return zip(chunk, results.result(), strict=True)


def cpu_s() -> float:
    """Return the CPU time of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def end_with_parent() -> None:
    """Let Linux end this process when the one that started it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _begin(recipe: Recipe[Any, Any]) -> None:
    global _recipe
    _recipe = recipe
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would wait for the other workers
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C: the stage says what it means


@functools.cache
def _work() -> Callable[[Any], Any]:
    """Make this worker's function: on use, since what `_begin` raises is not told."""
    assert _recipe is not None
    return _recipe.make(*_recipe.arguments)


def _apply(chunk: list[Any]) -> list[Any]:
    work = _work()
    return [work(item) for item in chunk]


def alongside(
    work: Callable[..., R], arguments: Sequence[tuple[Any, ...]], tick: Callable[[], None]
) -> list[R]:
    """Call `work(*arguments[i])` in a process each; return the results of those that end well.

    `tick` is called twice a second meanwhile. A process that fails or is killed is told as a
    warning: the others may do its share.

    Raises: EyasError with the first reason if all have failed.
    """
    context = get_context("spawn")
    open_ends: dict[Connection, BaseProcess] = {}
    for given in arguments:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs, work, given), daemon=True)
        process.start()
        theirs.close()
        open_ends[ours] = process
    results: list[R] = []
    reasons: list[str] = []
    while open_ends:
        for end in wait(list(open_ends), timeout=_TICK_S):
            assert isinstance(end, Connection)
            reason, result = _received(end, process := open_ends.pop(end))
            if reason:
                reasons.append(reason)
                log.warning("worker %d: %s", process.pid, reason)
            else:
                results.append(result)
        tick()
    if not results:
        raise EyasError(reasons[0])
    return results


def _received(end: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        return end.recv()
    except EOFError:
        process.join()
        return f"killed or broken (exit code {process.exitcode})", None


def _answer(end: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C: the stage says what it means
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        end.send(("", work(*arguments)))
    except (EyasError, OSError) as error:
        end.send((str(error), None))
