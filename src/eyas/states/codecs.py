"""How hidden states become bytes: named pairs of encode and decode.

A codec turns vectors [T, ..., D] into named tensors led by T, and back into float32.

    fp32  4 D bytes        exact
    bf16  2 D bytes        exact for bf16 states; relative error 0.2 % for float32 ones
    fp8   D + 4 bytes      e4m3, one float32 scale a vector, so one a token and layer; 2.2 %
    int4  about 0.56 D     rotated groups of 64, the largest values apart; 6 % (states/int4.py)

The errors are of SmolLM2-135M's states, relative to a vector's norm (RESULTS.md).
Source: docs/contracts.md. fp8 with one scale over all layers costs shallow layers their precision:
their states are a hundredth of the deep ones'.

Legend: T tokens, D hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from eyas.errors import EyasError
from eyas.states import int4

Parts = Mapping[str, torch.Tensor]

_FP8_MAX = 448.0  # largest e4m3 number; torch makes NaN of what rounds above it
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCodec:
    """One way to write vectors of size D."""

    name: str  # extract.codec
    label: str  # in the manifest: with the version of the form, where a form can have versions
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, int], torch.Tensor]  # of parts and D: float32, the encoded shape


def encode_bf16(states: torch.Tensor) -> Parts:
    """Round to bfloat16."""
    return {"values": states.to(torch.bfloat16)}


def decode_wide(parts: Parts, _width: int) -> torch.Tensor:
    """Return plain values in float32."""
    return parts["values"].float()


def encode_fp8(states: torch.Tensor) -> Parts:
    """Scale each vector so that its largest value is e4m3's largest, and round to e4m3."""
    wide = states.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp(min=_TINY)
    return {"values": (wide / scales).to(torch.float8_e4m3fn), "scales": scales.squeeze(-1)}


def decode_fp8(parts: Parts, _width: int) -> torch.Tensor:
    """Return values times scale in float32.

    By bits, ten times as fast as torch's own conversion on a CPU (8.3 against 0.8 GB of float32 a
    second and core): seven places to the left, a byte's exponent and fraction stand where float16
    has them, for 1/256 of the value; sign extension leaves a copy of the sign in bit 14.
    """
    bits = parts["values"].view(torch.int8).to(torch.int16)
    halves = bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)
    return halves.float().mul_(parts["scales"].unsqueeze(-1) * 256)


_CODECS = {
    codec.name: codec
    for codec in (
        StateCodec(
            name="fp32", label="fp32", encode=lambda s: {"values": s.float()}, decode=decode_wide
        ),
        StateCodec(name="bf16", label="bf16", encode=encode_bf16, decode=decode_wide),
        StateCodec(name="fp8", label="fp8/1", encode=encode_fp8, decode=decode_fp8),
        StateCodec(name="int4", label="int4/1", encode=int4.encode, decode=int4.decode),
    )
}


def state_codec(name: str, *, option: str = "extract.codec") -> StateCodec:
    """Return a codec by its name.

    Raises: EyasError for an unknown one, naming the option.
    """
    if name not in _CODECS:
        raise EyasError(f"{option}: expected {' | '.join(_CODECS)}, got '{name}'")
    return _CODECS[name]


def codec_of_label(label: str) -> StateCodec:
    """Return the codec that wrote a store, by its label in the manifest.

    Raises: EyasError for an unknown codec, or another version of one.
    """
    known = {codec.label: codec for codec in _CODECS.values()}
    if label not in known:
        raise EyasError(
            f"hidden-state store: codec: expected {' | '.join(known)}, got '{label}'",
            hint="another release of eyas wrote this store: re-run extract, or read it with that",
        )
    return known[label]


def vector_bytes(codec: StateCodec, hidden_size: int) -> int:
    """Return the bytes of one stored vector."""
    return sum(part.nbytes for part in codec.encode(torch.zeros(1, hidden_size)).values())
