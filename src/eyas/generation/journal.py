"""Keep every request and answer in append-only files that survive a kill and a full disk.

Reads and writes: var/journal/<data set>/{issued,responses,failures,abandoned,settled}.jsonl.
A record is one os.write of a whole line: the system keeps it when the process is killed, `sync`
(fdatasync, called off the event loop) when the machine goes down.
"""

import dataclasses
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from eyas.errors import EyasError
from eyas.generation.books import NAMES, Books, check_record
from eyas.records import Response

_RESERVE = "reserve"  # space given back when the disk is full, for the answers still in flight
_RESERVE_BYTES = 4 << 20
_FIELDS = {f.name for f in dataclasses.fields(Response)}
log = logging.getLogger("eyas")


class Journal:
    """The journal of one data set, held by one process.

    Raises: EyasError if another process holds it, or on a full disk (see `write`).
    """

    def __init__(self, folder: Path, *, reserve_bytes: int = _RESERVE_BYTES) -> None:
        self.folder = folder
        self.books = Books()
        self.unsynced = 0  # records
        self.trouble: EyasError | None = None
        self._files: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        try:
            self._open_all(reserve_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Append one record. On a full disk the reserve takes it, and `trouble` says: send no more.

        Raises: EyasError if it could not be stored. What was written before is intact, and no half
        line stays behind.
        """
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        start = self._ends[name]
        try:
            self._append(name, line)
        except OSError as error:
            self.trouble = self._trouble(name, error)
            (self.folder / _RESERVE).unlink(missing_ok=True)
            try:
                self._append(name, line)
            except OSError:
                raise self.trouble from error
        self._ends[name] = start + len(line)
        self.unsynced += 1
        self.books.learn(name, record, start, len(line))

    def read(self, fingerprint: str) -> Response:
        """Return a stored answer."""
        entry = self.books.entries[fingerprint]
        data = os.pread(self._files["responses"], entry.size, entry.start)
        return _response(orjson.loads(data))

    def sync(self) -> None:
        """Force what was written onto the disk; may run in another thread than `write`."""
        self.unsynced = 0
        for handle in self._files.values():
            os.fdatasync(handle)

    def close(self) -> None:
        """Sync, give the reserve back, let the next process in."""
        try:
            self.sync()
        finally:
            (self.folder / _RESERVE).unlink(missing_ok=True)
            for handle in self._files.values():
                os.close(handle)
            self._files.clear()
            os.close(self._lock)

    def _open_all(self, reserve_bytes: int) -> None:
        for name in NAMES:
            path = self.folder / f"{name}.jsonl"
            self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            for start, size, record in _records(path):
                self.books.learn(name, record, start, size)
            self._ends[name] = path.stat().st_size
        try:
            with (self.folder / _RESERVE).open("wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, reserve_bytes)
        except OSError as error:
            raise self._trouble(_RESERVE, error) from error

    def _append(self, name: str, line: bytes) -> None:
        """Write a whole line at the end, or nothing: a half one is cut off again."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._files[name], rest) :]
        except OSError:
            os.ftruncate(self._files[name], self._ends[name])
            raise

    def _trouble(self, name: str, error: OSError) -> EyasError:
        return EyasError(
            f"{self.folder}/{name}: cannot write ({error.strerror}); "
            f"the {len(self.books.entries)} answers stored before are intact",
            hint="free disk space, then run the same command: it goes on where it stopped",
        )


def _lock(folder: Path) -> int:
    """Take the folder's lock for this process; the system releases it whatever happens to us."""
    path = folder / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise EyasError(
            f"{folder}: process {holder or '?'} is using this journal",
            hint="wait until it ends, or stop it with Ctrl-C: what it has is kept",
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _records(path: Path, *, mend: bool = True) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield start, size and record of every good line; report the others and leave them there.

    A last line without its newline is moved to .torn, so that the next record starts on its own.
    """
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                if mend:
                    _move_torn(path, start, line)
                return
            try:
                record = _checked(path.stem, orjson.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                log.warning("%s:%d: skipped, not a record (%s)", path, number, error)
            else:
                yield start, len(line), record
            start += len(line)


def _move_torn(path: Path, end: int, tail: bytes) -> None:
    torn = path.with_suffix(".torn")
    with torn.open("ab") as out:
        out.write(tail + b"\n")
        out.flush()
        os.fsync(out.fileno())
    os.truncate(path, end)
    log.warning("%s: the last line was cut short; moved to %s", path, torn)


def _checked(name: str, record: Any) -> dict[str, Any]:
    checked = check_record(name, record)
    if name == "responses":
        _response(checked)
    return checked


def read_books(folder: Path) -> Books:
    """Read a journal that another process may be writing: no lock, nothing mended."""
    books = Books()
    for name in NAMES:
        path = folder / f"{name}.jsonl"
        for start, size, record in _records(path, mend=False) if path.is_file() else ():
            books.learn(name, record, start, size)
    return books


def _response(record: dict[str, Any]) -> Response:
    if unknown := set(record) - _FIELDS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return Response(**values)
