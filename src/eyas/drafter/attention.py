"""The attention of training-time test: causal keys of step 0 plus a row's own later keys.

At TTT step k row t sees the step-0 keys of rows 0..t of its document and its own keys of steps
1..k. The own keys lie on a diagonal, so their scores are k row sums, merged with the dense part in
one softmax by their log-sum-exp; no [T, T+k] score matrix is built, and documents packed into one
row never meet.

Legend: T rows of a pack, A rows that are computed (active), Q of them in a block, S keys of a
block, G key/value heads, R query heads a key head, K head dim.
Source: EAGLE-3, arXiv 2503.01840, figure 6; the merge is that of FlashAttention, arXiv 2205.14135.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_QUERIES_PER_BLOCK = 256  # bounds the scores of a long document to this many rows


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive active rows of one document and the keys that they may see."""

    rows: slice  # of the active rows
    keys: slice  # of the pack's rows: from the document's first to the block's last
    hidden_QS: Tensor  # bool: the key comes after the row


class KeyValue(NamedTuple):
    """Rotated keys and values, each [rows, G, K]."""

    key: Tensor
    value: Tensor


def build_blocks(active_A: Tensor, lengths: Sequence[int]) -> list[Block]:
    """Cut the active rows (ascending) into blocks that lie in one document each."""
    blocks, start = [], 0
    for length in lengths:
        edges = torch.tensor([start, start + length], device=active_A.device)
        first, last = torch.searchsorted(active_A, edges).tolist()
        for low in range(first, last, _QUERIES_PER_BLOCK):
            rows = slice(low, min(low + _QUERIES_PER_BLOCK, last))
            end = int(active_A[rows.stop - 1]) + 1
            columns_S = torch.arange(start, end, device=active_A.device)
            blocks.append(Block(rows, slice(start, end), columns_S > active_A[rows].unsqueeze(1)))
        start += length
    return blocks


def attend(
    query_AHK: Tensor, first: KeyValue, own: Sequence[KeyValue], blocks: Sequence[Block]
) -> Tensor:
    """Return the attention output [A, H*K] of the active rows at TTT step len(own).

    `first` holds step 0's keys of all T rows, `own` those of the active rows for each later step.
    Consecutive R query heads share a key head.
    """
    A, H, K = query_AHK.shape
    query_AGRK = query_AHK.reshape(A, first.key.shape[1], -1, K) / math.sqrt(K)
    diagonal = _diagonal(query_AGRK, own) if own else None
    outputs = []
    for block in blocks:
        scores_GRQS = _dense_scores(query_AGRK[block.rows], first.key[block.keys], block.hidden_QS)
        total_GRQ = scores_GRQS.logsumexp(-1)
        if diagonal:
            own_GRQO = diagonal.scores_GRAO[:, :, block.rows]
            total_GRQ = torch.logaddexp(total_GRQ, own_GRQO.logsumexp(-1))
            own_share_GRQO = (own_GRQO - total_GRQ.unsqueeze(-1)).exp()
            extra_QGRK = own_share_GRQO.permute(2, 0, 1, 3) @ diagonal.value_AGOK[block.rows]
        else:
            extra_QGRK = 0.0
        share_GRQS = (scores_GRQS - total_GRQ.unsqueeze(-1)).exp()
        outputs.append(_mix(share_GRQS, first.value[block.keys]) + extra_QGRK)
    return torch.cat(outputs).reshape(A, H * K)


class _Diagonal(NamedTuple):
    """The own keys of O later steps: scores of every row with them, and their values."""

    scores_GRAO: Tensor
    value_AGOK: Tensor


def _diagonal(query_AGRK: Tensor, own: Sequence[KeyValue]) -> _Diagonal:
    key_AGOK = torch.stack([step.key for step in own], dim=2)
    scores_AGRO = query_AGRK @ key_AGOK.transpose(-1, -2)
    return _Diagonal(
        scores_AGRO.permute(1, 2, 0, 3), torch.stack([step.value for step in own], dim=2)
    )


def _dense_scores(query_QGRK: Tensor, key_SGK: Tensor, hidden_QS: Tensor) -> Tensor:
    Q, G, R, K = query_QGRK.shape
    query_GXK = query_QGRK.permute(1, 2, 0, 3).reshape(G, R * Q, K)
    scores_GXS = query_GXK @ key_SGK.permute(1, 2, 0)
    return scores_GXS.view(G, R, Q, -1).masked_fill(hidden_QS, -torch.inf)


def _mix(weights_GRQS: Tensor, value_SGK: Tensor) -> Tensor:
    G, R, Q, S = weights_GRQS.shape
    mixed_GXK = weights_GRQS.reshape(G, R * Q, S) @ value_SGK.permute(1, 0, 2)
    return mixed_GXK.view(G, R, Q, -1).permute(2, 0, 1, 3)
