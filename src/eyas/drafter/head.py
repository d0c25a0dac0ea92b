"""Norm, lm_head and the loss in one: the gradient is made while the logits are at hand.

Logits live for a chunk of rows; what is kept is one [C, N] matrix of the step in work (the slope of
the loss, for one product with lm_head), never those of all steps. Cross-entropy is
log sum exp - <teacher, logits>, its slope q - p, and the overlap sum min(p, q) = 1 - |q - p| / 2:
a softmax and three short passes are all that is not a matrix product. Other losses (`train.loss`)
are made of the overlap, whose slope costs two passes more; docs/training_step.md has the equations.

Legend: C predictions with loss, A active rows, N draft vocabulary, D hidden size, S TTT steps.
Source: the soft cross-entropy of EAGLE-3, arXiv 2503.01840; losses of the overlap, 2602.23881;
chunks as in Liger Kernel, 2410.10989.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafter.unroll import normed, normed_backward

LOSSES = ("kl", "tv", "nla", "lk")
_CHUNK_ELEMENTS = 1 << 20  # logits of a chunk; a half or an eighth is up to 10 % slower
_LK_RATE = 3.0  # how fast kl fades out of lk as the overlap grows; the paper's eta
_LEAST_OVERLAP = 1e-30  # keeps 1 / overlap finite


class Labels(NamedTuple):
    """What the target says, and which row of each step it says it to."""

    teacher_CN: Tensor  # softmax over the draft vocabulary; float32, or float64 in tests
    favourite_C: Tensor
    rows_SC: Tensor  # index among the active rows
    exists_SC: Tensor  # bool: there is such a row; others count for nothing
    weights: tuple[float, ...]  # of the steps


class Result(NamedTuple):
    """The loss, and for the figures the sums of each step and what was hit."""

    total: Tensor
    loss_S: Tensor  # cross-entropy, whatever is trained
    overlap_S: Tensor
    hit_SC: Tensor


class HeadLoss(torch.autograd.Function):
    """The loss of all steps as one function of norm, lm_head and the steps' outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: Labels,
        settings: tuple[float, bool, str],
        norm_D: Tensor,
        head_ND: Tensor,
        *outputs_SAD: Tensor,
    ) -> Result:
        """Return the result; `settings`: the norm's epsilon, are gradients wanted, the loss."""
        eps, wanted, loss = settings
        wide, dtype = labels.teacher_CN.dtype, outputs_SAD[0].dtype
        norm, head = norm_D.to(wide), head_ND.to(dtype)
        slope_CN = torch.empty_like(labels.teacher_CN, dtype=dtype) if wanted else None
        norm_grad_D = torch.zeros_like(norm)
        head_grad_ND = torch.zeros_like(head, dtype=wide) if wanted else None
        grads, figures = [], []
        for step, weight in enumerate(labels.weights):
            rows_C, exists_C = labels.rows_SC[step], labels.exists_SC[step]
            hidden_CD = outputs_SAD[step][rows_C]
            normed_CD, factor_C1 = normed(hidden_CD, norm, eps)
            columns = _rows(labels, normed_CD, head, loss, slope_CN)
            trained_C, loss_C, overlap_C, hit_C = (column * exists_C for column in columns)
            count = exists_C.sum().clamp(min=1)
            mean = weight * trained_C.sum() / count
            figures.append((mean, loss_C.sum(), overlap_C.sum(), hit_C))
            if slope_CN is None or head_grad_ND is None:
                continue
            scale = weight / float(count)
            slope_CN.index_fill_(0, (~exists_C).nonzero().flatten(), 0.0)
            if wide == dtype:
                head_grad_ND.addmm_(slope_CN.T, normed_CD, alpha=scale)
            else:
                head_grad_ND.add_(slope_CN.T @ normed_CD, alpha=scale)
            more, weight_grad_D = normed_backward(slope_CN @ head, hidden_CD, factor_C1, norm)
            norm_grad_D.add_(weight_grad_D, alpha=scale)
            grad_AD = torch.zeros_like(outputs_SAD[step])
            grad_AD[rows_C[exists_C]] = more[exists_C].mul_(scale).to(dtype)
            grads.append(grad_AD)
        ctx.grads = (norm_grad_D, head_grad_ND, *grads)
        means, losses, overlaps, hits = (
            torch.stack(column) for column in zip(*figures, strict=True)
        )
        ctx.mark_non_differentiable(losses, overlaps, hits)
        return Result(means.sum(), losses, overlaps, hits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the forward has made, times the gradient of the loss."""
        return None, None, *(made * grads[0] for made in ctx.grads)


def _rows(
    labels: Labels, normed_CD: Tensor, head_ND: Tensor, loss: str, slope_CN: Tensor | None
) -> list[Tensor]:
    """Return loss, cross-entropy, overlap and hit of each row; write the slopes."""
    size = max(64, _CHUNK_ELEMENTS // len(head_ND))
    room = labels.teacher_CN.new_empty(3, min(size, len(normed_CD)), len(head_ND))
    parts, low = [], 0
    for normed_cD in normed_CD.split(size):
        at = slice(low, low + len(normed_cD))
        low = at.stop
        teacher = labels.teacher_CN[at]
        logits, share, spare = room[:, : len(teacher)]
        logits.copy_(normed_cD @ head_ND.T)
        top_c = logits.amax(-1)
        torch.softmax(logits, -1, out=share)
        meet_c = torch.mul(teacher, logits, out=spare).sum(-1)
        entropy_c = top_c - share.amax(-1).log_() - meet_c
        overlap_c = torch.minimum(share, teacher, out=spare).sum(-1)
        trained_c, kl_c, tv_c = _blend(loss, entropy_c, overlap_c)
        hit_c = _hits(logits, top_c, labels.favourite_C[at])
        parts.append((trained_c, entropy_c, overlap_c, hit_c))
        if slope_CN is not None:
            slope_CN[at] = _slope(share, teacher, kl_c, tv_c)
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _blend(
    loss: str, entropy_c: Tensor, overlap_c: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss of each row, and how much of the slopes of kl and tv it takes (None: none).

    kl is the cross-entropy. tv: 1 - overlap, the chance that a sampled draft is rejected. nla: -log
    overlap. lk: s kl + (1 - s) tv with s = exp(-3 overlap), held fixed in the slope; s is a row's
    own, the paper's that of all rows of a step.
    """
    if loss == "kl":
        return entropy_c, torch.ones_like(overlap_c), None
    if loss == "tv":
        return 1.0 - overlap_c, None, torch.ones_like(overlap_c)
    if loss == "nla":
        some_c = overlap_c.clamp(min=_LEAST_OVERLAP)
        return -some_c.log(), None, some_c.reciprocal()
    kl_c = (-_LK_RATE * overlap_c).exp()
    return torch.lerp(1.0 - overlap_c, entropy_c, kl_c), kl_c, 1.0 - kl_c


def _slope(share: Tensor, teacher: Tensor, kl_c: Tensor | None, tv_c: Tensor | None) -> Tensor:
    """Return the slope by the logits, in place of `share`.

    That of kl is q - p. That of tv is q m - q' m q with m = [q < p]: more of what is too little.
    """
    if tv_c is None:
        return share.sub_(teacher)
    wanting = share * (share < teacher)
    slope = (share * wanting.sum(-1, keepdim=True)).sub_(wanting).mul_(tv_c.unsqueeze(1))
    return slope if kl_c is None else slope.addcmul_(share.sub_(teacher), kl_c.unsqueeze(1))


def _hits(logits_cN: Tensor, top_c: Tensor, favourite_c: Tensor) -> Tensor:
    """Return whether argmax is the favourite; only where the favourite is on top is it asked."""
    hit_c = logits_cN.gather(1, favourite_c.unsqueeze(1)).squeeze(1) == top_c
    on_top = hit_c.nonzero().flatten()
    hit_c[on_top] = logits_cN[on_top].argmax(-1) == favourite_c[on_top]
    return hit_c
