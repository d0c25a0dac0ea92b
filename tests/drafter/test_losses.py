import dataclasses

import pytest
import torch
from torch import Tensor, nn

from eyas.drafter.head import LOSSES, HeadLoss, Labels, Result
from eyas.drafter.losses import Tally, figures, pack_loss
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Pack, Packer
from eyas.drafter.unroll import rows_at


def read_as_target(drafter: Drafter, head_ND: Tensor) -> None:
    """Let the drafter's norm do nothing to states of unit RMS, and its head be the target's."""
    drafter.norm.weight = nn.Parameter(torch.ones(16, dtype=torch.float64))
    drafter.lm_head.weight = nn.Parameter(head_ND)


def unit_rms(pack: Pack) -> Pack:
    final_TD = pack.final_TD
    final_TD = final_TD / final_TD.square().mean(-1, keepdim=True).sqrt()
    return dataclasses.replace(pack, final_TD=final_TD)


def tally_of(tiny, steps: int) -> Tally:
    pack = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    with torch.no_grad():
        return pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), (1.0,) * steps)[1]


def labels_of(teacher_CN: Tensor, rows: list[list[int]], weights: tuple[float, ...]) -> Labels:
    rows_SC = torch.tensor(rows)
    return Labels(
        teacher_CN=teacher_CN,
        favourite_C=teacher_CN.argmax(-1),
        rows_SC=rows_SC.clamp(min=0),
        exists_SC=rows_SC >= 0,
        weights=weights,
    )


def test_head_loss_is_entropy_where_the_drafter_is_the_teacher() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64)
    hidden = logits / logits.square().mean(-1, keepdim=True).sqrt()
    labels = labels_of(hidden.softmax(-1), [[0, 1, 2, 3]], (1.0,))
    ones, eye = torch.ones(9, dtype=torch.float64), torch.eye(9, dtype=torch.float64)
    result = Result(*HeadLoss.apply(labels, (0.0, False, "kl"), ones, eye, hidden))
    entropy = torch.distributions.Categorical(labels.teacher_CN).entropy()
    torch.testing.assert_close(result.total, entropy.mean())
    torch.testing.assert_close(result.overlap_S, torch.tensor([4.0], dtype=torch.float64))
    assert result.hit_SC.all()


def naive_loss(name: str, teacher_CN: Tensor, logits_CN: Tensor) -> Tensor:
    """Return the loss of each row as its definition reads."""
    entropy_C = -(teacher_CN * logits_CN.log_softmax(-1)).sum(-1)
    overlap_C = torch.minimum(teacher_CN, logits_CN.softmax(-1)).sum(-1)
    if name == "lk":
        share_C = (-3.0 * overlap_C.detach()).exp()
        return share_C * entropy_C + (1.0 - share_C) * (1.0 - overlap_C)
    return {"kl": entropy_C, "tv": 1.0 - overlap_C, "nla": -overlap_C.log()}[name]


@pytest.mark.parametrize("name", LOSSES)
def test_head_loss_and_its_gradients_are_autograds_own(name: str, monkeypatch) -> None:
    monkeypatch.setattr("eyas.drafter.head._CHUNK_ELEMENTS", 1)  # the least of 64 rows at a time
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    norm, head, outputs = noise(5), noise(9, 5), [noise(200, 5), noise(200, 5)]
    rows = [torch.randperm(200, generator=generator)[:150].tolist() for _ in outputs]
    rows[1][70:80] = [-1] * 10  # ten predictions have no row at step 2
    labels = labels_of(noise(150, 9).detach().softmax(-1), rows, (1.0, 0.5))
    inputs = [norm, head, *outputs]
    got = Result(*HeadLoss.apply(labels, (1e-5, True, name), *inputs))
    want = torch.zeros((), dtype=torch.float64)
    for step, weight in enumerate(labels.weights):
        at = labels.exists_SC[step]
        x = outputs[step][labels.rows_SC[step][at]]
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
        want = want + weight * naive_loss(name, labels.teacher_CN[at], x @ head.T).mean()
        entropies = naive_loss("kl", labels.teacher_CN[at], x @ head.T)
        torch.testing.assert_close(got.loss_S[step], entropies.sum())
    torch.testing.assert_close(got.total, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.total, inputs), torch.autograd.grad(want, inputs)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_no_overlap_gives_a_finite_loss_and_gradient(name: str) -> None:
    labels = labels_of(torch.tensor([[1.0, 0.0]]), [[0]], (1.0,))
    inputs = [torch.ones(2), torch.eye(2) * 1e4, torch.tensor([[-1.0, 1.0]])]
    for tensor in inputs:
        tensor.requires_grad_()
    got = Result(*HeadLoss.apply(labels, (1e-5, True, name), *inputs))
    assert float(got.overlap_S.detach()) == 0.0
    assert torch.isfinite(got.total)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(got.total, inputs))


def test_half_precision_logits_are_normalised_in_float32() -> None:
    hidden = torch.randn(70, 9).bfloat16()
    labels = labels_of(torch.randn(70, 9).softmax(-1), [list(range(70))], (1.0,))
    got = Result(*HeadLoss.apply(labels, (1e-5, False, "kl"), torch.ones(9), torch.eye(9), hidden))
    wide = torch.nn.functional.rms_norm(hidden.float(), (9,), eps=1e-5).bfloat16().float()
    want = -(labels.teacher_CN * wide.log_softmax(-1)).sum(-1).mean()
    assert got.total.dtype == torch.float32
    torch.testing.assert_close(got.total, want, rtol=1e-6, atol=0)


def test_out_of_vocabulary_predictions_carry_no_loss_but_count_as_misses(tiny) -> None:
    tally = tally_of(tiny, 3)
    # documents: 2 + 3, 4 and 3 predictions; the third's p = 1 has no row at step 1, and so on
    assert tally.counted.tolist() == [12, 11, 10]
    assert (tally.trained < tally.counted).all()
    assert (tally.correct <= tally.trained).all()


def test_a_drafter_that_knows_the_teacher_accepts_all_in_vocabulary_rows(tiny, monkeypatch) -> None:
    pack = unit_rms(Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2]))
    every_P = torch.ones_like(pack.in_vocab_P)

    def knowing(embed_TD, aux_TLD, layout, steps, *, recompute):
        outputs = []
        for step in range(steps):
            rows, exists_P = rows_at(pack.predictions_P, layout.position_T, step)
            hidden = torch.zeros(len(layout.active_A), 16, dtype=torch.float64)
            hidden[torch.searchsorted(layout.active_A, rows)] = pack.final_TD[
                pack.predictions_P[exists_P & every_P]
            ]
            outputs.append(hidden)
        return outputs

    monkeypatch.setattr(tiny.drafter, "unroll", knowing)
    read_as_target(tiny.drafter, tiny.draft_head())
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    tally = pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), (1.0, 1.0))[1]
    # the norm's epsilon of 1e-5 makes logits smaller by 5e-6 of themselves
    torch.testing.assert_close(tally.overlap, tally.trained, rtol=1e-4, atol=0)
    assert torch.equal(tally.correct, tally.trained)


def test_simulated_acceptance_length_follows_chains_of_hits() -> None:
    sums = torch.tensor([10.0, 10.0])
    tally = Tally(
        loss=torch.tensor([20.0, 30.0]),
        trained=sums,
        counted=torch.tensor([20.0, 20.0]),
        correct=torch.tensor([10.0, 8.0]),
        overlap=torch.tensor([8.0, 4.0]),
        reached=torch.tensor([20.0, 8.0]),
        chained=torch.tensor([10.0, 2.0]),
    )
    got = figures(tally)
    assert got["loss_step1"] == 2.0
    assert (got["accuracy_step1"], got["accuracy_step2"]) == (0.5, 0.4)
    assert (got["acceptance_rate_step1"], got["acceptance_rate_step2"]) == (0.4, 0.2)
    assert (got["chain_acceptance_step1"], got["chain_acceptance_step2"]) == (0.5, 0.25)
    assert got["simulated_acceptance_length"] == pytest.approx(1 + 0.5 + 0.5 * 0.25)
    assert got["simulated_acceptance_length_without_bonus"] == pytest.approx(0.625)


def test_chains_start_where_a_server_drafts_and_end_with_the_first_miss(tiny, monkeypatch) -> None:
    packer = Packer(tiny.documents, tiny.favourites, torch.ones(40, dtype=torch.bool))
    pack = unit_rms(packer.pack([1]))
    right = {(0, 3), (1, 3), (0, 4), (1, 5), (1, 2)}  # (step, row); replies are positions 4..8

    def planned(embed_TD, aux_TLD, layout, steps, *, recompute):
        rows = layout.active_A.tolist()
        signs = [[1.0 if (s, r) in right else -1.0 for r in rows] for s in range(steps)]
        self_rows = layout.active_A
        hidden = [
            torch.stack(
                [sign * pack.final_TD[r + 1 + s] for sign, r in zip(signs[s], rows, strict=True)]
            )
            for s in range(steps)
        ]
        assert len(self_rows) == len(hidden[0])
        return hidden

    monkeypatch.setattr(tiny.drafter, "unroll", planned)
    read_as_target(tiny.drafter, tiny.head_VD)
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    tally = pack_loss(tiny.drafter, pack, embed_TD, tiny.head_VD, (1.0, 1.0))[1]
    assert tally.counted.tolist() == [4, 4]  # rows 3..6, then rows 2..5
    assert tally.correct.tolist() == [2, 3]
    assert tally.reached.tolist() == [4, 2]  # rows 3 and 4 were right; row 2 drafts nothing
    assert tally.chained.tolist() == [2, 1]
