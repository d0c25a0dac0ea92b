"""How often each target token occurs in replies: what a draft vocabulary is chosen by. Pure.

Legend: V ids up to the largest that occurs.
"""

from collections.abc import Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from eyas.records import Sample

Counts = NDArray[np.int64]
_BATCH_SAMPLES = 256  # counted at once: each count makes an array as long as the vocabulary


def count_reply_tokens(samples: Iterable[Sample]) -> Counts:
    """Return how often each id stands inside a reply, int64 [V]."""
    counts_V = np.zeros(0, dtype=np.int64)
    rest = iter(samples)
    while batch := list(islice(rest, _BATCH_SAMPLES)):
        replies = [np.asarray(s.input_ids[a:b], dtype=np.int32) for s in batch for a, b in s.spans]
        if replies:
            counts_V = _sum(counts_V, np.bincount(np.concatenate(replies)))
    return counts_V


def _sum(left_V: Counts, right_V: Counts) -> Counts:
    longer, shorter = (left_V, right_V) if len(left_V) > len(right_V) else (right_V, left_V)
    total_V = longer.copy()
    total_V[: len(shorter)] += shorter
    return total_V


def coverage_of_most_frequent(counts_V: Counts, sizes: Iterable[int]) -> dict[int, float]:
    """Return the share of all occurrences that the most frequent ids cover, by their number."""
    descending = np.sort(counts_V)[::-1]
    total = max(1, int(counts_V.sum()))
    return {size: round(int(descending[:size].sum()) / total, 5) for size in sizes}
