"""Training on the likeliest tokens that a store kept in the final state's place."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.drafter.losses import pack_loss, stored_teacher
from eyas.drafter.packing import Document, Packer, predictions


def topped(document: Document, head_VD: Tensor, k: int) -> Document:
    """Return the document as a store of likeliest tokens gives it back: no final states."""
    values, ids = (document.final_TD @ head_VD.T).log_softmax(-1).topk(k)
    kept = torch.zeros(len(ids), dtype=torch.bool)
    kept[predictions(document.reply_T)] = True
    return dataclasses.replace(
        document,
        final_TD=torch.full_like(document.final_TD, torch.nan),
        top_T2K=torch.stack([ids, values], dim=1).masked_fill(~kept[:, None, None], torch.nan),
    )


def loss_of(tiny: Any, documents: list[Document]) -> tuple[Tensor, list[Tensor]]:
    parameters = list(tiny.drafter.parameters())
    held = dataclasses.replace(tiny.documents, documents=documents)
    pack = Packer(held, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    loss, tally = pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), (1.0, 0.8, 0.64))
    return torch.stack([loss, *tally.correct, *tally.overlap]), list(
        torch.autograd.grad(loss, parameters)
    )


def test_all_of_the_vocabulary_teaches_what_the_final_states_teach(tiny) -> None:
    whole = tiny.documents.documents
    wanted, wanted_grads = loss_of(tiny, whole)
    got, grads = loss_of(tiny, [topped(d, tiny.head_VD, len(tiny.head_VD)) for d in whole])
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    for grad, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-12)


def test_fewer_tokens_teach_something_else_and_hit_the_same_favourites(tiny) -> None:
    whole = tiny.documents.documents
    wanted, _ = loss_of(tiny, whole)
    got, _ = loss_of(tiny, [topped(d, tiny.head_VD, 4) for d in whole])
    assert got[0] != wanted[0]
    assert torch.isfinite(got).all()
    assert torch.equal(got[1:4], wanted[1:4]), "what counts as a hit is the whole vocabulary's"


def test_the_teacher_by_hand() -> None:
    #     likeliest: 5 (0.5), 0 (0.2), 3 (0.1); tail 0.2; draft vocabulary 0, 2, 5
    ids, shares = torch.tensor([[5, 0, 3]]), torch.tensor([[0.5, 0.2, 0.1]])
    t2d = torch.tensor([True, False, True, False, False, True])
    top = torch.stack([ids, shares.log()], dim=1)
    teacher, favourite = stored_teacher(top, t2d, torch.float32)
    torch.testing.assert_close(teacher, torch.tensor([[0.2 / 0.7, 0.0, 0.5 / 0.7]]))
    assert favourite.tolist() == [2]


@pytest.mark.parametrize("size", [6, 20, 40])
@given(seed=st.integers(0, 10_000), k=st.integers(1, 40), sharp=st.floats(0.1, 8.0))
def test_the_teacher_is_off_by_at_most_the_tails_share(
    size: int, seed: int, k: int, sharp: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shares_V = (sharp * torch.randn(40, generator=generator, dtype=torch.float64)).softmax(0)
    t2d_V = torch.zeros(40, dtype=torch.bool)
    t2d_V[torch.randperm(40, generator=generator)[:size]] = True
    t2d_V[shares_V.argmax()] = True  # others carry no loss
    values, ids = shares_V.topk(k)
    top = torch.stack([ids, values.log()])[None]
    (teacher_N,), _ = stored_teacher(top, t2d_V, torch.float64)
    exact_N = shares_V[t2d_V] / shares_V[t2d_V].sum()
    known, tail = float(values[t2d_V[ids]].sum()), float(1 - values.sum())
    distance = float((teacher_N - exact_N).abs().sum() / 2)
    assert distance <= tail / (known + tail) + 1e-12
    assert float(teacher_N.sum()) == pytest.approx(1.0)


def test_a_row_that_the_store_did_not_keep_is_no_silent_zero(tiny) -> None:
    some = topped(tiny.documents.documents[0], tiny.head_VD, 4)
    assert some.top_T2K is not None
    some.top_T2K[predictions(some.reply_T), 1] = torch.nan
    loss, _ = loss_of(
        tiny, [some, *[topped(d, tiny.head_VD, 4) for d in tiny.documents.documents[1:]]]
    )
    assert loss[0].isnan()
