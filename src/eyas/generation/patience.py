"""How hard and how long to try: the plan of a run, and the wait before a row's next try. Pure."""

import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.errors import EyasError
from eyas.generation.outcomes import Outcome
from eyas.generation.rows import Row

HOPELESS = 20  # in a row, with no answer between: the endpoint is at fault, not the rows
_PUT_ASIDE = 5  # refusals of one provider in a row, with no answer of it between
_ELSEWHERE = frozenset({"bad_request", "not_found", "unprocessable"})  # another provider may answer
_TRIES_ELSEWHERE = 2  # a row that as many providers refuse is at fault itself
_JITTER = 0.2
_DOUBLINGS = 10  # at most
log = logging.getLogger("eyas")
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
    """Return full jitter over a doubling wait, or what was asked for and up to 20 % more.

    Never less than the one, and never longer than the row's patience: a Retry-After may be 0, or a
    date in the far future.
    """
    own_s = random.uniform(
        0, min(plan.backoff_cap_s, plan.backoff_s * 2 ** min(row.sends - 1, _DOUBLINGS))
    )
    asked_s = outcome.retry_after_s
    if asked_s is None and outcome.kind == "pause":
        asked_s = plan.pause_s
    if asked_s is None:
        return own_s
    return min(max(asked_s * random.uniform(1.0, 1.0 + _JITTER), own_s), plan.patience_s)


def outage_s(plan: Plan, silence: int) -> float:
    """Return how long all wait after `silence` attempts without an answer between; 0 for few."""
    doubled = min(silence // HOPELESS, _DOUBLINGS)
    return min(plan.backoff_s * 2**doubled, plan.backoff_cap_s) if doubled else 0.0


def refusal(outcome: Outcome) -> EyasError:
    """Return the error that ends a run without money or a key."""
    message = f"the endpoint refused ({outcome.reason}): {outcome.detail}"
    return EyasError(message, hint=_HINTS.get(outcome.reason))


def hopeless(outcome: Outcome) -> EyasError:
    """Return the error that ends a run in which every row is given up."""
    return EyasError(
        f"{HOPELESS} rows failed one after another, the last one with "
        f"{outcome.reason}: {outcome.detail}",
        hint="check endpoint.model and endpoint.provider",
    )


def out_of_reach(outcome: Outcome, silent_s: float) -> EyasError:
    """Return the error that ends a run whose endpoint has been silent for too long."""
    return EyasError(
        f"no answer for {silent_s:.0f} s, the last attempt ended with "
        f"{outcome.reason}: {outcome.detail}",
        hint="check the connection; the same command goes on where it stopped",
    )


class Providers:
    """Who refuses rows (400, 404, 422), and who is asked no more."""

    def __init__(self, routing: Mapping[str, Any], slugs: Mapping[str, str]) -> None:
        self.aside: set[str] = set()  # routing slugs
        self._pinned = len(routing.get("only") or ()) == 1
        self._slugs = slugs
        self._refusals: Counter[str] = Counter()  # since the provider's last answer

    def answered(self, provider: str) -> None:
        """Count an answer."""
        self._refusals.pop(provider, None)

    def pass_on(self, row: Row, outcome: Outcome) -> bool:
        """Tell whether a refused row may be another provider's; put one aside that keeps refusing.

        A refusal is not billed, and the next may answer. Where one is pinned there is no other.
        """
        name = self._slugs.get(outcome.provider, outcome.provider)
        if self._pinned or not name or name in row.avoid or outcome.reason not in _ELSEWHERE:
            return False
        if len(row.avoid) >= _TRIES_ELSEWHERE:
            return False
        row.avoid.add(name)
        self._refusals[outcome.provider] += 1
        if self._refusals[outcome.provider] >= _PUT_ASIDE and name not in self.aside:
            self.aside.add(name)
            log.warning(
                "provider '%s' is put aside for the rest of the run: %d refusals in a row (%s: %s)",
                *(outcome.provider, _PUT_ASIDE, outcome.reason, outcome.detail),
            )
        return True
