"""The loss of training-time test and the acceptance figures that go with it.

Teacher: softmax of the target's logits, renormalised over the draft vocabulary. A prediction whose
most likely token (of the full vocabulary) is outside the draft vocabulary has a teacher that says
nothing: it carries no loss, and counts as a miss in every figure.

Legend: P predictions, of which C carry loss; S TTT steps, N draft vocabulary, D hidden size.
Source: EAGLE-3, arXiv 2503.01840; SpecForge specforge/core/eagle3.py; here the loss of a step is
the mean over the rows that carry it, not over all positions of the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafter.model import Drafter, build_layout, rows_at
from eyas.drafter.packing import Pack


class Tally(NamedTuple):
    """Sums over predictions for each TTT step, float64 [S]; tallies of packs add up."""

    loss: Tensor  # cross-entropy in nats
    trained: Tensor  # predictions that carry loss
    counted: Tensor  # predictions, out-of-vocabulary ones included
    correct: Tensor  # drafter's argmax is the target's
    overlap: Tensor  # sum of min(p, q): chance that rejection sampling accepts
    reached: Tensor  # rows at which all earlier steps were correct
    chained: Tensor  # of those, rows that are correct here too

    def plus(self, other: "Tally") -> "Tally":
        """Return the sum."""
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


def soft_cross_entropy(logits_CN: Tensor, teacher_CN: Tensor) -> Tensor:
    """Return -sum p log q of each row in float32 (float64 stays), [C]."""
    wide = logits_CN if logits_CN.dtype == torch.float64 else logits_CN.float()
    return -(teacher_CN * wide.log_softmax(-1)).sum(-1)


def pack_loss(
    drafter: Drafter, pack: Pack, embed_TD: Tensor, head_ND: Tensor, weights: tuple[float, ...]
) -> tuple[Tensor, Tally]:
    """Return the weighted loss of a pack over len(weights) TTT steps, and its tally.

    `embed_TD` are the target's embeddings of the pack's tokens, `head_ND` its lm_head's rows for
    the draft vocabulary. A step's loss is its mean over rows. The loss has a gradient iff one of
    the steps has a row that carries loss.
    """
    layout = build_layout(pack.predictions_P, pack.lengths, len(weights))
    trained_C = pack.predictions_P[pack.in_vocab_P]
    with torch.no_grad():
        teacher_CN = (pack.final_TD[trained_C] @ head_ND.T).softmax(-1)
        favourite_C = teacher_CN.argmax(-1)
    outputs = drafter.unroll(embed_TD, pack.aux_TLD, layout, len(weights))
    total = pack.final_TD.new_zeros(())
    sums = torch.zeros(3, len(weights), dtype=torch.float64)
    hit_ST = torch.zeros(len(weights), len(embed_TD), dtype=torch.bool)
    for step, weight in enumerate(weights):
        rows, exists_C = rows_at(trained_C, layout.position_T, step)
        hidden = outputs[step][torch.searchsorted(layout.active_A, rows)]
        logits, teacher = drafter.logits(hidden), teacher_CN[exists_C]
        losses = soft_cross_entropy(logits, teacher)
        total = total + weight * losses.sum() / max(len(rows), 1)
        with torch.no_grad():
            overlap = torch.minimum(teacher, logits.softmax(-1)).sum()
            hit_ST[step, rows] = logits.argmax(-1) == favourite_C[exists_C]
            sums[:, step] = torch.stack([losses.sum(), losses.new_tensor(len(rows)), overlap])
    return total, _tally(sums, hit_ST, pack.predictions_P, layout.position_T)


def _tally(sums: Tensor, hit_ST: Tensor, predictions_P: Tensor, position_T: Tensor) -> Tally:
    counted_ST = torch.zeros_like(hit_ST)
    for step in range(len(hit_ST)):
        counted_ST[step, rows_at(predictions_P, position_T, step)[0]] = True
    ahead_ST = counted_ST.cumprod(0).bool()  # a server drafts from here and all steps are known
    alive_ST = (ahead_ST & hit_ST).cumprod(0).bool()
    before_ST = torch.cat([torch.ones_like(alive_ST[:1]), alive_ST[:-1]])
    loss, trained, overlap = sums
    return Tally(
        loss=loss,
        trained=trained,
        counted=counted_ST.sum(1).double(),
        correct=hit_ST.sum(1).double(),
        overlap=overlap,
        reached=(before_ST & ahead_ST).sum(1).double(),
        chained=alive_ST.sum(1).double(),
    )


def figures(tally: Tally) -> dict[str, float]:
    """Return loss, accuracy, acceptance rate and chain acceptance by step, and their summary.

    `simulated_acceptance_length` counts the bonus token: 1 + a1 + a1 a2 + ..., where a_k is the
    share of rows correct at step k among those correct at all earlier ones. The row before a
    reply's first is the earliest that counts in the chain, as on a server. It averages over all
    rows, while real decoding drafts where the last draft failed, which is harder: on the anchor
    data 1.72 here is 1.58 there (1.39 and 1.35 untrained). It ranks runs; tau is `evaluate`'s.
    """
    result: dict[str, float] = {}
    length, survival = 0.0, 1.0
    for step in range(len(tally.loss)):
        counted = max(float(tally.counted[step]), 1.0)
        chain = float(tally.chained[step]) / max(float(tally.reached[step]), 1.0)
        survival *= chain
        length += survival
        name = f"step{step + 1}"
        result[f"loss_{name}"] = float(tally.loss[step]) / max(float(tally.trained[step]), 1.0)
        result[f"accuracy_{name}"] = float(tally.correct[step]) / counted
        result[f"acceptance_rate_{name}"] = float(tally.overlap[step]) / counted
        result[f"chain_acceptance_{name}"] = chain
    result["simulated_acceptance_length"] = 1.0 + length
    result["simulated_acceptance_length_without_bonus"] = length
    return result
