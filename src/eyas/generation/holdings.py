"""Take stock before a run: what the journal holds, what counts, what is still to be asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.generation.books import Books, Entry
from eyas.generation.facts import Tally
from eyas.generation.jobs import Job, Wish, admission_order, split_jobs
from eyas.generation.limits import Limits, Spent
from eyas.settings import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The start of a run: books that count what is held, and the jobs to ask, in their order."""

    tally: Tally
    limits: Limits
    held: tuple[Job, ...]
    todo: tuple[Job, ...]


def take_stock(jobs: Sequence[Job], books: Books, wish: Wish, prices: Prices | None) -> Stock:
    """Count held answers, charges of failed attempts and rows that are not asked again."""
    generate = wish.generate
    limits = Limits(generate, prices)
    ordered = admission_order(jobs, wish.sampling.seed)
    held, todo = split_jobs(ordered, _sizes(jobs, books, limits), books.final, generate)
    tally = Tally(total=len(jobs), resumed=len(held))
    for job in held:
        entry = books.entries[job.fingerprint]
        limits.hold(_spent(entry, job.max_tokens), entry.latency_s)
        tally.held_tokens += entry.tokens
        tally.held_usd += entry.cost_usd
    paid = wish.endpoint.name != "local"  # nobody charges for what is lost on the way from there
    for job in jobs:
        limits.charge(books.charged.get(job.fingerprint, 0))
        limits.charge(paid * books.unended(job.fingerprint) * _foretold(job, limits))
        if job.fingerprint in books.final and job.fingerprint not in books.entries:
            tally.failed_rows[books.final[job.fingerprint]] += 1
    limits.charge(0, books.lost_usd)
    return Stock(tally=tally, limits=limits, held=tuple(held), todo=tuple(todo))


def counting(jobs: Sequence[Job], books: Books, wish: Wish) -> set[str]:
    """Return the fingerprints of the answers within the budgets.

    A function of the journal alone, not of who came first.
    """
    sizes = _sizes(jobs, books, Limits(wish.generate, None))
    ordered = admission_order(jobs, wish.sampling.seed)
    held, _ = split_jobs(ordered, sizes, books.final, wish.generate)
    return {job.fingerprint for job in held}


def _sizes(jobs: Sequence[Job], books: Books, limits: Limits) -> Mapping[str, tuple[int, float]]:
    return {
        job.fingerprint: (limits.counted(_spent(entry, job.max_tokens)), entry.cost_usd)
        for job in jobs
        if (entry := books.entries.get(job.fingerprint))
    }


def _spent(entry: Entry, max_tokens: int) -> Spent:
    """Return what an answer was billed; one without counts is taken at its longest."""
    return Spent(
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens or max_tokens,
        usd=entry.cost_usd,
    )


def _foretold(job: Job, limits: Limits) -> int:
    mean = limits.tokens.mean_tokens()
    return job.prompt.prompt_tokens + int(job.max_tokens if mean is None else mean)
