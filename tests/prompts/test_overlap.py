import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.prompts.overlap import passages_of, run_hashes, words_of

ALPHABET = list(string.ascii_lowercase)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", "world"]),
        ("it's snake_case", ["it", "s", "snake", "case"]),
        ("x=3.5", ["x", "3", "5"]),
        ("Straße über", ["straße", "über"]),
        ("你好 world", ["你", "好", "world"]),
        ("…", []),
    ],
)
def test_words_are_lower_case_without_punctuation(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_a_text_of_n_words_has_the_runs_that_start_at_each() -> None:
    runs = run_hashes(list("abcd"), 3)
    assert len(runs) == 2
    assert set(runs) == set(run_hashes(list("abc"), 3)) | set(run_hashes(list("bcd"), 3))
    assert len(run_hashes(list("ab"), 3)) == 0
    assert len(run_hashes(list("abab"), 2)) == 2  # ab, ba, ab


@given(
    st.lists(st.sampled_from("abc"), max_size=12),
    st.lists(st.sampled_from("abc"), max_size=12),
    st.integers(1, 4),
)
def test_shared_hashes_are_the_shared_runs(first: list[str], second: list[str], n: int) -> None:
    def naive(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    shared = np.intersect1d(run_hashes(first, n), run_hashes(second, n))
    assert len(shared) == len(naive(first) & naive(second))


def test_thirteen_words_in_a_row_are_a_passage_and_twelve_are_not() -> None:
    known = passages_of([" ".join(ALPHABET)], 13)
    copied = " ".join(ALPHABET[5:18])
    assert known.found_in(f"Please: {copied.upper()}!") == copied
    assert known.found_in(" ".join(ALPHABET[5:17])) is None
    assert known.found_in("") is None


def test_words_that_more_than_ten_prompts_share_are_no_passage() -> None:
    phrase = "answer with one word"
    assert passages_of([f"{phrase} {i}" for i in range(10)], 4).found_in(phrase) == phrase
    common = passages_of([f"{phrase} {i}" for i in range(11)], 4)
    assert common.found_in(phrase) is None
    assert common.found_in("with one word 7") == "with one word 7"


def test_no_evaluation_prompts_are_found_in_nothing() -> None:
    assert passages_of([], 2).found_in("a b c") is None
