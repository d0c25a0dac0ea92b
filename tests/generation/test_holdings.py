"""What the journal already holds, and what an interrupted run has cost."""

from collections.abc import Callable
from dataclasses import replace

from eyas.generation.books import Books
from eyas.generation.holdings import take_stock
from eyas.generation.jobs import Wish, build_jobs
from eyas.records import Prompt
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Sampling

WISH = Wish(
    endpoint=Endpoint(name="openrouter", model="m", provider={}, prices=None),
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=3),
    generate=DatasetGenerate(budget_tokens=10_000, samples_per_prompt=1, max_tokens=None),
    partition={"short": PartitionRule(max_prompt_tokens=None, max_tokens=100)},
    target_revision=None,
)
Make = Callable[[int], list[Prompt]]


def answer(fingerprint: str, completion_tokens: int) -> dict[str, object]:
    counts = {"prompt_tokens": 10, "completion_tokens": completion_tokens, "cost_usd": 0.5}
    return {"fingerprint": fingerprint, "sampling": {"max_tokens": 100}, **counts}


def test_requests_without_an_end_and_abandoned_ones_are_taken_as_billed(make_prompts: Make) -> None:
    jobs, books = build_jobs(make_prompts(3), WISH), Books()
    names = [job.fingerprint for job in jobs]
    books.learn("issued", {"fingerprint": names[0]}, 0, 0)
    books.learn("issued", {"fingerprint": names[1]}, 0, 0)
    books.learn("abandoned", {"fingerprint": names[1], "estimated_tokens": 60}, 0, 0)
    assert take_stock(jobs, books, WISH, None).limits.tokens.spent_tokens == 110 + 60
    local = replace(WISH, endpoint=replace(WISH.endpoint, name="local"))
    assert take_stock(jobs, books, local, None).limits.tokens.spent_tokens == 60


def test_an_answer_without_counts_is_taken_at_its_longest(make_prompts: Make) -> None:
    jobs, books = build_jobs(make_prompts(3), WISH), Books()
    books.learn("responses", answer(jobs[0].fingerprint, 0), 0, 0)
    books.learn("responses", answer(jobs[1].fingerprint, 20), 0, 0)
    stock = take_stock(jobs, books, WISH, None)
    assert stock.limits.tokens.spent_tokens == 110 + 30
    assert len(stock.held) == 2
    assert [job.fingerprint for job in stock.todo] == [jobs[2].fingerprint]
