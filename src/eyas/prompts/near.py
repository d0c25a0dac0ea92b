"""Find near-duplicates among prompts with MinHash and locality-sensitive hashing. Pure.

Source: https://ekzhu.com/datasketch/lsh.html; Broder, "On the resemblance and containment of
documents" (1997). Two texts are alike by the share of their word runs that both have (Jaccard).
"""

import numpy as np
from datasketch import MinHash, MinHashLSH

from eyas.prompts.overlap import run_hashes, words_of

_NUM_PERMUTATIONS = 128  # the estimate's standard deviation is at most 0.5 / sqrt(128) = 0.044
_RUN_WORDS = 5
_CHUNK = 1 << 14  # runs hashed at once: 8 MB of permuted hashes
_HALF = np.uint64(32)  # the library permutes hashes of 32 bits


class Seen:
    """The prompts kept so far, to be asked whether a text is like one of them."""

    def __init__(self, jaccard: float) -> None:
        self._jaccard = jaccard
        self._index = MinHashLSH(threshold=jaccard, num_perm=_NUM_PERMUTATIONS)
        self._kept: dict[str, MinHash] = {}

    def like(self, name: str, text: str) -> str | None:
        """Return the name of the kept text that this is most like, or None, and then keep it."""
        sketch = sketch_of(text)
        if sketch is None:
            return None
        names = map(str, self._index.query(sketch))
        alike = {found: sketch.jaccard(self._kept[found]) for found in names}
        best = max(alike, key=lambda found: (alike[found], found), default=None)
        if best is not None and alike[best] >= self._jaccard:
            return best
        self._index.insert(name, sketch)
        self._kept[name] = sketch
        return None


def sketch_of(text: str) -> MinHash | None:
    """Return the MinHash of a text's runs of five words; a shorter text is one run.

    None for a text without a word: nothing can be said about it.
    """
    words = words_of(text)
    runs = run_hashes(words, max(1, min(_RUN_WORDS, len(words)))) >> _HALF
    if not len(runs):
        return None
    sketch = MinHash(num_perm=_NUM_PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int)
    for start in range(0, len(runs), _CHUNK):
        sketch.update_batch(runs[start : start + _CHUNK])
    return sketch
