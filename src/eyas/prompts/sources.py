"""Read a data set's upstream rows from a file, an installed wheel, or the hub.

Reads: parquet, JSON lines or one JSON array, whatever the file is called; JSON also gzipped (.gz).
Files of the hub are fetched once into its cache; a split is streamed and never stored whole.
Source: https://huggingface.co/docs/datasets/stream,
https://huggingface.co/docs/huggingface_hub/guides/download (a commit's files).
"""

import contextlib
import fnmatch
import gzip
import importlib
import importlib.util
import json
import math
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from eyas.errors import EyasError
from eyas.prompts.bfcl import with_functions
from eyas.prompts.rows import Reject
from eyas.settings import Source

_COMMIT = re.compile(r"[0-9a-f]{40}")
KINDS = "file | wheel | hub"
_PARQUET, _MARK = b"PAR1", b"\xef\xbb\xbf"
_BATCH_ROWS = 256
Opened = BufferedReader | gzip.GzipFile


def read_rows(source: Source) -> Iterator[Any]:
    """Yield upstream rows as they are, of any JSON type; a `Reject` for a line that is no JSON.

    Raises: EyasError if the source is not to be had, or its file is broken.
    """
    rows = _rows_of(source)
    if not source.functions:
        return rows
    files = read_functions(_located(source, source.functions))
    return (with_functions(row, files) for row in rows)


def read_file(path: Path) -> Iterator[Any]:
    """Yield the rows of one file; what it holds is told by its first bytes.

    Raises: EyasError naming the file that cannot be read, or that begins with no JSON.
    """
    if not path.is_file():
        raise EyasError(
            f"{path}: no such file", hint="a data set's source.path counts from the repository"
        )
    try:
        with _opened(path) as data:
            if data.peek(len(_PARQUET))[: len(_PARQUET)] == _PARQUET:
                yield from _read_parquet(path)
            elif _is_array(data):
                yield from _read_array(path, data)
            else:
                yield from _read_lines(path, data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise EyasError(
            f"{path}: broken gzip file ({error})", hint="fetch the file again"
        ) from None


def read_functions(path: Path) -> dict[str, list[Any]]:
    """Return BFCL's function documents by file name: a folder of them, or rows of file, functions.

    Raises: EyasError if there are none.
    """
    if path.is_dir():
        return {file.name: _whole(file) for file in sorted(path.glob("*.json"))}
    rows = [row for row in _whole(path) if isinstance(row, dict)]
    if not all(isinstance(row.get("functions"), list) for row in rows):
        raise EyasError(f"{path}: expected rows of file, functions")
    return {str(row.get("file")): row["functions"] for row in rows}


def _whole(path: Path) -> list[Any]:
    """Return the rows of a file, all of which must be JSON."""
    rows = list(read_file(path))
    if bad := [row for row in rows if isinstance(row, Reject)]:
        raise EyasError(f"{path}: not JSON ({bad[0].detail})", hint="fetch or mend the file")
    return rows


def _rows_of(source: Source) -> Iterator[Any]:
    match source.kind:
        case "file" | "wheel":
            return read_file(_located(source, _need(source, "path")))
        case "hub":
            return _read_hub(source)
    raise EyasError(f"datasets.*.source.kind: expected {KINDS}, got '{source.kind}'")


def _located(source: Source, path: str) -> Path:
    if source.kind == "wheel":
        return wheel_path(_need(source, "package"), path)
    return Path(path)


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
    if not found.exists():
        raise EyasError(
            f"{found}: no such file in package '{package}'",
            hint="check the data set's source.path, or reinstall with `make install`",
        )
    return found


def _opened(path: Path) -> Opened:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _is_array(data: Opened) -> bool:
    """Look at the first character: BFCL's .json files hold JSON lines; leave a byte order mark."""
    start = len(_MARK) if data.read(len(_MARK)) == _MARK else 0
    data.seek(start)
    first = data.read(1)
    while first.isspace():
        first = data.read(1)
    data.seek(start)
    return first == b"["


def _loads(text: bytes) -> Any:
    """Return JSON; lone surrogates, NaN and 1e999, which are none, are left to be counted by row.

    Raises: ValueError
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as strict:
        try:
            return json.loads(text, parse_constant=complex, parse_float=_number)
        except (ValueError, RecursionError):
            raise strict from None


def _number(text: str) -> float | complex:
    """Return a float; one too large as a number that no JSON can write."""
    value = float(text)
    return value if math.isfinite(value) else complex(value)


def _read_array(path: Path, data: Opened) -> Iterator[Any]:
    try:
        yield from _loads(data.read())
    except ValueError as error:
        raise EyasError(
            f"{path}: not a JSON array ({error})", hint="fetch the file again"
        ) from None


def _read_lines(path: Path, lines: Opened) -> Iterator[Any]:
    is_first = True
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            yield _loads(line)
        except ValueError as error:
            if is_first:
                yield _one_object(path, line + b"".join(lines), f"{path}:{number}: {error}")
                return
            yield Reject(reason="not_json", detail=f"{path.name}:{number}: {error}")
        is_first = False


def _one_object(path: Path, text: bytes, told: str) -> dict[str, Any]:
    """Return a file that is one JSON object over many lines, as a trajectory is written.

    Raises: EyasError if it is not; `told` is what its first line said.
    """
    with contextlib.suppress(ValueError):
        value = _loads(text)
        if isinstance(value, dict):
            return value
    raise EyasError(f"{told}: neither JSON lines nor one object", hint="fetch or mend the file")


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # here, so that other files are read without it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise EyasError(
            f"{path}: broken parquet file ({error})", hint="fetch the file again"
        ) from None


def _read_hub(source: Source) -> Iterator[Any]:
    """Read the files that `path` names (a pattern), or else stream the split."""
    repo = _need(source, "repo")
    revision = source.revision or "null"
    if not _COMMIT.fullmatch(revision):
        raise EyasError(
            f"{repo}: expected a revision of 40 hex digits, got '{revision}'",
            hint=f"branches and tags move; write `revision: {_head(repo)}` into conf/datasets",
        )
    if not source.path and not source.split:
        raise EyasError("datasets.*.source: kind 'hub' needs 'path' or 'split'")
    try:
        yield from _hub_files(repo, revision, source.path) if source.path else _hub_split(source)
    except EyasError:
        raise
    except (OSError, ValueError) as error:
        raise EyasError(
            f"hub data set {repo} at {revision}: {error}",
            hint="check repo, split and path; gated sets need HF_TOKEN",
        ) from None


def _head(repo: str) -> str:
    """Return the commit that a data set of the hub is at now, or where to find it."""
    from huggingface_hub import dataset_info  # here: slow to import

    try:
        return str(dataset_info(repo).sha)
    except Exception:  # whatever the hub's client raises: the hint must come
        return "COMMIT, from the repository's history page,"


def _hub_files(repo: str, revision: str, pattern: str) -> Iterator[Any]:
    from huggingface_hub import snapshot_download  # here: slow to import

    folder = Path(
        snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=[pattern])
    )
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = [p for p in paths if fnmatch.fnmatch(p.relative_to(folder).as_posix(), pattern)]
    if not chosen:
        raise EyasError(
            f"hub data set {repo} at {revision}: no file is called '{pattern}'",
            hint="see the repository's file list; a pattern like data/train-*.parquet will do",
        )
    for path in chosen:
        yield from read_file(path)


def _hub_split(source: Source) -> Iterator[Any]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise EyasError(
            f"{source.repo}: splits of the hub need the package 'datasets', not installed",
            hint="pip install datasets, or name the files in source.path",
        ) from None
    yield from datasets.load_dataset(
        source.repo,
        source.subset,
        revision=source.revision,
        split=source.split,
        streaming=True,
    )


def _need(source: Source, name: str) -> str:
    value = getattr(source, name)
    if not value:
        raise EyasError(f"datasets.*.source: kind '{source.kind}' needs '{name}'")
    return str(value)
