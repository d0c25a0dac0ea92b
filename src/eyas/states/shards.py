"""Lay samples out in shards, and write a shard so that a kill leaves either all of it or nothing.

Writes: <store>/<key>/shard-NNNNN.safetensors, and beside it .json with size and sha256.
Source: docs/contracts.md. The key is a digest of all that decides the bytes: mixtures lie side by
side, and going back to an old one extracts nothing. What changes the bytes must raise FORMAT. An
option that came later is left out of key and manifest at its default, so that old stores stay good.
"""

import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import read_json, replacing, sha256_of, write_json
from eyas.records import Sample, Span, canonical_json
from eyas.settings import Extract
from eyas.states.codecs import Parts, state_codec
from eyas.states.layout import (
    SUPERVISED,
    Captured,
    Layout,
    encode,
    final_positions,
    teacher_positions,
)
from eyas.states.teacher import top_tokens

FORMAT = 1
_KEY_DIGITS = 32
_SPARE_BYTES = 1 << 26
_LARGEST = 1e36  # room for float32 sums of 64 such values
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
    kept_rows = SUPERVISED if settings.teacher_k else settings.final_rows
    rows = [_identity(sample, kept_rows) for sample in samples]
    options = without_defaults(settings) | {"layers": list(layers)}
    options["codec"] = state_codec(settings.codec).label
    if "final_codec" in options:
        options["final_codec"] = state_codec(settings.final_codec).label
    made_of = [FORMAT, rows, identity, options]
    return hashlib.sha256(canonical_json(made_of)).hexdigest()[:_KEY_DIGITS]


def without_defaults(record: Any) -> dict[str, Any]:
    """Return a dataclass as a dict, without the fields that have their default."""
    kept = {
        f.name
        for f in fields(record)
        if f.default is MISSING or getattr(record, f.name) != f.default
    }
    return {name: value for name, value in asdict(record).items() if name in kept}


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Cut samples, in order, into runs of at most `shard_tokens` tokens; a longer one is alone.

    Shards are cut into windows by the same rule, in bytes.
    """
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


def is_there(path: Path, tokens: int) -> bool:
    """Tell whether a shard was finished: a glance at size and tokens, where `kept_shard` reads all.

    Raises: EyasError if its description cannot be read.
    """
    sidecar = path.with_suffix(".json")
    if not (path.is_file() and sidecar.is_file()):
        return False
    about = read_json(sidecar)
    return (about["tokens"], about["size_bytes"]) == (tokens, path.stat().st_size)


def write_shard(
    path: Path,
    samples: Sequence[Sample],
    states: Sequence[Captured],
    layout: Layout,
    head_VD: torch.Tensor | None = None,
) -> Shard:
    """Encode samples and write them as a shard; `head_VD` is the target's lm_head, for a teacher.

    Raises: EyasError naming the sample whose states hold inf, NaN or what no codec can hold.
    """
    pairs = zip(samples, states, strict=True)
    rows = [encode_row(s.id, s.spans, captured, layout, head_VD) for s, captured in pairs]
    return write_rows(path, [s.input_ids for s in samples], rows)


def write_rows(path: Path, ids: Sequence[Sequence[int]], rows: Sequence[Parts]) -> Shard:
    """Pack encoded samples end to end into one file; the sidecar comes last and makes it count."""
    sidecar = path.with_suffix(".json")
    sidecar.unlink(missing_ok=True)
    input_ids = np.concatenate([_int32(row) for row in ids])
    parts = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    with replacing(path) as temporary:
        save_file({"input_ids": torch.from_numpy(input_ids), **parts}, temporary)
        size, digest = temporary.stat().st_size, sha256_of(temporary)
    shard = Shard(name=path.name, tokens=len(input_ids), size_bytes=size, sha256=digest)
    write_json(sidecar, asdict(shard))
    return shard


def encode_row(
    sample_id: str,
    spans: Sequence[Span],
    states: Captured,
    layout: Layout,
    head_VD: torch.Tensor | None = None,
) -> Parts:
    """Return a sample's tensors as a shard holds them.

    Raises: EyasError naming the sample if its states hold inf, NaN or what no codec can hold.
    """
    for field, values in (("aux", states.aux_TLD), ("final", states.final_TD)):
        if not (largest := float(values.abs().max())) < _LARGEST:
            raise EyasError(
                f"sample {sample_id}: {field} states: expected finite values below {_LARGEST:g}, "
                f"got {largest:g}",
                hint="check the target's weights and compute dtype",
            )
    kept_RD = states.final_TD[final_positions(layout, len(states.final_TD), spans)]
    top_R2K = None
    if layout.teacher_k:
        assert head_VD is not None
        taught_RD = states.final_TD[teacher_positions(layout, spans)]
        top_R2K = top_tokens(taught_RD, head_VD, layout.teacher_k)
    return encode(layout, states.aux_TLD, kept_RD, top_R2K)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to go on where the disk has less than `needed_bytes` and a little to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise EyasError(
            f"{folder}: expected {(needed_bytes + _SPARE_BYTES) / 1e9:,.2f} GB free, "
            f"got {free / 1e9:,.2f} GB",
            hint="set runtime.store to a bigger disk, or extract.codec to fp8 or int4",
        )


def _identity(sample: Sample, kept_rows: str) -> list[Any]:
    """Return what decides a sample's bytes, beside the target and the options."""
    tokens = hashlib.sha256(_int32(sample.input_ids).tobytes()).hexdigest()
    return [sample.id, tokens, *([sample.spans] if kept_rows == SUPERVISED else [])]


def _int32(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
