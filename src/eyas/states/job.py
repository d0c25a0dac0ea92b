"""An extraction as a value: what goes into which shard, how, and what the index then says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.records import Sample
from eyas.settings import Extract
from eyas.states.layout import Layout, num_final_rows, teacher_positions
from eyas.states.shards import Shard, is_there, plan_shards, shard_path
from eyas.states.size import bytes_per_token
from eyas.states.store import POST_NORM, Manifest, StoredSample, StoreMeta

_FRAME_BYTES = 4096  # at most: a shard's header and its description
_NOTE_BYTES = 256  # at most: what stays of a deleted shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one run of the stage works on."""

    samples: list[Sample]
    splits: list[str]
    runs: list[range]  # samples of each shard
    hidden_size: int
    model_type: str
    dtype: str  # that the states are computed in
    layers: tuple[int, ...]
    layout: Layout
    settings: Extract
    folder: Path  # of the shards
    windows: tuple[range, ...] = ()  # shards on the disk together; none: all are

    def path(self, number: int) -> Path:
        """Return where a shard lies."""
        return shard_path(self.folder, number)

    def tokens(self, number: int) -> int:
        """Return how many rows a shard has."""
        return sum(len(self.samples[row].input_ids) for row in self.runs[number])

    def size_bytes(self, number: int) -> int:
        """Return the bytes that a shard will take."""
        tokens = self.tokens(number)
        rows = [self.samples[row] for row in self.runs[number]]
        final = sum(num_final_rows(self.layout, len(s.input_ids), s.spans) for s in rows)
        top = sum(len(teacher_positions(self.layout, s.spans)) for s in rows)
        per_token = bytes_per_token(
            self.layout,
            num_layers=len(self.layers),
            hidden_size=self.hidden_size,
            final_share=final / tokens,
            teacher_share=top / tokens,
        )
        return round(per_token * tokens)

    def disk_bytes(self, numbers: Sequence[int]) -> int:
        """Return the bytes that shards take with all that belongs to them."""
        return sum(self.size_bytes(number) + _FRAME_BYTES for number in numbers)

    @property
    def kept(self) -> range:
        """The shards that stay: without windows all, else those of validation."""
        return range(self.windows[-1].stop if self.windows else 0, len(self.runs))

    def windows_of_samples(self) -> list[int]:
        """Return the window of every training sample."""
        return [
            window
            for window, shards in enumerate(self.windows)
            for number in shards
            for _ in self.runs[number]
        ]

    def is_there(self, number: int) -> bool:
        """Tell whether a shard is finished."""
        return is_there(self.path(number), self.tokens(number))


def plan_windows(job: Job) -> tuple[range, ...]:
    """Cut the training shards, in order, into windows of at most extract.window_gb.

    Raises: EyasError if a shard alone is larger.
    """
    assert job.settings.window_gb is not None
    train = [n for n, run in enumerate(job.runs) if job.splits[run.start] == "train"]
    sizes = [job.disk_bytes([number]) for number in train]
    room_bytes = int(job.settings.window_gb * 1e9) - _NOTE_BYTES * len(train)
    if sizes and max(sizes) > room_bytes:
        number = sizes.index(max(sizes))
        least_gb = (max(sizes) + _NOTE_BYTES * len(train)) / 1e9
        longest = max(
            (job.samples[row] for row in job.runs[number]), key=lambda s: len(s.input_ids)
        )
        raise EyasError(
            f"extract.window_gb: expected {least_gb:.6g} at least, for {job.path(number).name} of "
            f"{job.tokens(number)} tokens, got {job.settings.window_gb:g}",
            hint="raise it, or lower extract.shard_tokens; a shard is no smaller than its longest "
            f"sample ({longest.id}: {len(longest.input_ids)} tokens; merge.max_tokens)",
        )
    return tuple(plan_shards(sizes, room_bytes))


def build_manifest(job: Job, about: Mapping[str, Any], numbers: Sequence[int]) -> Manifest:
    """Return the index of these shards, which must be there; `about` is of the target."""
    meta = StoreMeta(
        key=job.folder.name,
        target_name=about["name"],
        target_revision=about["revision"],
        template=about["codec"],
        layers=tuple(job.layers),
        layer_axis="layer outputs",
        hidden_size=job.hidden_size,
        codec=job.layout.aux.label,
        compute_dtype=job.dtype,
        final=POST_NORM,
        final_codec=job.layout.final.label,
        final_rows=job.layout.final_rows,
        teacher_k=job.layout.teacher_k,
        final_every=job.layout.final_every,
    )
    entries = []
    for place, number in enumerate(numbers):
        offset = 0
        for row in job.runs[number]:
            sample = job.samples[row]
            entries.append(
                StoredSample(
                    id=sample.id,
                    split=job.splits[row],
                    shard=place,
                    offset=offset,
                    length=len(sample.input_ids),
                    spans=sample.spans,
                )
            )
            offset += len(sample.input_ids)
    files = [Shard(**read_json(job.path(n).with_suffix(".json"))) for n in numbers]
    return Manifest(meta=meta, shards=tuple(files), samples=tuple(entries))
