import pytest

from eyas.prompts.near import Seen, sketch_of

LONG = " ".join(f"word{i}" for i in range(200))


def test_text_with_one_word_changed_is_alike_and_another_is_not() -> None:
    seen = Seen(0.8)
    assert seen.like("a", LONG) is None
    assert seen.like("b", LONG.replace("word100", "other")) == "a"
    assert seen.like("c", " ".join(f"term{i}" for i in range(200))) is None


def test_only_kept_texts_are_compared_with() -> None:
    seen = Seen(0.8)
    half, rest = LONG.replace("word1", "term1"), "words of its own, five or more"
    assert [seen.like(name, text) for name, text in (("a", LONG), ("b", LONG), ("c", rest))] == [
        None,
        "a",
        None,
    ]
    assert seen.like("d", half) is None


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("What is a list?", "what is a LIST", True),
        ("What is a list?", "What is a tuple?", False),
        ("7", "8", False),
        ("?!", "...", False),
        ("你好吗", "你好吗!", True),
    ],
)
def test_short_texts_are_alike_if_their_words_are(first: str, second: str, alike: bool) -> None:
    seen = Seen(0.8)
    seen.like("a", first)
    assert (seen.like("b", second) == "a") is alike


def test_share_of_common_runs_is_estimated_within_three_deviations() -> None:
    words = LONG.split()
    first, second = sketch_of(" ".join(words)), sketch_of(" ".join(words[20:]))
    assert first is not None
    assert second is not None
    exact = 176 / 196  # runs of five words: 196 in all, 176 of them in both
    assert first.jaccard(second) == pytest.approx(exact, abs=3 * (exact * (1 - exact) / 128) ** 0.5)


def test_very_long_text_is_sketched_in_pieces() -> None:
    text = " ".join(map(str, range(40_000)))
    seen = Seen(0.8)
    seen.like("a", text)
    assert seen.like("b", text + " end") == "a"
