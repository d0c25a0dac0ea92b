import pytest
import torch

from eyas.drafter.losses import Tally, figures, pack_loss, soft_cross_entropy
from eyas.drafter.model import rows_at
from eyas.drafter.packing import Packer


def tally_of(tiny, steps: int) -> Tally:
    pack = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    with torch.no_grad():
        return pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), (1.0,) * steps)[1]


def test_soft_cross_entropy_is_entropy_where_the_drafter_is_the_teacher() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64)
    teacher = logits.softmax(-1)
    torch.testing.assert_close(
        soft_cross_entropy(logits, teacher), torch.distributions.Categorical(teacher).entropy()
    )


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(4, 9).bfloat16()
    assert soft_cross_entropy(logits, logits.float().softmax(-1)).dtype == torch.float32


def test_out_of_vocabulary_predictions_carry_no_loss_but_count_as_misses(tiny) -> None:
    tally = tally_of(tiny, 3)
    # documents: 2 + 3, 4 and 3 predictions; the third's p = 1 has no row at step 1, and so on
    assert tally.counted.tolist() == [12, 11, 10]
    assert (tally.trained < tally.counted).all()
    assert (tally.correct <= tally.trained).all()


def test_a_drafter_that_knows_the_teacher_accepts_all_in_vocabulary_rows(tiny, monkeypatch) -> None:
    pack = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2])
    every_P = torch.ones_like(pack.in_vocab_P)

    def knowing(embed_TD, aux_TLD, layout, steps):
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
    monkeypatch.setattr(tiny.drafter, "logits", lambda hidden: hidden @ tiny.draft_head().T)
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    tally = pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), (1.0, 1.0))[1]
    torch.testing.assert_close(tally.overlap, tally.trained)
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
    pack = Packer(tiny.documents, tiny.favourites, torch.ones(40, dtype=torch.bool)).pack([1])
    right = {(0, 3), (1, 3), (0, 4), (1, 5), (1, 2)}  # (step, row); replies are positions 4..8

    def planned(embed_TD, aux_TLD, layout, steps):
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
    monkeypatch.setattr(tiny.drafter, "logits", lambda hidden: hidden @ tiny.head_VD.T)
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    tally = pack_loss(tiny.drafter, pack, embed_TD, tiny.head_VD, (1.0, 1.0))[1]
    assert tally.counted.tolist() == [4, 4]  # rows 3..6, then rows 2..5
    assert tally.correct.tolist() == [2, 3]
    assert tally.reached.tolist() == [4, 2]  # rows 3 and 4 were right; row 2 drafts nothing
    assert tally.chained.tolist() == [2, 1]
