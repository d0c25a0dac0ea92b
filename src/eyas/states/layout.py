"""What a shard holds: which tensors, in which codec, and the final state of which rows.

The loss reads the final state at position p iff p and p + 1 lie in one reply and p > 0 (no row of
the drafter stands before position 0). `final_rows: supervised` keeps those rows only:

    position      0    1    2    3    4    5          reply = positions 2..4
    final state   -    -    a    b    -    -          rows 2 (a -> b) and 3 (b -> the end of turn)

The ridge start regresses the final state; over such a store it learns from the kept rows alone.
Source: eyas/drafter/packing.py `predictions` (a test in tests/states compares the two).

Legend: T tokens, L aux layers, D hidden size, R rows that keep their final state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.errors import EyasError
from eyas.records import Span
from eyas.states.codecs import StateCodec, codec_of_label, state_codec

_FINAL_CODECS = ("fp32", "bf16", "fp8")  # four bits would blur the teacher
ALL, SUPERVISED = "all", "supervised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The states of one row, in the dtype that the target computed them in."""

    aux_TLD: torch.Tensor
    final_TD: torch.Tensor  # after the final norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a store writes its vectors."""

    aux: StateCodec
    final: StateCodec
    final_rows: str  # all | supervised


def make_layout(codec: str, final_codec: str, final_rows: str) -> Layout:
    """Return the layout that extract's options ask for.

    Raises: EyasError for an option's value that is unknown.
    """
    for option, allowed, value in (
        ("final_codec", _FINAL_CODECS, final_codec),
        ("final_rows", (ALL, SUPERVISED), final_rows),
    ):
        if value not in allowed:
            raise EyasError(f"extract.{option}: expected {' | '.join(allowed)}, got '{value}'")
    return Layout(aux=state_codec(codec), final=state_codec(final_codec), final_rows=final_rows)


def layout_of_labels(codec: str, final_codec: str, final_rows: str) -> Layout:
    """Return the layout of a store from its manifest.

    Raises: EyasError for what this release cannot read.
    """
    if final_rows not in (ALL, SUPERVISED):
        raise EyasError(
            f"hidden-state store: final_rows: expected {ALL} | {SUPERVISED}, got '{final_rows}'"
        )
    return Layout(
        aux=codec_of_label(codec), final=codec_of_label(final_codec), final_rows=final_rows
    )


def num_final_rows(layout: Layout, length: int, spans: Sequence[Span]) -> int:
    """Return R of a sample."""
    if layout.final_rows == ALL:
        return length
    return sum(len(run) for run in _supervised(spans))


def final_positions(layout: Layout, length: int, spans: Sequence[Span]) -> torch.Tensor:
    """Return the positions of a sample that keep their final state, ascending, int64 [R]."""
    if layout.final_rows == ALL:
        return torch.arange(length)
    return torch.tensor([p for run in _supervised(spans) for p in run], dtype=torch.int64)


def scatter_final(final_RD: torch.Tensor, positions_R: torch.Tensor, length: int) -> torch.Tensor:
    """Put rows back in their places, [T, D]; the others are NaN, so that none is used unnoticed."""
    if len(positions_R) == length:
        return final_RD
    final_TD = final_RD.new_full((length, final_RD.shape[1]), torch.nan)
    final_TD[positions_R] = final_RD
    return final_TD


def encode(
    layout: Layout, aux_TLD: torch.Tensor, final_RD: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """Return a shard's tensors for these vectors, by name."""
    fields = {"aux": layout.aux.encode(aux_TLD), "final": layout.final.encode(final_RD)}
    return {f"{f}.{name}": part for f, parts in fields.items() for name, part in parts.items()}


def expected_tensors(
    layout: Layout, *, tokens: int, final_rows: int, num_layers: int, hidden_size: int
) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of every tensor of a shard, by name."""
    one = encode(layout, torch.zeros(1, num_layers, hidden_size), torch.zeros(1, hidden_size))
    rows = {"aux": tokens, "final": final_rows}
    states = {k: (t.dtype, [rows[k.split(".")[0]], *t.shape[1:]]) for k, t in one.items()}
    return {"input_ids": (torch.int32, [tokens]), **states}


def _supervised(spans: Sequence[Span]) -> list[range]:
    return [range(max(start, 1), end - 1) for start, end in spans]
