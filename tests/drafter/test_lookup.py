import pytest

from eyas.drafter.lookup import Lookup


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # three tokens match
        ([2, 3, 8, 9, 2, 3, 7, 2, 3], [7, 2, 3]),  # of two copies the later one
        ([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], [8, 2, 3]),  # three tokens go before two
        ([5, 3, 8, 9, 1, 3], [8, 9, 1]),  # one token matches
        ([4, 4, 4, 4], [4]),  # a copy may overlap the end
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_prompt_lookup_copies_what_followed(ids: list[int], drafts: list[int]) -> None:
    assert Lookup(max_ngram=3).propose(ids, 3) == drafts


def test_a_shorter_ngram_finds_more() -> None:
    ids = [7, 3, 8, 2, 3]
    assert Lookup(max_ngram=1).propose(ids, 2) == [8, 2]
    assert Lookup(max_ngram=1).propose(ids, 1) == [8]
