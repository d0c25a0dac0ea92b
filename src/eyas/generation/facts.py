"""Put a run into the numbers of its status file, and its state into one word. Pure.

Source: shared/facts/generation.md section 5 (what people ask of a run they cannot see).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from eyas.generation.budget import Budget
from eyas.generation.limiter import Limiter
from eyas.generation.meter import Meter
from eyas.records import Response

_CHANGES = 20  # of the limit, the newest


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run has done so far."""

    total: int  # rows wanted
    resumed: int  # of them answered before this run
    held_tokens: int = 0  # of the resumed rows
    held_usd: float = 0.0
    new: int = 0
    truncated: int = 0
    new_prompt_tokens: int = 0
    new_completion_tokens: int = 0
    new_usd: float = 0.0  # failed attempts included
    requests_sent: int = 0
    abandoned: int = 0
    maybe_billed: int = 0  # attempts that were sent and brought nothing
    settled: int = 0  # of them, and of earlier runs': whose price GET /generation told
    key: dict[str, float | None] = field(default_factory=dict)  # what GET /key said, purse.py
    in_flight: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # attempts, by reason
    failed_rows: Counter[str] = field(default_factory=Counter)  # given up, by reason
    waiting: Counter[str] = field(default_factory=Counter)  # rows to be asked again, by reason

    def count(self, response: Response) -> None:
        """Count an answer of this run."""
        self.new += 1
        self.truncated += response.finish_reason == "length"
        self.new_prompt_tokens += response.prompt_tokens
        self.new_completion_tokens += response.completion_tokens

    @property
    def done(self) -> int:
        """Return the rows with an end, answered or given up."""
        return self.resumed + self.new + self.failed_rows.total()

    @property
    def new_tokens(self) -> int:
        """Return the tokens of the answers of this run."""
        return self.new_prompt_tokens + self.new_completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One look at a run."""

    state: str  # ramp | run | draining | paused
    reason: str
    facts: dict[str, Any]


def state_of(limiter: Limiter, now_s: float, *, stopping: bool, dry: bool) -> str:
    """Return the run's state; `dry`: nothing more will be admitted."""
    if stopping or dry:
        return "draining"
    if now_s < limiter.paused_until_s:
        return "paused"
    return "ramp" if limiter.ramping else "run"


def facts_of(
    tally: Tally,
    budget: Budget,
    limiter: Limiter,
    meter: Meter,
    *,
    now_s: float,
    started_s: float,
    sent_s: Iterable[float],
) -> dict[str, Any]:
    """Return everything a status file says of a run; `sent_s`: when those in flight were sent."""
    measured = meter.facts(now_s, now_s - started_s)
    spent = budget.spent_tokens
    projected = budget.projected_tokens()
    left_rows = max(tally.total - tally.done, 0)
    return {
        "done": tally.done,
        "total": tally.total,
        "unit": "rows",
        "elapsed_s": round(now_s - started_s, 1),
        "eta_s": eta_s(tally, budget, measured["tokens_per_s"], measured["answers_per_s"]),
        "rows": {
            "resumed": tally.resumed,
            "new": tally.new,
            "in_flight": tally.in_flight,
            "left": left_rows,
            "waiting": {reason: n for reason, n in tally.waiting.items() if n},
            "failed": dict(tally.failed_rows),
            "truncated": tally.truncated,
            "abandoned": tally.abandoned,
            "maybe_billed": tally.maybe_billed,
            "settled": tally.settled,
        },
        "attempts": {"sent": tally.requests_sent, "failed": dict(tally.failures)},
        "budget": {
            "limit_tokens": budget.limit_tokens,
            "spent_tokens": spent,
            "reserved_tokens": round(projected - spent),
            "projected_tokens": round(projected),
        },
        "money": {
            "new_usd": round(tally.new_usd, 9),
            "held_usd": round(tally.held_usd, 9),
            "projected_usd": _projected_usd(tally, projected),
        }
        | tally.key,
        "limit": {
            "now": limiter.limit,
            "maximum": limiter.maximum,
            "paused_s": round(max(limiter.paused_until_s - now_s, 0.0), 1),
            "changes": [
                {"at_s": round(at_s - started_s, 1), "limit": limit, "reason": reason}
                for at_s, limit, reason in limiter.history[-_CHANGES:]
            ],
        },
        "oldest_in_flight_s": round(max((now_s - at_s for at_s in sent_s), default=0.0), 1),
        **measured,
    }


def eta_s(tally: Tally, budget: Budget, tokens_per_s: float, answers_per_s: float) -> float | None:
    """Return the seconds to the budget or to the end of the prompts, whichever is nearer.

    By tokens, not by rows: the first answers are the short ones. None while nothing is known.
    """
    mean = budget.mean_tokens()
    if mean is None and tally.new:
        mean = tally.new_completion_tokens / tally.new
    if not mean or not tokens_per_s or not answers_per_s:
        return None
    left_tokens = max(tally.total - tally.done, 0) * mean
    if budget.limit_tokens is not None:
        share = tally.new_completion_tokens / max(tally.new_tokens, 1)
        left_tokens = min(left_tokens, max(budget.limit_tokens - budget.spent_tokens, 0) * share)
    return round(left_tokens / tokens_per_s, 1)


def _projected_usd(tally: Tally, projected_tokens: float) -> float | None:
    """Return what the budget or the rows will have cost, at this run's price a token."""
    if not tally.new_tokens:
        return None
    rate = tally.new_usd / tally.new_tokens
    return round(tally.held_usd + rate * max(projected_tokens - tally.held_tokens, 0), 6)
