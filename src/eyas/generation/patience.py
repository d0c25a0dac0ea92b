"""How hard and how long to try: the plan of a run, and the wait before a row's next try. Pure."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.errors import EyasError
from eyas.generation.outcomes import Outcome
from eyas.generation.rows import Row

HOPELESS = 20  # rows given up in a row, with no answer between: the endpoint is at fault
PUT_ASIDE = 5  # refusals of one provider in a row, with no answer of it between
ELSEWHERE = frozenset({"bad_request", "not_found", "unprocessable"})  # another provider may answer
_TRIES_ELSEWHERE = 2  # a row that as many providers refuse is at fault itself
_JITTER = 0.2
_HINTS = {
    "unauthorized": "check the API key",
    "out_of_credits": "add credit, then run the same command: it goes on where it stopped",
    "key_limit": "raise the key's limit, then run the same command",
    "request_exceeds_budget": "lower max_tokens or add credit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How hard and how long to try; seconds are of wall time."""

    concurrency: Mapping[str, int]  # partition -> requests in flight at most
    attempts: int  # a row, rate limits not counted
    patience_s: float  # a row that is only ever rate-limited is given up after this
    backoff_s: float = 1.0  # first wait at most; doubles
    backoff_cap_s: float = 60.0
    pause_s: float = 5.0  # where an in-flight hold names no time
    time_scale: float = 1.0  # of a rehearsal: divides the limiter's times
    slugs: Mapping[str, str] = field(default_factory=dict)  # provider's name -> its routing slug
    quantizations: Mapping[str, str] = field(default_factory=dict)  # provider's name -> its own


def delay_s(plan: Plan, row: Row, outcome: Outcome) -> float:
    """Return full jitter over a doubling wait, or what was asked for and up to 20 % more."""
    asked_s = outcome.retry_after_s
    if asked_s is None and outcome.kind == "pause":
        asked_s = plan.pause_s
    if asked_s is not None:
        return asked_s * random.uniform(1.0, 1.0 + _JITTER)
    return random.uniform(0, min(plan.backoff_cap_s, plan.backoff_s * 2 ** (row.sends - 1)))


def tries_elsewhere(row: Row, outcome: Outcome) -> bool:
    """Tell whether a refused row may be another provider's: it is not billed, and may succeed."""
    named = outcome.provider and outcome.provider not in row.avoid
    return bool(named) and outcome.reason in ELSEWHERE and len(row.avoid) < _TRIES_ELSEWHERE


def refusal(outcome: Outcome) -> EyasError:
    """Return the error that ends a run without money or a key."""
    message = f"the endpoint refused ({outcome.reason}): {outcome.detail}"
    return EyasError(message, hint=_HINTS.get(outcome.reason))


def hopeless(outcome: Outcome) -> EyasError:
    """Return the error that ends a run in which nothing succeeds any more."""
    return EyasError(
        f"{HOPELESS} rows failed one after another, the last one with "
        f"{outcome.reason}: {outcome.detail}",
        hint="check endpoint.model, endpoint.provider and the connection",
    )
