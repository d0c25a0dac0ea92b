"""Tokens and dollars together."""

import pytest

from eyas.generation.limits import Limits, Spent
from eyas.settings import DatasetGenerate, Prices

PRICES = Prices(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=10.0)


def generate(
    tokens: int | None = None, usd: float | None = None, counts: str = "total"
) -> DatasetGenerate:
    return DatasetGenerate(
        budget_tokens=tokens,
        samples_per_prompt=1,
        max_tokens=None,
        budget_counts=counts,
        budget_usd=usd,
    )


@pytest.mark.parametrize(("counts", "spent"), [("total", 30), ("completion", 20)])
def test_prompts_count_where_they_are_to(counts: str, spent: int) -> None:
    limits = Limits(generate(100, counts=counts), None)
    ticket = limits.admit(10, 50)
    limits.send(ticket, 0.0)
    limits.settle(ticket, Spent(prompt_tokens=10, completion_tokens=20, usd=1.0), 1.0)
    assert limits.tokens.spent_tokens == spent


def test_dollars_end_admission_where_tokens_would_not() -> None:
    limits = Limits(generate(None, usd=0.0025), PRICES)  # a request of 0 + 100 tokens: $0.001
    assert limits.admits(0, 100)
    first = limits.admit(0, 100)
    assert limits.admits(0, 100)
    second = limits.admit(0, 100)
    assert not limits.admits(0, 100)
    limits.send(first, 0.0)
    limits.settle(first, Spent(prompt_tokens=0, completion_tokens=10, usd=0.0001), 1.0)
    assert limits.admits(0, 100)
    limits.void(second)
    limits.charge(0, 0.0024)
    assert not limits.admits(0, 100)


def test_held_answers_count_in_both() -> None:
    limits = Limits(generate(100, usd=1.0), PRICES)
    limits.hold(Spent(prompt_tokens=40, completion_tokens=40, usd=0.5))
    assert limits.tokens.spent_tokens == 80
    assert not limits.admits(10, 11)
    assert limits.admits(10, 10)
