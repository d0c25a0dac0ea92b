"""What a shard holds: which tensors, in which codec, and the final state of which rows.

The loss reads the final state at position p iff p and p + 1 lie in one reply and p > 0 (no row of
the drafter stands before position 0). `final_rows: supervised` keeps those rows only:

    position      0    1    2    3    4    5          reply = positions 2..4
    final state   -    -    a    b    -    -          rows 2 (a -> b) and 3 (b -> the end of turn)

The ridge start regresses the final state; over such a store it learns from the kept rows alone.
`teacher_k` keeps the likeliest tokens of each supervised row (states/teacher.py); then the loss
reads no final state, and `final_every: n` keeps it of rows with p % n = 0 alone, for that start.
Source: eyas/drafter/packing.py `predictions` (a test in tests/states compares the two).

Legend: T tokens, L aux layers, D hidden size, R rows that keep something, K tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.errors import EyasError
from eyas.records import Span
from eyas.states.codecs import StateCodec, state_codec

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
    teacher_k: int | None = None
    final_every: int = 1


def make_layout(
    codec: str,
    final_codec: str,
    final_rows: str,
    teacher_k: int | None = None,
    final_every: int = 1,
) -> Layout:
    """Return the layout that extract's options ask for.

    Raises: EyasError for an option's value that is unknown.
    """
    for option, allowed, value in (
        ("final_codec", _FINAL_CODECS, final_codec),
        ("final_rows", (ALL, SUPERVISED), final_rows),
    ):
        if value not in allowed:
            raise EyasError(f"extract.{option}: expected {' | '.join(allowed)}, got '{value}'")
    if teacher_k is not None and teacher_k < 1:
        raise EyasError(f"extract.teacher_k: expected 1 or more, or null, got {teacher_k}")
    if final_every < 1 or (final_every > 1 and teacher_k is None):
        raise EyasError(
            f"extract.final_every: expected 1, or more with extract.teacher_k, got {final_every}",
            hint="without extract.teacher_k the loss reads the final state of every row",
        )
    return Layout(
        aux=state_codec(codec),
        final=state_codec(final_codec),
        final_rows=final_rows,
        teacher_k=teacher_k,
        final_every=final_every,
    )


def num_final_rows(layout: Layout, length: int, spans: Sequence[Span]) -> int:
    """Return how many rows of a sample keep their final state."""
    return sum(map(len, _final_runs(layout, length, spans)))


def final_positions(layout: Layout, length: int, spans: Sequence[Span]) -> torch.Tensor:
    """Return the positions of a sample that keep their final state, ascending, int64 [R]."""
    return _positions(_final_runs(layout, length, spans))


def teacher_positions(layout: Layout, spans: Sequence[Span]) -> torch.Tensor:
    """Return the positions of a sample that keep their likeliest tokens, ascending, int64 [R]."""
    return _positions(_supervised(spans) if layout.teacher_k else [])


def scatter_rows(rows: torch.Tensor, positions_R: torch.Tensor, length: int) -> torch.Tensor:
    """Put rows back in their places, [T, ...]; NaN elsewhere, so that none is used unnoticed."""
    if len(positions_R) == length:
        return rows
    found = rows.new_full((length, *rows.shape[1:]), torch.nan)
    found[positions_R] = rows
    return found


def encode(
    layout: Layout,
    aux_TLD: torch.Tensor,
    final_RD: torch.Tensor,
    top_R2K: torch.Tensor | None = None,
) -> Mapping[str, torch.Tensor]:
    """Return a shard's tensors for these vectors and likeliest tokens, by name."""
    fields = {"aux": layout.aux.encode(aux_TLD), "final": layout.final.encode(final_RD)}
    fields |= {} if top_R2K is None else {"teacher": {"top": top_R2K}}
    return {f"{f}.{name}": part for f, parts in fields.items() for name, part in parts.items()}


def expected_tensors(
    layout: Layout,
    *,
    tokens: int,
    final_rows: int,
    teacher_rows: int = 0,
    num_layers: int,
    hidden_size: int,
) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of every tensor of a shard, by name."""
    top_12K = torch.zeros(1, 2, layout.teacher_k) if layout.teacher_k else None
    aux_1LD, final_1D = torch.zeros(1, num_layers, hidden_size), torch.zeros(1, hidden_size)
    one = encode(layout, aux_1LD, final_1D, top_12K)
    rows = {"aux": tokens, "final": final_rows, "teacher": teacher_rows}
    states = {k: (t.dtype, [rows[k.split(".")[0]], *t.shape[1:]]) for k, t in one.items()}
    return {"input_ids": (torch.int32, [tokens]), **states}


def _final_runs(layout: Layout, length: int, spans: Sequence[Span]) -> list[range]:
    runs = [range(length)] if layout.final_rows == ALL else _supervised(spans)
    n = layout.final_every
    return [range(-(-run.start // n) * n, run.stop, n) for run in runs]


def _positions(runs: Sequence[range]) -> torch.Tensor:
    steps = (torch.arange(run.start, run.stop, run.step) for run in runs if run)
    return torch.cat([torch.arange(0), *steps])


def _supervised(spans: Sequence[Span]) -> list[range]:
    return [range(max(start, 1), end - 1) for start, end in spans]
