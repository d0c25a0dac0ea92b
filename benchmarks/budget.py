"""Measure by the server's books how near a run comes to its token budget, beside naive policies.

The naive ones: stop at the counter (then drain), and reserve prompt + max_tokens for each request.
Run: python benchmarks/budget.py --concurrency 500 --budget-tokens 10000000
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import market

from eyas.generation.budget import Budget
from eyas.generation.limits import Limits

PROMPT_TOKENS = 350
MAX_TOKENS = 10_240
TIME_SCALE = 20.0
LENGTHS = [{"max_tokens": 1_000_000, "median_tokens": 1900.0, "sigma": 0.95}]


class StopAtCounter(Budget):
    """Send while what has come in is below the budget."""

    def admits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Look at the counter alone."""
        del prompt_tokens, max_tokens
        assert self.limit_tokens is not None
        return self.spent_tokens < self.limit_tokens


class ReserveAll(Budget):
    """Reserve max_tokens for every request in flight."""

    def _reserve(self, more: int, caps: int) -> float:
        del more
        return caps

    def _is_full(self, limit_tokens: int) -> bool:
        del limit_tokens
        return False


POLICIES = {"eyas": Budget, "stop_at_counter": StopAtCounter, "reserve_max_tokens": ReserveAll}


async def measure(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Run one policy against a fresh server and read its ledger."""
    speeds = [market.provider(tokens_per_s=60.0)]
    changes = {"time_scale": TIME_SCALE, "providers": speeds, "lengths": LENGTHS}
    common = market.wish(MAX_TOKENS, options.budget_tokens)
    jobs = market.jobs_of(options.budget_tokens // 1000, common, PROMPT_TOKENS)
    limits = Limits(common.generate, None)
    limits.tokens = POLICIES[name](options.budget_tokens)
    with (
        market.market(seed=options.seed, **changes) as url,
        tempfile.TemporaryDirectory() as folder,
    ):
        run = await market.go(
            *(url, jobs, common, Path(folder)),
            plan=market.plan_of(options.concurrency, time_scale=TIME_SCALE),
            limits=limits,
        )
        books = market.ledger(url)
    billed = books["prompt_tokens"] + books["completion_tokens"]
    kept = run.tally.new_completion_tokens / max(run.tally.new, 1)
    admitted = books["completion_tokens"] / books["answered"]
    facts = run.facts()
    return {
        "policy": name,
        "concurrency": options.concurrency,
        "budget_tokens": options.budget_tokens,
        "billed_by_server": billed,
        "overshoot_percent": round(100 * (billed / options.budget_tokens - 1), 3),
        "requests": books["requests"],
        "kept_mean_over_admitted_mean": round(kept / admitted, 4),
        "kept_mean_tokens": round(kept, 1),
        "loop_lag_s": facts["loop_lag_s"],
        "minutes_at_scale_1": round(facts["elapsed_s"] * TIME_SCALE / 60, 1),
    }


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=500)
    parser.add_argument("--budget-tokens", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    options = parser.parse_args()
    for name in options.policies:
        print(json.dumps(asyncio.run(measure(name, options))), flush=True)


if __name__ == "__main__":
    main()
