"""Find prompts that repeat a passage of the evaluation prompts: equal runs of n words. Pure.

Source: GPT-3, https://arxiv.org/abs/2005.14165, appendix C (13-grams; runs that stand in more than
ten documents are phrases of the trade, not leaks).
"""

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
_COMMON_IN = 10  # evaluation prompts; a run in more of them is boilerplate
# Chinese and Japanese put no space between words: there each sign counts as one.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Passages:
    """The runs of words that must not come again, as sorted hashes."""

    num_words: int
    hashes: Hashes

    def found_in(self, text: str) -> str | None:
        """Return the first such run that a text has, None if it has none."""
        words = words_of(text)
        places = np.flatnonzero(self._known(_runs(words, self.num_words)))
        if not len(places):
            return None
        return " ".join(words[places[0] : places[0] + self.num_words])

    def _known(self, runs: Hashes) -> npt.NDArray[np.bool_]:
        if not len(self.hashes):
            return np.zeros(len(runs), np.bool_)
        places = np.searchsorted(self.hashes, runs).clip(max=len(self.hashes) - 1)
        return self.hashes[places] == runs


def passages_of(texts: Iterable[str], num_words: int) -> Passages:
    """Return the runs of `num_words` words of these texts, boilerplate left out."""
    runs = [run_hashes(words_of(text), num_words) for text in texts]
    every = np.concatenate([np.empty(0, np.uint64), *runs])
    hashes, counts = np.unique(every, return_counts=True)
    return Passages(num_words=num_words, hashes=hashes[counts <= _COMMON_IN])


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def run_hashes(words: Sequence[str], num_words: int) -> Hashes:
    """Return the distinct hashes of all runs of so many words, sorted; a short text has none.

    Example: "a b c d" by threes -> the hashes of "a b c" and "b c d".
    """
    return np.unique(_runs(words, num_words))


def _runs(words: Sequence[str], num_words: int) -> Hashes:
    """Return the hash of the run that starts at each word."""
    count = max(0, len(words) - num_words + 1)
    hashes = np.fromiter(map(_word_hash, words), np.uint64, len(words))
    runs = np.zeros(count, np.uint64)
    for place in range(num_words if count else 0):
        runs = runs * _BASE + hashes[place : place + count]
    return runs


@functools.lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
