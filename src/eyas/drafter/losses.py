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

from eyas.drafter.head import LOSSES, HeadLoss, Labels, Result
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Pack
from eyas.drafter.unroll import Layout, build_layout, rows_at
from eyas.errors import EyasError

_TEACHER_ROWS = 256  # logits of the target at a time


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


def check_loss(name: str) -> None:
    """Refuse a loss that there is not.

    Raises: EyasError.
    """
    if name not in LOSSES:
        raise EyasError(f"train.loss: expected one of {', '.join(LOSSES)}, got {name!r}")


def trained_rows(pack: Pack, steps: int) -> list[int]:
    """Return how many rows of each step carry loss."""
    position_T = torch.cat([torch.arange(length) for length in pack.lengths])
    trained_C = pack.predictions_P[pack.in_vocab_P].cpu()
    return [len(rows_at(trained_C, position_T, step)[0]) for step in range(steps)]


def pack_loss(
    drafter: Drafter,
    pack: Pack,
    embed_TD: Tensor,
    head_ND: Tensor,
    weights: tuple[float, ...],
    *,
    recompute: bool = False,
    loss: str = "kl",
) -> tuple[Tensor, Tally]:
    """Return the weighted loss of a pack over len(weights) TTT steps, and its tally.

    `embed_TD` are the target's embeddings of the pack's tokens, `head_ND` its lm_head's rows for
    the draft vocabulary. A step's loss is its mean over rows. All is computed in the type of the
    embeddings, softmax and loss in float32.
    """
    steps = len(weights)
    layout = build_layout(pack.predictions_P, pack.lengths, steps)
    teacher = _teacher(pack, embed_TD.dtype, head_ND, drafter.t2d)
    labels = _labels(pack, layout, teacher, weights)
    aux_TLD = pack.aux_TLD.to(embed_TD.dtype)
    outputs = drafter.unroll(embed_TD, aux_TLD, layout, steps, recompute=recompute)
    settings = (drafter.config.rms_norm_eps, torch.is_grad_enabled(), loss)
    weight_D, weight_ND = drafter.norm.weight, drafter.lm_head.weight
    result = Result(*HeadLoss.apply(labels, settings, weight_D, weight_ND, *outputs))
    return result.total, _tally(result, labels, pack, layout)


def _labels(
    pack: Pack, layout: Layout, teacher: tuple[Tensor, Tensor], weights: tuple[float, ...]
) -> Labels:
    trained_C = pack.predictions_P[pack.in_vocab_P]
    exists_SC = torch.stack(
        [rows_at(trained_C, layout.position_T, k)[1] for k in range(len(weights))]
    )
    back_S1 = 1 + torch.arange(len(weights), device=trained_C.device).unsqueeze(1)
    rows_SC = torch.searchsorted(layout.active_A, (trained_C - back_S1).clamp(min=0))
    return Labels(
        teacher_CN=teacher[0],
        favourite_C=teacher[1],
        rows_SC=rows_SC.clamp(max=len(layout.active_A) - 1),
        exists_SC=exists_SC,
        weights=weights,
    )


def _teacher(
    pack: Pack, dtype: torch.dtype, head_ND: Tensor, t2d_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the softmax over the draft vocabulary, [C, N], and its favourite, [C]."""
    trained_C = pack.predictions_P[pack.in_vocab_P]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if pack.top_T2K is not None:
        return stored_teacher(pack.top_T2K[trained_C], t2d_V, wide)
    final_CD, head_ND = (x.to(dtype) for x in (pack.final_TD[trained_C], head_ND))
    teacher_CN = torch.empty(len(trained_C), len(head_ND), dtype=wide, device=final_CD.device)
    favourites = []
    for teacher, final in zip(
        teacher_CN.split(_TEACHER_ROWS), final_CD.split(_TEACHER_ROWS), strict=True
    ):
        logits = final @ head_ND.T
        favourites.append(logits.argmax(-1))
        torch.softmax(logits.to(wide), -1, out=teacher)
    return teacher_CN, torch.cat(favourites)


def stored_teacher(top_C2K: Tensor, t2d_V: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the same by the K likeliest tokens of the whole vocabulary and their log-shares.

    Those of the draft vocabulary have m together; what is not among the K, the tail, has r. How
    much of r is the draft vocabulary's is not known: the teacher gives the tail nothing and is what
    is known, over m. At most r / (m + r) of its mass (as if all were) lies where the exact one has
    it not. Spreading r, evenly or by frequency, measured worse (RESULTS.md).
    """
    ids_CK = top_C2K[:, 0].long()
    shares_CK = top_C2K[:, 1].to(dtype).exp() * t2d_V[ids_CK]
    places_CK = (t2d_V.cumsum(0) - 1)[ids_CK].clamp(min=0)
    teacher_CN = shares_CK.new_zeros(len(ids_CK), int(t2d_V.sum()))
    teacher_CN.scatter_add_(1, places_CK, shares_CK / shares_CK.sum(1, keepdim=True))
    return teacher_CN, places_CK[:, 0]


def _tally(result: Result, labels: Labels, pack: Pack, layout: Layout) -> Tally:
    counted_ST = torch.zeros(len(labels.weights), len(layout.position_T), dtype=torch.bool)
    hit_ST = torch.zeros_like(counted_ST)
    trained_C = pack.predictions_P[pack.in_vocab_P]
    for step in range(len(counted_ST)):
        counted_ST[step, rows_at(pack.predictions_P, layout.position_T, step)[0].cpu()] = True
        hit_C = result.hit_SC[step]
        hit_ST[step, (trained_C[hit_C] - 1 - step).cpu()] = True
    ahead_ST = counted_ST.cumprod(0).bool()  # a server drafts from here and all steps are known
    alive_ST = (ahead_ST & hit_ST).cumprod(0).bool()
    before_ST = torch.cat([torch.ones_like(alive_ST[:1]), alive_ST[:-1]])
    return Tally(
        loss=result.loss_S.double().cpu(),
        trained=labels.exists_SC.sum(1).double().cpu(),
        counted=counted_ST.sum(1).double(),
        correct=hit_ST.sum(1).double(),
        overlap=result.overlap_S.double().cpu(),
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
