"""Read a data set's upstream rows from a file, an installed wheel, or the hub.

Reads: JSON lines or one JSON array, whatever the file is called, plain or gzipped (.gz).
Source: https://huggingface.co/docs/datasets/stream (hub rows are streamed, never stored whole).
"""

import gzip
import importlib
import importlib.util
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from eyas.errors import EyasError
from eyas.settings import Source

_COMMIT = re.compile(r"[0-9a-f]{40}")
KINDS = "file | wheel | hub"
Opened = BufferedReader | gzip.GzipFile


def read_rows(source: Source) -> Iterator[Any]:
    """Yield upstream rows as they are, of any JSON type.

    Raises: EyasError if the source is not to be had, or its file is broken.
    """
    match source.kind:
        case "file":
            return _read_file(Path(_need(source, "path")))
        case "wheel":
            return _read_file(wheel_path(_need(source, "package"), _need(source, "path")))
        case "hub":
            return _read_hub(source)
    raise EyasError(f"datasets.*.source.kind: expected {KINDS}, got '{source.kind}'")


def wheel_path(package: str, path: str) -> Path:
    """Return where an installed package keeps a file, without importing the package.

    Raises: EyasError if the package or the file is missing.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise EyasError(
            f"package '{package}' (for its {path}): expected to be installed, not found",
            hint="run `make install`",
        )
    found = Path(spec.submodule_search_locations[0]) / path
    if not found.is_file():
        raise EyasError(
            f"{found}: no such file in package '{package}'",
            hint="check the data set's source.path, or reinstall with `make install`",
        )
    return found


def _read_file(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise EyasError(
            f"{path}: no such file", hint="a data set's source.path counts from the repository"
        )
    try:
        with _opened(path) as data:
            if _is_array(data):
                yield from _read_array(path, data)
            else:
                yield from _read_lines(path, data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise EyasError(
            f"{path}: broken gzip file ({error})", hint="fetch the file again"
        ) from None


def _opened(path: Path) -> Opened:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _is_array(data: Opened) -> bool:
    """Look at the first character: BFCL's .json files hold JSON lines."""
    first = data.read(1)
    while first.isspace():
        first = data.read(1)
    data.seek(0)
    return first == b"["


def _read_array(path: Path, data: Opened) -> Iterator[Any]:
    try:
        yield from orjson.loads(data.read())
    except orjson.JSONDecodeError as error:
        raise EyasError(
            f"{path}: not a JSON array ({error})", hint="fetch the file again"
        ) from None


def _read_lines(path: Path, lines: Opened) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise EyasError(
                f"{path}:{number}: not JSON ({error})", hint="fetch or mend the file"
            ) from None


def _read_hub(source: Source) -> Iterator[Any]:
    repo, revision, split = (_need(source, name) for name in ("repo", "revision", "split"))
    if not _COMMIT.fullmatch(revision):
        raise EyasError(
            f"{repo}: expected a revision of 40 hex digits, got '{revision}'",
            hint="branches and tags move; copy the commit from the repository's history page",
        )
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise EyasError(
            f"{repo}: hub sources need the package 'datasets', which is not installed",
            hint="pip install datasets",
        ) from None
    try:
        yield from datasets.load_dataset(
            repo,
            data_files=source.path,
            revision=revision,
            split=split,
            streaming=True,
        )
    except (OSError, ValueError) as error:
        raise EyasError(
            f"hub data set {repo} at {revision}: {error}",
            hint="check repo, split and path; gated sets need HF_TOKEN",
        ) from None


def _need(source: Source, name: str) -> str:
    value = getattr(source, name)
    if not value:
        raise EyasError(f"datasets.*.source: kind '{source.kind}' needs '{name}'")
    return str(value)
