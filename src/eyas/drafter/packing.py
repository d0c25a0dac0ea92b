"""Whole documents packed into optimiser steps, and which rows of them count.

Rows: the drafter's row t stands on the target's state of x[t]. At training-time-test (TTT) step k
it reads token x[t+1+k] and predicts x[t+2+k]. It counts iff both lie in one reply. A prediction is
named by the position p = t+1+k of the token it reads: that p belongs to row p-1-k at step k.

    position      0    1    2    3    4    5          reply = positions 2..4
    token         U    H    a    b    E    U          (U user, H reply header, E <|im_end|>)
    p = 2 (a->b): row 1 at step 0, row 0 at step 1    row 1 is where a server drafts in round 1:
    p = 3 (b->E): row 2 at step 0, row 1 at step 1      state of H, token a sampled in the prefill
    p = 4 (E->U): never counts: U was not predicted by the target

Legend: T tokens of a pack, D hidden size, L aux layers, P predictions that count,
K likeliest tokens that a store keeps in the final state's place.
Source: EAGLE-3, arXiv 2503.01840, section 3; SpecForge#885 for the off-by-one this avoids.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.records import Span

_SCALE_TOKENS = 100_000  # enough for a feature's size
TRUNCATED_TAIL = 2  # tokens at the end of a cut reply whose ids, rebuilt from text, are not sure


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A sample with its states; `reply_T` numbers the replies from 1, other tokens are 0."""

    input_ids_T: Tensor
    reply_T: Tensor
    aux_TLD: Tensor
    final_TD: Tensor  # after the target's last norm: what feeds lm_head; NaN where not kept
    top_T2K: Tensor | None = None  # K likeliest next ids, their log-probabilities; NaN as above


class Documents(Protocol):
    """What training reads; a stage puts it over the hidden-state store."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every document."""
        ...

    def read(self, index: int) -> Document:
        """Return a document, its states in float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The documents of one optimiser step, end to end in one row."""

    input_ids_T: Tensor
    aux_TLD: Tensor
    final_TD: Tensor
    predictions_P: Tensor  # ascending positions p in the row
    in_vocab_P: Tensor  # bool: the target's favourite there is in the draft vocabulary
    lengths: tuple[int, ...]
    top_T2K: Tensor | None = None

    def to(self, device: torch.device) -> "Pack":
        """Return the pack on a device."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)


def number_replies(length: int, spans: Sequence[Span], *, truncated: bool) -> Tensor:
    """Return `reply_T` for a sample; a truncated one loses its last reply's last two tokens."""
    reply_T = torch.zeros(length, dtype=torch.int32)
    for number, (start, end) in enumerate(spans, start=1):
        cut = TRUNCATED_TAIL if truncated and number == len(spans) else 0
        reply_T[start : max(start, end - cut)] = number
    return reply_T


def predictions(reply_T: Tensor) -> Tensor:
    """Return the positions p at which x[p] and x[p+1] lie in the same reply, ascending.

    Position 0 is none: no row stands before it.
    """
    same_T = (reply_T[1:-1] > 0) & (reply_T[1:-1] == reply_T[2:])
    return same_T.nonzero().flatten() + 1


def part_with_reply(reply_T: Tensor, most_tokens: int) -> slice:
    """Return the first `most_tokens` of a document, or those around a first prediction behind them.

    Of 10 tokens with predictions from 6 on: at most 8 are 0 to 7, at most 4 are 4 to 7.
    """
    found = predictions(reply_T)
    late = len(found) and int(found[0]) >= most_tokens
    begin = int(found[0]) - most_tokens // 2 if late else 0
    return slice(begin, begin + most_tokens)


def plan_epoch(
    lengths: Sequence[int], tokens_per_step: int, seed: int, windows: Sequence[int] = ()
) -> list[list[int]]:
    """Return the document indices of every optimiser step, in a seeded random order.

    A step closes before the document that would take it over `tokens_per_step`; a document longer
    than that is a step of its own. Nothing is cut and each document occurs once.

    `windows`: that of every document. One after another, in a random order, they are gone through
    whole, so that no other need be at hand; a step ends with its window. One is as none:

        documents 0 1 2 3 4 5 in windows 0 0 0 1 1 1, in the order 4 0 5 2 1 3
        windows 1, 0: steps of two are [4 5] [3] [0 2] [1]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    windows = windows or [0] * len(lengths)
    turn = torch.randperm(max(windows, default=0) + 1, generator=generator).tolist()
    order.sort(key=lambda index: turn[windows[index]])
    runs = [list(run) for _, run in groupby(order, key=windows.__getitem__)]
    return [step for run in runs for step in fill(run, lengths, tokens_per_step)]


def fill(order: Sequence[int], lengths: Sequence[int], tokens_per_step: int) -> Iterator[list[int]]:
    """Yield the documents of each step, in order."""
    step: list[int] = []
    used = 0
    for index in order:
        if step and used + lengths[index] > tokens_per_step:
            yield step
            step, used = [], 0
        step.append(index)
        used += lengths[index]
    if step:
        yield step


def aux_scale(documents: Documents) -> Tensor:
    """Return the RMS of each aux feature, rounded to a power of two, [L, D].

    From the first `_SCALE_TOKENS` tokens, position 0 of each document left out (an attention sink
    with features above 1,000 where the median is 3). Powers of two divide without rounding.

    Raises: EyasError if there are no rows to look at, or they hold inf or NaN.
    """
    squares_LD, rows = torch.zeros(()), 0
    for index in range(len(documents.lengths)):
        aux_TLD = documents.read(index).aux_TLD[1:]
        squares_LD = squares_LD + aux_TLD.double().square().sum(0)
        rows += len(aux_TLD)
        if rows >= _SCALE_TOKENS:
            break
    if not rows or not torch.isfinite(squares_LD).all():
        raise EyasError(
            "hidden states: expected finite aux states, got "
            f"{f'inf or NaN in {rows} rows' if rows else 'none: no sample has a supervised token'}",
            hint="re-run extract; of none, see the reject reasons of validate",
        )
    rms_LD = (squares_LD / rows).sqrt().clamp(min=1e-6)
    return rms_LD.log2().round().exp2().float()


class Packer:
    """Reads documents and puts them end to end, asking once for each what the target favours.

    `favourites` maps final states [P, D] to the target's most likely token ids [P]; over a full
    vocabulary that costs as much as a step of training, so the answers are kept (one bool a token).
    `windows`: which documents are at hand together, as in `plan_epoch`.
    """

    def __init__(
        self,
        documents: Documents,
        favourites: Callable[[Tensor], Tensor],
        t2d_V: Tensor,
        windows: Sequence[int] = (),
    ) -> None:
        self.lengths = list(documents.lengths)
        self.windows = list(windows) or [0] * len(self.lengths)
        self._window: int | None = None
        self._documents = documents
        self._favourites = favourites
        self._t2d_V = t2d_V
        self._in_vocab: dict[int, Tensor] = {}

    def enter(self, index: int) -> None:
        """Bring a document's window on every rank, also where another has the document."""
        if self.windows[index] != self._window:
            self._documents.read(index)
            self._window = self.windows[index]

    def pack(self, indices: Sequence[int]) -> Pack:
        """Return these documents as one row."""
        documents = [self._documents.read(index) for index in indices]
        predictions_P, in_vocab_P, start = [], [], 0
        for index, document in zip(indices, documents, strict=True):
            found = predictions(document.reply_T)
            if index not in self._in_vocab:
                self._in_vocab[index] = self._t2d_V[self._favourites_of(document, found)]
            predictions_P.append(found + start)
            in_vocab_P.append(self._in_vocab[index])
            start += len(document.input_ids_T)
        tops = [d.top_T2K for d in documents if d.top_T2K is not None]
        return Pack(
            input_ids_T=torch.cat([d.input_ids_T for d in documents]).long(),
            aux_TLD=torch.cat([d.aux_TLD for d in documents]),
            final_TD=torch.cat([d.final_TD for d in documents]),
            predictions_P=torch.cat(predictions_P),
            in_vocab_P=torch.cat(in_vocab_P),
            lengths=tuple(len(d.input_ids_T) for d in documents),
            top_T2K=torch.cat(tops) if tops else None,
        )

    def _favourites_of(self, document: Document, found: Tensor) -> Tensor:
        if document.top_T2K is None:
            return self._favourites(document.final_TD[found])
        return document.top_T2K[found, 0, 0].long()
