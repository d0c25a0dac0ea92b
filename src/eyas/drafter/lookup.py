"""Prompt lookup, the free baseline: a drafter without weights.

Source: https://github.com/apoorvumang/prompt-lookup-decoding
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Prompt lookup: what followed the most recent earlier copy of the last n tokens.

    Tries `max_ngram` tokens, then fewer.
    """

    max_ngram: int

    def propose(self, ids: Sequence[int], num_drafts: int) -> list[int]:
        """Return at most `num_drafts` ids; none where nothing matches."""
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            tail = ids[-size:]
            for begin in range(len(ids) - size - 1, -1, -1):
                if ids[begin : begin + size] == tail:
                    return list(ids[begin + size : begin + size + num_drafts])
        return []
