"""How hidden states become bytes: named pairs of encode and decode.

Source: docs/contracts.md. A codec turns float32 vectors [T, ..., D] into named tensors led by T.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from eyas.errors import EyasError

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCodec:
    """One way to write vectors of size D."""

    name: str
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts], torch.Tensor]  # float32, the shape that was encoded
    vector_bytes: Callable[[int], int]  # of D


def _encode_bf16(states: torch.Tensor) -> Parts:
    return {"values": states.to(torch.bfloat16)}


def _decode_bf16(parts: Parts) -> torch.Tensor:
    return parts["values"].float()


_CODECS = {
    "bf16": StateCodec(
        name="bf16",
        encode=_encode_bf16,
        decode=_decode_bf16,
        vector_bytes=lambda hidden_size: 2 * hidden_size,
    )
}


def state_codec(name: str) -> StateCodec:
    """Return a codec by its name in the manifest.

    Raises: EyasError for an unknown one.
    """
    if name not in _CODECS:
        raise EyasError(f"extract.codec: expected {' | '.join(_CODECS)}, got '{name}'")
    return _CODECS[name]
