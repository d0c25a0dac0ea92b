"""The bill, and lengths."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.records import Violation
from eyas.tokens.audit import bill_metrics, length_metrics, truth_metrics
from eyas.tokens.rebuild import Evidence, Rebuilt


def evidence(billed: int, rebuilt: int, provider: str = "a", prompt_delta: int = 0) -> Evidence:
    return Evidence(
        provider=provider,
        billed_tokens=billed,
        rebuilt_tokens=rebuilt,
        count_delta=billed - rebuilt,
        prompt_delta=prompt_delta,
        half_character=False,
        identical=None,
    )


def row(seen: Evidence | None) -> Rebuilt:
    violation = Violation(id="p", dataset="d", rule="count_mismatch", detail="")
    return Rebuilt(result=violation, evidence=seen)


@pytest.mark.parametrize(
    ("deltas", "mode"), [([1, 0], 0), ([-1, 1], -1), ([2, 2, 0], 2), ([3, -1, -1, 3], -1)]
)
def test_of_equal_offsets_the_nearest_to_zero_is_the_mode(deltas: list[int], mode: int) -> None:
    rows = [row(evidence(10 + d, 10)) for d in deltas]
    assert bill_metrics(rows)["offset_mode_tokens_a"] == mode


def test_the_bill_counts_rejected_replies_too() -> None:
    rows = [row(evidence(10, 10)), row(evidence(14, 10, "Moonshot AI", 2)), row(None)]
    assert bill_metrics(rows) == {
        "billed_tokens": 24,
        "rebuilt_tokens": 20,
        "billing_difference_share": round(4 / 24, 6),
        "count_exact_share": 0.5,
        "prompt_exact_share": 0.5,
        "offset_mode_tokens_a": 0,
        "offset_mode_tokens_moonshot_ai": 4,
    }


def test_shares_of_identical_replies_and_of_their_tokens() -> None:
    known = [
        replace(evidence(4, 4), identical=True, sampled_tokens=4, same_tokens=4),
        replace(evidence(6, 5), identical=False, sampled_tokens=6, same_tokens=3),
    ]
    metrics = truth_metrics([*map(row, known), row(evidence(9, 9))])
    assert (metrics["identical_share"], metrics["identical_token_share"]) == (0.5, 0.7)
    assert metrics["kept_identical_token_share"] == 0.0


def test_where_nothing_was_billed_or_known_nothing_is_claimed() -> None:
    assert bill_metrics([row(None)]) == {}
    assert truth_metrics([row(evidence(1, 1))]) == {}


def test_lengths_are_told_by_their_spread() -> None:
    assert length_metrics("reply", [4, 1, 2, 3, 100]) == {
        "reply_tokens": 110,
        "reply_tokens_mean": 22.0,
        "reply_tokens_p50": 3,
        "reply_tokens_p90": 4,
        "reply_tokens_max": 100,
    }
    assert length_metrics("reply", []) == {"reply_tokens": 0}


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_the_spread_is_ordered(lengths: list[int]) -> None:
    m = length_metrics("x", lengths)
    assert min(lengths) <= m["x_tokens_p50"] <= m["x_tokens_max"]
    assert m["x_tokens_p90"] <= m["x_tokens_max"] == max(lengths)
