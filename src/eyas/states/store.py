"""The store of hidden states as its readers see it: a manifest and memory-mapped shards.

Reads and writes: data/hidden_states/manifest.json. Reads: <store>/<key>/shard-NNNNN.safetensors.
Source: docs/contracts.md. Nothing is unpickled; a shard's size and sha256 are checked before use.

Legend: T tokens, D hidden size, L aux layers, R rows that keep their final state.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.records import Span
from eyas.states.codecs import codec_of_label
from eyas.states.layout import (
    Layout,
    expected_tensors,
    final_positions,
    make_layout,
    num_final_rows,
    scatter_rows,
    teacher_positions,
)
from eyas.states.shards import FORMAT, Shard, shard_fault, without_defaults

HINT = "`eyas store pull`, or make it with `dvc repro -f -s extract` (intact shards are kept)"
_WITHOUT_INDEX = "`dvc pull` brings it where it was shared; `dvc repro extract` makes it"
POST_NORM = "post_norm"
Kept = tuple[int, int]  # final states, rows of likeliest tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeta:
    """What the states are: whose, of which layers, how written."""

    key: str  # folder of the shards
    target_name: str
    target_revision: str
    template: str  # the target's codec: how its prompts were rendered
    layers: tuple[int, ...]  # outputs of these layers, along axis 1 of aux
    layer_axis: str
    hidden_size: int
    codec: str  # label of the codec of aux states
    compute_dtype: str
    final: str  # post_norm: the state that feeds lm_head
    final_codec: str = "bf16"  # label
    final_rows: str = "all"  # all | supervised: which rows keep their final state
    teacher_k: int | None = None  # likeliest tokens of a supervised row
    final_every: int = 1  # of `final_rows`, each n-th keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """Where a sample lies."""

    id: str
    split: str  # train | val
    shard: int
    offset: int  # its first row
    length: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole index."""

    meta: StoreMeta
    shards: tuple[Shard, ...]
    samples: tuple[StoredSample, ...]
    windows: dict[str, Any] | None = None  # options of extract; the rest is then validation alone


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStates:
    """One sample with its states, float32."""

    input_ids: torch.Tensor  # int64 [T]
    mask_T: torch.Tensor  # bool: tokens of a reply
    aux_TLD: torch.Tensor
    final_TD: torch.Tensor  # NaN in rows that the store did not keep
    top_T2K: torch.Tensor | None = None  # likeliest ids, log-probabilities; None: none are stored


class Store:
    """Read samples by id; shards are opened on first use and stay mapped."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.meta = manifest.meta
        self.entries = {sample.id: sample for sample in manifest.samples}
        self.samples = tuple(self.entries)
        self._shards = manifest.shards
        self._folder = folder / manifest.meta.key
        self._layout = layout_of(manifest.meta)
        self._starts, self._kept_rows = _count_rows(self._layout, manifest.samples)
        self._open: dict[int, Any] = {}

    def ids_of(self, split: str) -> tuple[str, ...]:
        """Return the ids of one split, in order."""
        return tuple(s.id for s in self.entries.values() if s.split == split)

    def read(self, sample_id: str) -> SampleStates:
        """Return a sample's ids, reply mask and states.

        Raises: EyasError if the sample is unknown or its shard is missing, cut, altered, or not
            written as the manifest says.
        """
        if sample_id not in self.entries:
            raise EyasError(f"hidden-state store: no sample '{sample_id}'", hint=HINT)
        entry = self.entries[sample_id]
        file = self._shard(entry.shard)
        mask_T = torch.zeros(entry.length, dtype=torch.bool)
        for start, end in entry.spans:
            mask_T[start:end] = True
        return SampleStates(
            input_ids=file.get_slice("input_ids")[_rows(entry.offset, entry.length)].long(),
            mask_T=mask_T,
            aux_TLD=self._vectors(file, "aux", _rows(entry.offset, entry.length)),
            final_TD=self._final(file, entry),
            top_T2K=self._top(file, entry) if self._layout.teacher_k else None,
        )

    def close(self) -> None:
        """Let go of all files, so that a deleted one gives its room back; read opens them anew."""
        self._open.clear()

    def _final(self, file: Any, entry: StoredSample) -> torch.Tensor:
        positions_R = final_positions(self._layout, entry.length, entry.spans)
        rows = _rows(self._starts[entry.id][0], len(positions_R))
        return scatter_rows(self._vectors(file, "final", rows), positions_R, entry.length)

    def _top(self, file: Any, entry: StoredSample) -> torch.Tensor:
        positions_R = teacher_positions(self._layout, entry.spans)
        rows = _rows(self._starts[entry.id][1], len(positions_R))
        return scatter_rows(file.get_slice("teacher.top")[rows], positions_R, entry.length)

    def _vectors(self, file: Any, field: str, rows: slice) -> torch.Tensor:
        codec = self._layout.aux if field == "aux" else self._layout.final
        head = f"{field}."
        names = [name for name in sorted(file.keys()) if name.startswith(head)]
        parts = {name.removeprefix(head): file.get_slice(name)[rows] for name in names}
        return codec.decode(parts, self.meta.hidden_size)

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            shard = self._shards[number]
            path = self._folder / shard.name
            kept_rows = self._kept_rows[number]
            if fault := shard_fault(path, shard) or _layout_fault(
                path, shard, self.meta, kept_rows
            ):
                raise EyasError(fault, hint=HINT)
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]


def layout_of(meta: StoreMeta) -> Layout:
    """Return how a store's vectors are written.

    Raises: EyasError for a codec, or a version of one, that this release cannot read.
    """
    aux, final = (codec_of_label(label).name for label in (meta.codec, meta.final_codec))
    return make_layout(aux, final, meta.final_rows, meta.teacher_k, meta.final_every)


def open_store(manifest: Path, folder: Path) -> Store:
    """Open the store that a manifest describes; `folder` is runtime.store.

    Raises: EyasError if the manifest is missing, broken, of another format or in unknown codecs.
    """
    return Store(read_manifest(manifest), folder)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the index; equal stores give equal bytes."""
    meta = without_defaults(manifest.meta)
    value = {k: v for k, v in dataclasses.asdict(manifest).items() if v is not None}
    write_json(path, {"format": FORMAT, **value, "meta": meta})


def read_manifest(path: Path) -> Manifest:
    """Read the index strictly."""
    value = read_json(path, hint=_WITHOUT_INDEX)
    got = value.get("format") if isinstance(value, dict) else None
    if got != FORMAT:
        raise EyasError(
            f"{path}: expected a manifest of format {FORMAT}, got {got}", hint=_WITHOUT_INDEX
        )
    try:
        meta = StoreMeta(**value["meta"])
        return Manifest(
            meta=dataclasses.replace(meta, layers=tuple(meta.layers)),
            shards=tuple(Shard(**shard) for shard in value["shards"]),
            samples=tuple(_sample(sample) for sample in value["samples"]),
            windows=value.get("windows"),
        )
    except (KeyError, TypeError) as error:
        raise EyasError(f"{path}: not a manifest ({error})", hint=_WITHOUT_INDEX) from None


def verify(manifest: Path, folder: Path) -> list[str]:
    """Return every fault of a store, a line each: files, digests, tensors, rows without a place."""
    try:
        index = read_manifest(manifest)
        layout = layout_of(index.meta)
    except EyasError as error:
        return [str(error)]
    home = folder / index.meta.key
    kept_rows = _count_rows(layout, index.samples)[1]
    faults = [
        shard_fault(home / shard.name, shard)
        or _layout_fault(home / shard.name, shard, index.meta, kept_rows[number])
        for number, shard in enumerate(index.shards)
    ]
    return [fault for fault in faults if fault] + _row_faults(index.shards, index.samples)


def _rows(start: int, count: int) -> slice:
    return slice(start, start + count)


def _count_rows(
    layout: Layout, samples: Sequence[StoredSample]
) -> tuple[dict[str, Kept], defaultdict[int, Kept]]:
    """Return where each sample's final states and likeliest tokens begin; and each shard's rows."""
    starts: dict[str, Kept] = {}
    rows: defaultdict[int, Kept] = defaultdict(lambda: (0, 0))
    for sample in samples:
        final, top = starts[sample.id] = rows[sample.shard]
        final += num_final_rows(layout, sample.length, sample.spans)
        rows[sample.shard] = (final, top + len(teacher_positions(layout, sample.spans)))
    return starts, rows


def _layout_fault(path: Path, shard: Shard, meta: StoreMeta, kept_rows: Kept) -> str | None:
    """Return how a shard's tensors differ from what the manifest says."""
    expected = expected_tensors(
        layout_of(meta),
        tokens=shard.tokens,
        final_rows=kept_rows[0],
        teacher_rows=kept_rows[1],
        num_layers=len(meta.layers),
        hidden_size=meta.hidden_size,
    )
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        got = {name: (part[:0].dtype, part.get_shape()) for name, part in slices.items()}
    if got == expected:
        return None
    differing = sorted(name for name in expected | got if expected.get(name) != got.get(name))
    return (
        f"{path}: expected tensors {[(n, expected.get(n)) for n in differing]}, "
        f"got {[(n, got.get(n)) for n in differing]}"
    )


def _row_faults(shards: Sequence[Shard], samples: Sequence[StoredSample]) -> list[str]:
    """Each shard's rows must be its samples, end to end."""
    faults, ends = [], [0] * len(shards)
    for sample in samples:
        if not sample.shard < len(shards) or sample.offset != ends[sample.shard]:
            faults.append(
                f"sample {sample.id}: shard {sample.shard} has no row {sample.offset} free"
            )
            continue
        ends[sample.shard] += sample.length
    for shard, end in zip(shards, ends, strict=True):
        if end != shard.tokens:
            faults.append(f"{shard.name}: expected {shard.tokens} rows, samples fill {end}")
    return faults


def _sample(value: dict[str, Any]) -> StoredSample:
    sample = StoredSample(**value)
    return dataclasses.replace(sample, spans=tuple((start, end) for start, end in sample.spans))
