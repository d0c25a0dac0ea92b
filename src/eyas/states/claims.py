"""Share out the shards of a store among workers that know of each other only through its folder.

Writes: <store>/<key>/shard-NNNNN.claim, locked while a worker makes that shard. The kernel takes
the lock from a process that ends, however it ends, so a dead worker's shard is free at once; on a
network file system that keeps locks (NFS) this holds between machines, when the lease runs out.
Source: flock(2).
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from eyas.errors import EyasError

_POLL_S = 0.2


@contextlib.contextmanager
def claimed(shard: Path) -> Generator[bool]:
    """Hold the claim to a shard; false where another worker holds it.

    Raises: EyasError if the folder's file system keeps no locks.
    """
    path = shard.with_suffix(".claim")
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise EyasError(
                f"{path}: expected a file system that keeps locks, got {error}",
                hint="put runtime.store on a local disk or on NFS",
            ) from None
        # Opened before the last holder removed it: later comers lock another file of this name.
        mine = _is_at(handle, path)
        yield mine
        if mine:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def work_through(
    shards: Sequence[Path], is_there: Callable[[int], bool], make: Callable[[int], None]
) -> None:
    """Make each shard that is not there and that nobody else makes; end when all are there.

    `is_there` and `make` take the shard's place in the list. A claim whose holder dies is taken. A
    shard counts only once nobody holds it: its maker may still find it wrong.
    """
    waiting = list(range(len(shards)))
    while waiting:
        busy = []
        for number in waiting:
            with claimed(shards[number]) as mine:
                if not mine:
                    busy.append(number)
                elif not is_there(number):
                    for leftover in shards[number].parent.glob(f".{shards[number].stem}.*"):
                        leftover.unlink(missing_ok=True)  # what a kill left half-written
                    make(number)
        waiting = busy
        if waiting:
            time.sleep(_POLL_S)
