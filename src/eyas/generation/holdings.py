"""Take stock before a run: what the journal holds, what counts, what is still to be asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.generation.facts import Tally
from eyas.generation.jobs import Job, Wish, admission_order, split_jobs
from eyas.generation.journal import Entry, Journal
from eyas.generation.limits import Limits, Spent
from eyas.settings import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The start of a run: books that count what is held, and the jobs to ask, in their order."""

    tally: Tally
    limits: Limits
    held: tuple[Job, ...]
    todo: tuple[Job, ...]


def take_stock(jobs: Sequence[Job], journal: Journal, wish: Wish, prices: Prices | None) -> Stock:
    """Count held answers, charges of failed attempts and rows that are not asked again."""
    generate = wish.generate
    limits = Limits(generate, prices)
    ordered = admission_order(jobs, wish.sampling.seed)
    held, todo = split_jobs(ordered, _sizes(journal, limits), journal.final, generate)
    tally = Tally(total=len(jobs), resumed=len(held), budget_tokens=generate.budget_tokens)
    for entry in (journal.entries[job.fingerprint] for job in held):
        limits.hold(_spent(entry))
        tally.held_tokens += entry.tokens
        tally.held_usd += entry.cost_usd
    for job in jobs:
        limits.charge(journal.charged.get(job.fingerprint, 0))
        if job.fingerprint in journal.final and job.fingerprint not in journal.entries:
            tally.failed_rows[journal.final[job.fingerprint]] += 1
    limits.charge(0, journal.lost_usd)
    return Stock(tally=tally, limits=limits, held=tuple(held), todo=tuple(todo))


def counting(jobs: Sequence[Job], journal: Journal, wish: Wish) -> set[str]:
    """Return the fingerprints of the answers within the budgets.

    A function of the journal alone, not of who came first.
    """
    sizes = _sizes(journal, Limits(wish.generate, None))
    ordered = admission_order(jobs, wish.sampling.seed)
    held, _ = split_jobs(ordered, sizes, journal.final, wish.generate)
    return {job.fingerprint for job in held}


def _sizes(journal: Journal, limits: Limits) -> Mapping[str, tuple[int, float]]:
    return {
        key: (limits.counted(_spent(entry)), entry.cost_usd)
        for key, entry in journal.entries.items()
    }


def _spent(entry: Entry) -> Spent:
    return Spent(
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens,
        usd=entry.cost_usd,
    )
