"""The time that the step's matrix products alone would take, at the rate that they run here.

Counted once each, as our mathematics needs them: forward, and backward to inputs and weights;
attention over the pairs that see one another; no product twice, nothing that is not a product. The
rate of each is measured on its own shape, rows as many as one product of the step has.

Legend: M rows, K summed, N columns of a product.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from peers.batch import Batch, Config

_TRIES = 5
_BLOCK = 128  # rows of a block of attention
_BOTH = 3  # forward, to the inputs, to the weights


class Product(NamedTuple):
    """A product [M, K] x [K, N], and the multiply-adds of this kind in a step over M K N."""

    m: int
    k: int
    n: int
    times: float


def products(config: Config, batch: Batch) -> Iterator[Product]:
    """Yield the products of one optimiser step of a first epoch."""
    width, inner, steps = config["hidden_size"], config["intermediate_size"], config["ttt_length"]
    heads, head = config["num_attention_heads"], config["head_dim"]
    queries, keys = heads * head, config["num_key_value_heads"] * head
    counts = _counts(batch, steps)
    tokens, active = batch.tokens, counts.active
    yield Product(counts.predictions, width, config["vocab_size"], 1)  # the target's logits
    yield Product(tokens, 3 * width, width, 2)  # fc: its inputs get no gradient
    yield Product(tokens, width, queries + 2 * keys, _BOTH)  # embeddings
    yield Product(tokens, width, 2 * keys, _BOTH)  # hidden states, step 0
    yield Product(active, width, queries, _BOTH)
    yield Product(active, width, queries + 2 * keys, _BOTH * (steps - 1))
    yield Product(active, queries, width, _BOTH * steps)
    yield Product(active, width, 2 * inner, _BOTH * steps)
    yield Product(active, inner, width, _BOTH * steps)
    rows = counts.trained[0]
    share = sum(counts.trained) / max(rows, 1)
    yield Product(rows, width, config["draft_vocab_size"], _BOTH * share)
    seen = max(counts.pairs // max(active, 1), 1)  # keys of a row, on average
    blocks = heads * counts.pairs * steps / (_BLOCK * seen)
    yield Product(_BLOCK, head, seen, 2 * blocks)  # scores, and their gradient
    yield Product(_BLOCK, seen, head, 2 * blocks)  # outputs, gradient of queries
    yield Product(seen, _BLOCK, head, 2 * blocks)  # gradients of keys and values


class _Counts(NamedTuple):
    predictions: int
    active: int
    trained: list[int]  # of each TTT step
    pairs: int  # (row, key of step 0) that see one another


def _counts(batch: Batch, steps: int) -> _Counts:
    predictions, active, pairs, trained = 0, 0, 0, [0] * steps
    for document in batch.documents:
        mask_T = document.mask_T
        read_P = (mask_T[1:-1] & mask_T[2:]).nonzero().flatten() + 1
        favourites = (document.final_TD[read_P] @ batch.head_VD.T).argmax(-1)
        kept_C = read_P[batch.t2d_V[favourites]]
        rows = torch.cat([read_P - 1 - step for step in range(steps)]).unique()
        rows = rows[rows >= 0]
        predictions, active = predictions + len(read_P), active + len(rows)
        pairs += int((rows + 1).sum())
        trained = [n + int((kept_C >= 1 + k).sum()) for k, n in enumerate(trained)]
    return _Counts(predictions, active, trained, pairs)


def floor(config: Config, batch: Batch, dtype: str) -> dict[str, float]:
    """Return GFLOP of a step, seconds at the measured rates, and the mean rate."""
    flop, seconds = 0.0, 0.0
    for product in products(config, batch):
        flop += 2.0 * product.m * product.k * product.n * product.times
        seconds += product.times * _seconds(product, getattr(torch, dtype))
    return {"gflop": flop / 1e9, "floor_s": seconds, "gflop_per_s": flop / 1e9 / seconds}


def _seconds(product: Product, dtype: torch.dtype) -> float:
    left = torch.randn(product.m, product.k).to(dtype)
    right = torch.randn(product.n, product.k).to(dtype).T
    out, best = torch.empty(product.m, product.n, dtype=dtype), float("inf")
    repeats = max(1, int(2e9 / (2.0 * product.m * product.k * product.n)))
    for _ in range(_TRIES):
        started_s = time.process_time()
        for _ in range(repeats):
            torch.mm(left, right, out=out)
        best = min(best, (time.process_time() - started_s) / repeats)
    return best
