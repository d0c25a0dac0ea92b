"""Lay samples out in shards, and write a shard so that a kill leaves either all of it or nothing.

Writes: <store>/<key>/shard-NNNNN.safetensors, and beside it .json with size and sha256.
Source: docs/contracts.md. The key is a digest of all that decides the bytes: mixtures lie side by
side, and going back to an old one extracts nothing. What changes the bytes must raise FORMAT.
"""

import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import read_json, replacing, sha256_of, write_json
from eyas.records import Sample, canonical_json
from eyas.settings import Extract
from eyas.states.capture_hf import Captured
from eyas.states.codecs import StateCodec

FORMAT = 1
_KEY_DIGITS = 32
_SPARE_BYTES = 1 << 26
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of the store."""

    name: str
    tokens: int
    size_bytes: int
    sha256: str


def store_key(
    samples: Sequence[Sample], identity: str, layers: Sequence[int], settings: Extract
) -> str:
    """Return the name of the store's folder: a digest of samples, target weights and settings."""
    rows = [[s.id, hashlib.sha256(_int32(s.input_ids).tobytes()).hexdigest()] for s in samples]
    made_of = [FORMAT, rows, identity, asdict(settings) | {"layers": list(layers)}]
    return hashlib.sha256(canonical_json(made_of)).hexdigest()[:_KEY_DIGITS]


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Cut samples, in order, into runs of at most `shard_tokens` tokens; a longer one is alone."""
    runs: list[range] = []
    start = used = 0
    for row, length in enumerate(lengths):
        if row > start and used + length > shard_tokens:
            runs.append(range(start, row))
            start, used = row, 0
        used += length
    if len(lengths) > start:
        runs.append(range(start, len(lengths)))
    return runs


def shard_path(folder: Path, number: int) -> Path:
    """Return where the shard of this number lies."""
    return folder / f"shard-{number:05d}.safetensors"


def kept_shard(path: Path) -> Shard | None:
    """Return a shard that is complete and unaltered; None, with a warning where it is not."""
    sidecar = path.with_suffix(".json")
    if not (path.is_file() and sidecar.is_file()):
        return None
    try:
        shard = Shard(**read_json(sidecar))
    except (EyasError, TypeError) as error:
        log.warning("%s: not a shard's description (%s); it is made again", sidecar, error)
        return None
    if fault := shard_fault(path, shard):
        log.warning("%s; it is made again", fault)
        return None
    return shard


def shard_fault(path: Path, shard: Shard) -> str | None:
    """Return what is wrong with a shard's file: missing, cut, or altered."""
    if not path.is_file():
        return f"{path}: no such file"
    if (size := path.stat().st_size) != shard.size_bytes:
        return f"{path}: expected {shard.size_bytes} bytes, got {size}"
    if (digest := sha256_of(path)) != shard.sha256:
        return f"{path}: expected sha256 {shard.sha256}, got {digest}"
    return None


def write_shard(
    path: Path, samples: Sequence[Sample], states: Sequence[Captured], codec: StateCodec
) -> Shard:
    """Pack samples end to end into one file; the sidecar comes last and makes it count."""
    sidecar = path.with_suffix(".json")
    sidecar.unlink(missing_ok=True)
    ids = np.concatenate([_int32(s.input_ids) for s in samples])
    parts = {
        **_encoded("aux", [s.aux_TLD for s in states], codec),
        **_encoded("final", [s.final_TD for s in states], codec),
    }
    with replacing(path) as temporary:
        save_file({"input_ids": torch.from_numpy(ids), **parts}, temporary)
        size, digest = temporary.stat().st_size, sha256_of(temporary)
    shard = Shard(name=path.name, tokens=len(ids), size_bytes=size, sha256=digest)
    write_json(sidecar, asdict(shard))
    return shard


def prepare_folder(folder: Path, needed_bytes: int) -> None:
    """Make the store's folder, clear what a kill left half-written, check the free space.

    Raises: EyasError if the disk has less than `needed_bytes` and a little to spare.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".shard-*"):
        leftover.unlink()
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise EyasError(
            f"{folder}: expected {(needed_bytes + _SPARE_BYTES) / 1e9:,.2f} GB free, "
            f"got {free / 1e9:,.2f} GB",
            hint="set runtime.store to a bigger disk, or lower merge.caps",
        )


def _encoded(
    field: str, states: Sequence[torch.Tensor], codec: StateCodec
) -> dict[str, torch.Tensor]:
    rows = [codec.encode(state) for state in states]
    return {f"{field}.{part}": torch.cat([row[part] for row in rows]) for part in rows[0]}


def _int32(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
