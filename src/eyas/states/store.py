"""The store of hidden states as its readers see it: a manifest and memory-mapped shards.

Reads and writes: data/hidden_states/manifest.json. Reads: <store>/<key>/shard-NNNNN.safetensors.
Source: docs/contracts.md. Nothing is unpickled; a shard's size and sha256 are checked before use.

Legend: T tokens, D hidden size, L aux layers.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.records import Span
from eyas.states.codecs import state_codec
from eyas.states.shards import FORMAT, Shard, shard_fault

HINT = "make it again with `dvc repro -f -s extract` (intact shards are kept)"
POST_NORM = "post_norm"


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
    codec: str
    compute_dtype: str
    final: str  # post_norm: the state that feeds lm_head


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStates:
    """One sample with its states, float32."""

    input_ids: torch.Tensor  # int64 [T]
    mask_T: torch.Tensor  # bool: tokens of a reply
    aux_TLD: torch.Tensor
    final_TD: torch.Tensor


class Store:
    """Read samples by id; shards are opened on first use and stay mapped."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.meta = manifest.meta
        self.entries = {sample.id: sample for sample in manifest.samples}
        self.samples = tuple(self.entries)
        self._shards = manifest.shards
        self._folder = folder / manifest.meta.key
        self._codec = state_codec(manifest.meta.codec)
        self._open: dict[int, Any] = {}

    def ids_of(self, split: str) -> tuple[str, ...]:
        """Return the ids of one split, in order."""
        return tuple(s.id for s in self.entries.values() if s.split == split)

    def read(self, sample_id: str) -> SampleStates:
        """Return a sample's ids, reply mask and states.

        Raises: EyasError if the sample is unknown or its shard is missing, cut or altered.
        """
        if sample_id not in self.entries:
            raise EyasError(f"hidden-state store: no sample '{sample_id}'", hint=HINT)
        entry = self.entries[sample_id]
        rows = slice(entry.offset, entry.offset + entry.length)
        file = self._shard(entry.shard)
        names = set(file.keys()) - {"input_ids"}
        parts = {name: file.get_slice(name)[rows] for name in names}
        mask_T = torch.zeros(entry.length, dtype=torch.bool)
        for start, end in entry.spans:
            mask_T[start:end] = True
        return SampleStates(
            input_ids=file.get_slice("input_ids")[rows].long(),
            mask_T=mask_T,
            aux_TLD=self._decode("aux", parts),
            final_TD=self._decode("final", parts),
        )

    def _decode(self, field: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        head = f"{field}."
        own = {name.removeprefix(head): t for name, t in parts.items() if name.startswith(head)}
        return self._codec.decode(own)

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            shard = self._shards[number]
            path = self._folder / shard.name
            if fault := shard_fault(path, shard):
                raise EyasError(fault, hint=HINT)
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]


def open_store(manifest: Path, folder: Path) -> Store:
    """Open the store that a manifest describes; `folder` is runtime.store.

    Raises: EyasError if the manifest is missing, broken or of another format.
    """
    return Store(read_manifest(manifest), folder)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the index; equal stores give equal bytes."""
    write_json(path, {"format": FORMAT, **dataclasses.asdict(manifest)})


def read_manifest(path: Path) -> Manifest:
    """Read the index strictly."""
    value = read_json(path, hint=HINT)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise EyasError(f"{path}: expected a manifest of format {FORMAT}", hint=HINT)
    try:
        meta = StoreMeta(**value["meta"])
        return Manifest(
            meta=dataclasses.replace(meta, layers=tuple(meta.layers)),
            shards=tuple(Shard(**shard) for shard in value["shards"]),
            samples=tuple(_sample(sample) for sample in value["samples"]),
        )
    except (KeyError, TypeError) as error:
        raise EyasError(f"{path}: not a manifest ({error})", hint=HINT) from None


def verify(manifest: Path, folder: Path) -> list[str]:
    """Return every fault of a store, a line each: files, digests, rows that no shard holds."""
    try:
        index = read_manifest(manifest)
    except EyasError as error:
        return [str(error)]
    home = folder / index.meta.key
    faults = [shard_fault(home / shard.name, shard) for shard in index.shards]
    return [fault for fault in faults if fault] + _row_faults(index.shards, index.samples)


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
