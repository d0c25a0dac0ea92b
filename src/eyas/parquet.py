"""Samples on disk: one parquet row a sample, ids as int32 lists, spans as flat pairs.

Source: docs/contracts.md. pyarrow is imported on use, so that other modules start at once.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import replacing
from eyas.records import Sample

_ROWS_PER_BATCH = 1024


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


def _columns(samples: list[Sample]) -> dict[str, list[Any]]:
    return {
        "id": [s.id for s in samples],
        "dataset": [s.dataset for s in samples],
        "input_ids": [s.input_ids for s in samples],
        "spans": [[edge for span in s.spans for edge in span] for s in samples],
        "temperature": [s.temperature for s in samples],
        "provider": [s.provider for s in samples],
        "flags": [s.flags for s in samples],
        "completion_tokens_billed": [s.completion_tokens_billed for s in samples],
        "conversation": [s.conversation for s in samples],
    }


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Write samples as zstd parquet, atomically and in bounded memory; return their number."""
    import itertools

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, count = iter(samples), 0
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, _schema(), compression="zstd") as writer,
    ):
        while batch := list(itertools.islice(rows, _ROWS_PER_BATCH)):
            writer.write_table(pa.table(_columns(batch), schema=_schema()))
            count += len(batch)
    return count


def read_samples(path: Path, *, hint: str | None = None) -> Iterator[Sample]:
    """Yield the samples of a parquet file in order; a missing or foreign file is an EyasError."""
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
    for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
        for row in batch.to_pylist():
            edges = row["spans"]
            yield Sample(
                id=row["id"],
                dataset=row["dataset"],
                input_ids=tuple(row["input_ids"]),
                spans=tuple(zip(edges[::2], edges[1::2], strict=True)),
                temperature=row["temperature"],
                provider=row["provider"],
                flags=tuple(row["flags"]),
                completion_tokens_billed=row["completion_tokens_billed"],
                conversation=row["conversation"],
            )
