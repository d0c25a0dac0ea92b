"""The draft vocabulary: which target tokens the drafter can propose.

Legend: V target vocabulary, N draft vocabulary.
Source: d2t holds offsets, target id = i + d2t[i] (SGLang srt/models/llama_eagle3.py).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from eyas.errors import EyasError

ALWAYS = frozenset({0, 1, 2})  # control tokens of most families, whatever the codec calls special


def count_tokens(documents: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """Return how often each id occurs inside a reply, int64 [V], over (input_ids_T, reply_T)."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids_T, reply_T in documents:
        counts_V += torch.bincount(input_ids_T[reply_T > 0].long(), minlength=vocab_size)
    return counts_V


def choose_vocabulary(counts_V: Tensor, size: int, forced: Iterable[int] = ()) -> Tensor:
    """Return t2d, bool [V]: the forced ids and ids 0-2, then the most frequent, ties to lower ids.

    Where fewer than `size` ids occur, the lowest unused ids fill up.

    Raises: EyasError if `size` is larger than V or too small for the forced ids.
    """
    vocab_size = len(counts_V)
    must = {token for token in ALWAYS | set(forced) if token < vocab_size}
    if not len(must) <= size <= vocab_size:
        raise EyasError(
            f"drafter.draft_vocab_size: expected {len(must)} (stop and special ids) to "
            f"{vocab_size} (the target's vocabulary), got {size}",
            hint="change drafter.draft_vocab_size",
        )
    order_V = torch.argsort(counts_V, descending=True, stable=True)
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[sorted(must)] = True
    free_V = order_V[~t2d_V[order_V]]
    t2d_V[free_V[: size - len(must)]] = True
    return t2d_V


def coverage(counts_V: Tensor, t2d_V: Tensor) -> float:
    """Return the share of counted tokens that the draft vocabulary holds, 0..1."""
    return float(counts_V[t2d_V].sum()) / max(float(counts_V.sum()), 1.0)
