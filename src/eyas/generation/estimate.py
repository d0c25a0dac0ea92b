"""Foretell what a data set will take: requests, tokens, dollars, minutes. Pure.

A reply's length is foretold from answers already held, of this data set or of its like; with none,
from max_tokens alone, and the range says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.generation.holdings import Stock
from eyas.generation.jobs import Job, Wish
from eyas.generation.market import Offer
from eyas.settings import DatasetGenerate

_ENOUGH = 30  # answers, for their mean to be trusted
_BLIND_SHARE = (0.05, 0.25, 1.0)  # of max_tokens: low, middle, high; assumption, told in the plan
_Z = 2.0  # standard errors: low and high
_LONGEST = 4.0  # of a mean: the longest replies, which end last; assumption (rehearsal: 3.6)
_TOKENS_PER_S = 50.0  # of one request, until a run has measured it; assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The mean completion, with its range, and where it comes from."""

    low: float
    middle: float
    high: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is still to come; ranges are (low, middle, high)."""

    requests: tuple[int, int, int]
    tokens: tuple[int, int, int]  # prompts and completions
    completion_tokens: tuple[int, int, int]
    usd: tuple[float, float, float]
    minutes: float
    concurrency: int  # that the budget lets be used
    basis: str


def lengths_of(known: Sequence[int], max_tokens: int, basis: str) -> Lengths | None:
    """Return the mean of known completions with its range; None if they are too few."""
    if len(known) < _ENOUGH:
        return None
    mean = sum(known) / len(known)
    variance = sum((length - mean) ** 2 for length in known) / (len(known) - 1)
    error = _Z * math.sqrt(variance / len(known))
    return Lengths(
        low=max(mean - error, 1.0),
        middle=mean,
        high=min(mean + error, max_tokens),
        basis=f"{len(known)} {basis}",
    )


def blind(max_tokens: int) -> Lengths:
    """Return what can be said without any answer."""
    low, middle, high = (share * max_tokens for share in _BLIND_SHARE)
    basis = "no answer yet: 5-25-100 % of max_tokens"
    return Lengths(low=low, middle=middle, high=high, basis=basis)


def foresee(
    stock: Stock,
    todo: Sequence[Job],
    wish: Wish,
    offers: Sequence[Offer],
    *,
    known: Sequence[int] = (),
    concurrency: int = 1,
) -> Estimate:
    """Return what a data set will take, from its own answers, else `known` ones of its like."""
    cap = max((job.max_tokens for job in todo), default=1)
    own = stock.limits.tokens.known_lengths()
    lengths = lengths_of(own, cap, "answers of this data set")
    lengths = (
        lengths or lengths_of(known, cap, "answers of sets with the same max_tokens") or blind(cap)
    )
    return estimate(
        todo,
        lengths,
        wish.generate,
        offers,
        spent_tokens=stock.limits.tokens.spent_tokens,
        concurrency=concurrency,
    )


def estimate(
    todo: Sequence[Job],
    lengths: Lengths,
    generate: DatasetGenerate,
    offers: Sequence[Offer],
    *,
    spent_tokens: int,
    concurrency: int,
) -> Estimate:
    """Return what the jobs will take within what is left of the budget.

    Short answers give more requests for the same tokens, so the ends of the ranges do not meet.
    """
    left = None if generate.budget_tokens is None else max(generate.budget_tokens - spent_tokens, 0)
    prompt = sum(job.prompt.prompt_tokens for job in todo) / max(len(todo), 1)
    counted = prompt if generate.budget_counts == "total" else 0.0
    sizes = (lengths.low, lengths.middle, lengths.high)
    requests = [
        len(todo) if left is None else min(len(todo), int(left / (counted + size)))
        for size in sizes
    ]
    completions = [number * size for number, size in zip(requests, sizes, strict=True)]
    prompts = [number * prompt for number in requests]
    usd = _usd(prompts, completions, offers)
    usd = [u if generate.budget_usd is None else min(u, generate.budget_usd) for u in usd]
    cap = max((job.max_tokens for job in todo), default=1)
    usable = concurrency if left is None else min(concurrency, max(int(left / (counted + cap)), 1))
    longest = min(cap, _LONGEST * lengths.middle) if requests[1] else 0.0
    waves = completions[1] / max(usable, 1) + longest
    return Estimate(
        requests=_three(requests),
        tokens=_three([p + c for p, c in zip(prompts, completions, strict=True)]),
        completion_tokens=_three(completions),
        usd=(min(usd), usd[1], max(usd)),
        minutes=waves / _TOKENS_PER_S / 60,  # the last of them are waited for
        concurrency=usable,
        basis=lengths.basis,
    )


def _usd(
    prompts: Sequence[float], completions: Sequence[float], offers: Sequence[Offer]
) -> list[float]:
    """Return low at the cheapest offer, high at the dearest, the middle at their mean."""
    each = [
        [
            (p * o.prices.prompt_usd_per_mtok + c * o.prices.completion_usd_per_mtok) / 1e6
            for o in offers
        ]
        for p, c in zip(prompts, completions, strict=True)
    ]
    return [min(each[0]), sum(each[1]) / len(each[1]), max(each[2])]


def _three(values: Sequence[float]) -> tuple[int, int, int]:
    """Return low, middle, high; fewer long answers may make less than many short ones."""
    low, middle, high = min(values), values[1], max(values)
    return round(low), round(middle), round(high)
