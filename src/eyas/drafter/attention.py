"""The attention of training-time test: causal keys, and a row's own later ones; and its backward.

At TTT step k row t sees the step-0 keys of rows 0..t of its document and its own keys of steps
1..k. The own keys lie on a diagonal, so their scores are k row sums, merged with the dense part in
one softmax by their log-sum-exp; no [T, T+k] score matrix is built, and documents packed into one
row never meet. The backward makes the scores of a block again, so that none is kept.

Legend: T rows of a pack, A rows that are computed (active), Q of them in a block, S keys of a
block, G key/value heads, R query heads a key head, K head dim (a value's and the output's may be
another), X = R * Q.
Source: EAGLE-3, arXiv 2503.01840, figure 6; the merge and the backward are those of
FlashAttention, arXiv 2205.14135.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_QUERIES_PER_BLOCK = 128  # 64 to 256 are as fast; a block's scores stay near the cache
_LARGEST_GAP = 32  # rows left out inside a block


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive active rows of one document and the keys that they may see."""

    rows: slice  # of the active rows
    keys: slice  # of the pack's rows: from the document's first to the block's last
    bias_QW: Tensor  # of the last W keys: -inf where the key comes after the row, else 0


class KeyValue(NamedTuple):
    """Rotated keys and values, each [G, T, K] for step 0, and [A, G, K] for a later step."""

    key: Tensor
    value: Tensor


class Kept(NamedTuple):
    """What the backward needs of the softmax, and the output."""

    top_AGR: Tensor  # largest dense score of a row
    factor_AGR: Tensor  # exp(top) over the sum of all exp(score), dense and own
    own_share_OAGR: Tensor  # softmax of the own scores
    out_AGRK: Tensor


def build_blocks(active_A: Tensor, lengths: Sequence[int]) -> list[Block]:
    """Cut the active rows (ascending) into blocks that lie in one document each.

    A block ends before a gap, as all its rows are given the keys of its last.
    """
    blocks, start = [], 0
    gaps = (active_A.diff() > _LARGEST_GAP).nonzero().flatten() + 1
    for length in lengths:
        edges = torch.tensor([start, start + length], device=active_A.device)
        first, last = torch.searchsorted(active_A, edges).tolist()
        cuts = [first, *(cut for cut in gaps.tolist() if first < cut < last), last]
        for low, high in pairwise(cuts):
            for row in range(low, high, _QUERIES_PER_BLOCK):
                rows = slice(row, min(row + _QUERIES_PER_BLOCK, high))
                blocks.append(_block(rows, active_A[rows], start))
        start += length
    return blocks


def _block(rows: slice, rows_Q: Tensor, start: int) -> Block:
    end = int(rows_Q[-1]) + 1
    columns_W = torch.arange(int(rows_Q[0]), end, device=rows_Q.device)
    hidden_QW = columns_W > rows_Q.unsqueeze(1)
    return Block(rows, slice(start, end), torch.where(hidden_QW, -torch.inf, 0.0))


def attend(
    query_AGRK: Tensor, first: KeyValue, own: Sequence[KeyValue], blocks: Sequence[Block]
) -> Kept:
    """Return the attention of the active rows at TTT step len(own); queries are scaled already.

    `first` holds step 0's keys of all T rows, `own` those of the active rows for each later step.
    """
    wide = _wide(query_AGRK.dtype)
    out_AGRK = query_AGRK.new_empty(*query_AGRK.shape[:-1], first.value.shape[-1])
    top_AGR = query_AGRK.new_empty(query_AGRK.shape[:-1])
    total_AGR = torch.empty_like(top_AGR, dtype=wide)
    for block, scores_GXS in _scores(query_AGRK, first.key, blocks):
        top_GX1 = scores_GXS.amax(-1, keepdim=True)
        scores_GXS.sub_(top_GX1).exp_()
        _join(top_AGR[block.rows].unsqueeze(-1), top_GX1)
        _join(total_AGR[block.rows].unsqueeze(-1), scores_GXS.sum(-1, keepdim=True, dtype=wide))
        value_GSK = first.value[:, block.keys]
        _join(out_AGRK[block.rows], _product(scores_GXS, value_GSK))
    dense_AGR = total_AGR.log() + top_AGR
    own_OAGR = total_AGR.new_empty(len(own), *dense_AGR.shape)
    for index, step in enumerate(own):
        own_OAGR[index] = (query_AGRK * step.key.unsqueeze(2)).sum(-1, dtype=wide)
    all_AGR = torch.cat([dense_AGR.unsqueeze(0), own_OAGR]).logsumexp(0)
    factor_AGR = (top_AGR - all_AGR).exp()
    own_OAGR.sub_(all_AGR).exp_()
    out_AGRK.mul_(factor_AGR.unsqueeze(-1))
    for share_AGR, step in zip(own_OAGR, own, strict=True):
        out_AGRK.addcmul_(share_AGR.unsqueeze(-1).to(out_AGRK.dtype), step.value.unsqueeze(2))
    return Kept(top_AGR, factor_AGR, own_OAGR, out_AGRK)


class Gradients(NamedTuple):
    """Where the gradients of keys and values are summed over the TTT steps."""

    first_key_GKT: Tensor
    first_value_GKT: Tensor
    own_key_OAGK: Tensor
    own_value_OAGK: Tensor


def attend_backward(
    grad_AGRK: Tensor,
    kept: Kept,
    query_AGRK: Tensor,
    keys: tuple[KeyValue, Sequence[KeyValue]],
    blocks: Sequence[Block],
    sums: Gradients,
) -> Tensor:
    """Return the gradient of the scaled queries; add those of keys and values to `sums`."""
    first, own = keys
    wide = _wide(grad_AGRK.dtype)
    inner_AGR = (grad_AGRK * kept.out_AGRK).sum(-1, dtype=wide)
    scaled_AGRK = grad_AGRK * kept.factor_AGR.unsqueeze(-1).to(grad_AGRK.dtype)
    scaled_inner_AGR = (inner_AGR * kept.factor_AGR).to(grad_AGRK.dtype)
    query_grad_AGRK = torch.empty_like(query_AGRK)
    for block, share_GXS in _scores(query_AGRK, first.key, blocks):
        share_GXS.sub_(_split(kept.top_AGR[block.rows].unsqueeze(-1))).exp_()
        grad_GXK = _split(scaled_AGRK[block.rows])
        value_GSK = first.value[:, block.keys]
        slope_GXS = _product(grad_GXK, value_GSK.transpose(1, 2))
        _add_product(sums.first_value_GKT[..., block.keys], grad_GXK, share_GXS)
        slope_GXS.sub_(_split(scaled_inner_AGR[block.rows].unsqueeze(-1))).mul_(share_GXS)
        _join(query_grad_AGRK[block.rows], _product(slope_GXS, first.key[:, block.keys]))
        query_GXK = _split(query_AGRK[block.rows])
        _add_product(sums.first_key_GKT[..., block.keys], query_GXK, slope_GXS)
    for index, step in enumerate(own):
        share_AGR1 = kept.own_share_OAGR[index].unsqueeze(-1)
        meet_AGR1 = (grad_AGRK * step.value.unsqueeze(2)).sum(-1, keepdim=True, dtype=wide)
        slope = (share_AGR1 * (meet_AGR1 - inner_AGR.unsqueeze(-1))).to(grad_AGRK.dtype)
        share = share_AGR1.to(grad_AGRK.dtype)
        query_grad_AGRK.addcmul_(slope, step.key.unsqueeze(2))
        sums.own_key_OAGK[index].add_((slope * query_AGRK).sum(2))
        sums.own_value_OAGK[index].add_((share * grad_AGRK).sum(2))
    return query_grad_AGRK


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _scores(
    query_AGRK: Tensor, key_GTK: Tensor, blocks: Sequence[Block]
) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block's scores [G, X, S], -inf where hidden, all in one piece of memory."""
    _, G, R, _ = query_AGRK.shape
    sizes = [(b.rows.stop - b.rows.start, b.keys.stop - b.keys.start) for b in blocks]
    room = query_AGRK.new_empty(G * R * max((q * s for q, s in sizes), default=0))
    for block, (Q, S) in zip(blocks, sizes, strict=True):
        scores_GXS = room[: G * R * Q * S].view(G, R * Q, S)
        key_GKS = key_GTK[:, block.keys].transpose(1, 2)
        _product(_split(query_AGRK[block.rows]), key_GKS, scores_GXS)
        recent_GRQW = scores_GXS.view(G, R, Q, S)[..., S - block.bias_QW.shape[1] :]
        recent_GRQW.add_(block.bias_QW.to(scores_GXS.dtype))
        yield block, scores_GXS


def _product(left_GMN: Tensor, right_GNP: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left @ right; a CPU's bfloat16 a head at a time, as the batched one copies slices."""
    if left_GMN.dtype != torch.bfloat16 or left_GMN.device.type != "cpu":
        return torch.bmm(left_GMN, right_GNP, out=out)
    if out is None:
        out = left_GMN.new_empty(*left_GMN.shape[:2], right_GNP.shape[2])
    for left_MN, right_NP, out_MP in zip(left_GMN, right_GNP, out, strict=True):
        torch.mm(left_MN, right_NP, out=out_MP)
    return out


def _split(rows_QGRK: Tensor) -> Tensor:
    """Return [G, X, K]: the rows of a key head's query heads one below the other."""
    Q, G, R, K = rows_QGRK.shape
    return rows_QGRK.permute(1, 2, 0, 3).reshape(G, R * Q, K)


def _join(rows_QGRK: Tensor, value_GXK: Tensor) -> None:
    """Write [G, X, K] back to its rows."""
    Q, G, R, K = rows_QGRK.shape
    rows_QGRK.copy_(value_GXK.view(G, R, Q, K).permute(2, 0, 1, 3))


def _add_product(sum_GKS: Tensor, left_GXK: Tensor, right_GXS: Tensor) -> None:
    """Add left^T @ right to the sum, whose type is float32 where theirs is bfloat16."""
    left_GKX = left_GXK.transpose(1, 2)
    if sum_GKS.dtype == left_GKX.dtype:
        sum_GKS.baddbmm_(left_GKX, right_GXS)
    else:
        sum_GKS.add_(torch.bmm(left_GKX.contiguous(), right_GXS))
