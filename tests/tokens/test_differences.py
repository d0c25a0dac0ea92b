"""Where and why rebuilt ids are not those sampled."""

from collections.abc import Sequence

import pytest

from eyas.tokens.differences import difference, num_identical

WORDS = {1: "a", 2: "b", 12: "ab", 3: "c", 4: "d", 9: "\N{REPLACEMENT CHARACTER}"}


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("sampled", "rebuilt", "told"),
    [
        (
            [3, 1, 2, 3, 4],
            [3, 12, 3, 4],
            "another spelling of the same text, at token 1: sampled [1, 2], rebuilt [12]",
        ),
        (
            [3, 1, 9],
            [3, 1],
            "a character whose bytes are not whole, at token 2: sampled [9], rebuilt []",
        ),
        (
            [1, 2, 3, 9],
            [12, 3],
            "another spelling of the same text, at token 0: sampled [1, 2, 3, 9], rebuilt [12, 3]",
        ),
        ([3, 1, 4], [3, 2, 4], "another text, at token 1: sampled [1, 4], rebuilt [2, 4]"),
        ([3], [3, 4], "another text, at token 1: sampled [], rebuilt [4]"),
        ([1] * 20, [2] * 20, f"another text, at token 0: sampled {[1] * 8}, rebuilt {[2] * 8}"),
    ],
)
def test_the_cause_the_place_and_both_sides(
    sampled: list[int], rebuilt: list[int], told: str
) -> None:
    assert difference(sampled, rebuilt, decode) == told


BASE = range(1000, 2000)


@pytest.mark.parametrize(
    ("sampled", "rebuilt", "same"),
    [
        ([7, 8, 9, 4, 5], [7, 17, 4, 5], 3),
        ([7, 8, 9, 4], [7, 17, 4], 2),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [], 0),
        ([], [1], 0),
        ([1, 1, 1], [1, 1], 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 23, 4, 5, 67, 8], 4),
        ([1] * 20, [2] * 20, 0),
        ([1, 2, 5, 6, *BASE, 7, 8, 9], [1, 12, 5, 9, *BASE, 2, 5, 78, 9], 1002),
    ],
)
def test_ids_are_counted_beside_the_stretches_that_differ(
    sampled: list[int], rebuilt: list[int], same: int
) -> None:
    assert num_identical(sampled, rebuilt) == same
