"""What a data set will take."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from eyas.generation.estimate import blind, estimate, lengths_of
from eyas.generation.jobs import Wish, build_jobs
from eyas.generation.market import Offer
from eyas.records import Prompt
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Prices, Sampling

GENERATE = DatasetGenerate(budget_tokens=None, samples_per_prompt=1, max_tokens=None)
WISH = Wish(
    endpoint=Endpoint(name="openrouter", model="m", provider={}, prices=None),
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=3),
    generate=GENERATE,
    partition={"short": PartitionRule(max_prompt_tokens=None, max_tokens=1000)},
    target_revision=None,
)


def offer(completion: float) -> Offer:
    return Offer(
        provider=str(completion),
        slug="x",
        quantization="int4",
        context_length=None,
        max_completion_tokens=None,
        prices=Prices(prompt_usd_per_mtok=0.0, completion_usd_per_mtok=completion),
    )


def test_a_mean_needs_thirty_answers_and_has_a_range() -> None:
    assert lengths_of([100] * 29, 1000, "answers") is None
    known = lengths_of([100, 300] * 50, 1000, "answers")
    assert known is not None
    assert known.middle == 200
    assert known.low == pytest.approx(179.9, abs=0.1)
    assert known.high == pytest.approx(220.1, abs=0.1)
    assert known.basis == "100 answers"


def test_without_a_budget_all_rows_are_foretold(
    make_prompts: Callable[[int], list[Prompt]],
) -> None:
    jobs = build_jobs(make_prompts(40), WISH)
    known = lengths_of([100] * 40, 1000, "answers")
    assert known is not None
    found = estimate(jobs, known, GENERATE, [offer(1.0), offer(3.0)], spent_tokens=0, concurrency=8)
    assert found.requests == (40, 40, 40)
    assert found.tokens == (4400, 4400, 4400)  # prompts of 10 tokens
    assert found.usd == pytest.approx((0.004, 0.008, 0.012))
    assert found.concurrency == 8
    assert found.minutes == pytest.approx((4000 / 8 + 400) / 50 / 60)  # and its longest reply


def test_a_budget_bounds_tokens_and_usable_concurrency(
    make_prompts: Callable[[int], list[Prompt]],
) -> None:
    jobs = build_jobs(make_prompts(400), WISH)
    budget = replace(GENERATE, budget_tokens=12_100)
    found = estimate(jobs, blind(1000), budget, [offer(1.0)], spent_tokens=2000, concurrency=500)
    assert found.requests == (10, 38, 168)  # of 1010, 260 and 60 tokens
    assert found.concurrency == 10
    assert all(tokens <= 10_100 for tokens in found.tokens)
    capped = replace(budget, budget_usd=0.005)
    foretold = estimate(jobs, blind(1000), capped, [offer(1.0)], spent_tokens=2000, concurrency=500)
    assert max(foretold.usd) == 0.005


def test_nothing_to_send_costs_nothing() -> None:
    found = estimate([], blind(1000), GENERATE, [offer(1.0)], spent_tokens=0, concurrency=4)
    assert (found.requests, found.usd, found.minutes) == ((0, 0, 0), (0.0, 0.0, 0.0), 0.0)
