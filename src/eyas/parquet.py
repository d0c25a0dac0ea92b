"""Samples on disk: one parquet row a sample, ids as int32 lists, spans as flat pairs.

Source: docs/contracts.md. pyarrow is imported on use, so that other modules start at once.
Files of any size are written and read in bounded memory: what is held at once is a row group.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import replacing
from eyas.records import Sample

_GROUP_ROWS, _GROUP_TOKENS = 1024, 1 << 22  # of a row group, whichever is reached first
_ROWS_READ = 64  # turned into Python's numbers at once: 36 bytes a token
Ids = Callable[[Any], Sequence[int]]


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()),
            ("dataset", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("spans", pa.list_(pa.int32())),
            ("temperature", pa.float32()),
            ("provider", pa.string()),
            ("flags", pa.list_(pa.string())),
            ("completion_tokens_billed", pa.int32()),
            ("conversation", pa.string()),
        ]
    )


def _columns(samples: list[Sample]) -> dict[str, Any]:
    return {
        "id": [s.id for s in samples],
        "dataset": [s.dataset for s in samples],
        "input_ids": _id_lists([s.input_ids for s in samples]),
        "spans": [[edge for span in s.spans for edge in span] for s in samples],
        "temperature": [s.temperature for s in samples],
        "provider": [s.provider for s in samples],
        "flags": [s.flags for s in samples],
        "completion_tokens_billed": [s.completion_tokens_billed for s in samples],
        "conversation": [s.conversation for s in samples],
    }


def _id_lists(rows: list[Sequence[int]]) -> Any:
    """Return the ids as an Arrow column, without a Python object for each that has none."""
    import numpy as np
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    ids = np.empty(offsets[-1], dtype=np.int32)
    for start, row in zip(offsets, rows, strict=False):
        ids[start : start + len(row)] = row
    return pa.ListArray.from_arrays(offsets, ids)


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Write samples as zstd parquet, atomically and in bounded memory; return their number.

    An exception out of `samples` leaves the file as it was.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, _schema(), compression="zstd") as writer,
    ):
        for group in _groups(samples):
            writer.write_table(pa.table(_columns(group), schema=_schema()))
            count += len(group)
    return count


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        if group and (len(group) == _GROUP_ROWS or tokens + len(sample.input_ids) > _GROUP_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample.input_ids)
    if group:
        yield group


def write_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Write NumPy arrays of one length as the columns of a zstd parquet file, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(pa.table(dict(columns)), temporary, compression="zstd")


def read_samples(path: Path, *, hint: str | None = None) -> Iterator[Sample]:
    """Yield the samples of a parquet file in order; a missing or foreign file is an EyasError."""
    return _read(path, _as_tuple, hint)


def read_packed(path: Path, *, hint: str | None = None) -> Iterator[Sample]:
    """Yield the samples as `read_samples` does, but `packed`."""
    return _read(path, _as_array, hint)


def _as_tuple(ids: Any) -> Sequence[int]:
    return tuple(ids.tolist())


def _as_array(ids: Any) -> Sequence[int]:
    return array("i", ids.tobytes())


def _read(path: Path, shape: Ids, hint: str | None) -> Iterator[Sample]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise EyasError(f"{path}: no such file", hint=hint)
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise EyasError(f"{path}: not a parquet file ({error})", hint=hint) from None
    if missing := set(_schema().names) - set(file.schema_arrow.names):
        raise EyasError(f"{path}: columns {sorted(missing)} are missing", hint=hint)
    for batch in file.iter_batches(batch_size=_ROWS_READ):
        yield from _rows(batch, shape)


def _rows(batch: Any, shape: Ids) -> Iterator[Sample]:
    lists = batch.column("input_ids")
    ids, ends = lists.values.to_numpy(), lists.offsets.to_pylist()
    others = batch.drop_columns(["input_ids"]).to_pylist()
    for row, start, end in zip(others, ends, ends[1:], strict=False):
        edges = row["spans"]
        yield Sample(
            id=row["id"],
            dataset=row["dataset"],
            input_ids=shape(ids[start:end]),
            spans=tuple(zip(edges[::2], edges[1::2], strict=True)),
            temperature=row["temperature"],
            provider=row["provider"],
            flags=tuple(row["flags"]),
            completion_tokens_billed=row["completion_tokens_billed"],
            conversation=row["conversation"],
        )
