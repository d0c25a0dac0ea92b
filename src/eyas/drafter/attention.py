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
    if own:
        own_key_AGOK = torch.stack([step.key for step in own], dim=2)
        own_value_AGOK = torch.stack([step.value for step in own], dim=2)
        own_AGRO = query_AGRK @ own_key_AGOK.transpose(-1, -2)
    outputs = []
    for block in blocks:
        scores_GRQS = _dense_scores(query_AGRK[block.rows], first.key[block.keys], block.hidden_QS)
        total_GRQ = scores_GRQS.logsumexp(-1)
        if own:
            own_GRQO = own_AGRO[block.rows].permute(1, 2, 0, 3)
            total_GRQ = torch.logaddexp(total_GRQ, own_GRQO.logsumexp(-1))
        weights_GRQS = (scores_GRQS - total_GRQ.unsqueeze(-1)).exp()
        mixed_QGRK = _mix(weights_GRQS, first.value[block.keys])
        if own:
            share_QGRO = (own_GRQO - total_GRQ.unsqueeze(-1)).exp().permute(2, 0, 1, 3)
            mixed_QGRK = mixed_QGRK + share_QGRO @ own_value_AGOK[block.rows]
        outputs.append(mixed_QGRK)
    return torch.cat(outputs).reshape(A, H * K)


def _dense_scores(query_QGRK: Tensor, key_SGK: Tensor, hidden_QS: Tensor) -> Tensor:
    Q, G, R, K = query_QGRK.shape
    query_GXK = query_QGRK.permute(1, 2, 0, 3).reshape(G, R * Q, K)
    scores_GXS = query_GXK @ key_SGK.permute(1, 2, 0)
    return scores_GXS.view(G, R, Q, -1).masked_fill(hidden_QS, -torch.inf)


def _mix(weights_GRQS: Tensor, value_SGK: Tensor) -> Tensor:
    G, R, Q, S = weights_GRQS.shape
    mixed_GXK = weights_GRQS.reshape(G, R * Q, S) @ value_SGK.permute(1, 0, 2)
    return mixed_GXK.view(G, R, Q, -1).permute(2, 0, 1, 3)
