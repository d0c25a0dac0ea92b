"""Reading and writing whole files: atomic, checked, naming the line that is wrong."""

import contextlib
import dataclasses
import hashlib
import inspect
import logging
import os
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson

from eyas.errors import EyasError

R = TypeVar("R")
_CHUNK_BYTES = 1 << 22


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path that replaces `path` on success and is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`: either all of it is there afterwards, or the old file is."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Write indented, key-sorted JSON with a final newline, atomically."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    write_bytes(path, orjson.dumps(value, option=options))


def read_json(path: Path, *, hint: str | None = None) -> Any:
    """Read one JSON document; a missing or broken file is an EyasError that names it."""
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise EyasError(f"{path}: no such file", hint=hint) from None
    except orjson.JSONDecodeError as error:
        raise EyasError(f"{path}: not JSON ({error})", hint=hint) from None


def write_jsonl(path: Path, rows: Iterable[object]) -> int:
    """Write dataclasses or plain values, one JSON document a line; return their number."""
    count = 0
    with replacing(path) as temporary, temporary.open("wb") as out:
        for row in rows:
            value = (
                dataclasses.asdict(row)
                if dataclasses.is_dataclass(row) and not isinstance(row, type)
                else row
            )
            out.write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def read_jsonl(path: Path, *, hint: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; a bad line is an EyasError with file and line number."""
    if not path.is_file():
        raise EyasError(f"{path}: no such file", hint=hint)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise EyasError(f"{path}:{number}: not JSON ({error})", hint=hint) from None
            if not isinstance(value, dict):
                raise EyasError(
                    f"{path}:{number}: expected an object, got {type(value).__name__}", hint=hint
                )
            yield value


def iter_records(path: Path, record: type[R], *, hint: str | None = None) -> Iterator[R]:
    """Yield a JSONL file of one record type; lists come back as tuples, a wrong key is an error."""
    names = set(inspect.signature(record).parameters)
    for number, value in enumerate(read_jsonl(path, hint=hint), start=1):
        if unknown := set(value) - names:
            raise EyasError(
                f"{path}:{number}: unknown keys {sorted(unknown)} for {record.__name__}", hint=hint
            )
        try:
            yield record(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        except TypeError as error:
            raise EyasError(f"{path}:{number}: {error}", hint=hint) from None


def read_records(path: Path, record: type[R], *, hint: str | None = None) -> list[R]:
    """Read a JSONL file of one record type whole; see `iter_records`."""
    return list(iter_records(path, record, hint=hint))


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def md5_of(data: bytes) -> str:
    """Return the md5 of bytes as 32 hex digits: a name that DVC gives, no protection."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def write_swiftly(path: Path, data: bytes) -> None:
    """Replace a file that may be lost with the machine: atomic for readers, no wait for the disk.

    A full disk or a folder that cannot be made is told at debug level: nothing depends on the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        logging.getLogger("eyas").debug("%s: not written (%s)", path, error)
