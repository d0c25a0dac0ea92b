"""Play the budget's rule on a simulated clock, beside one that knows the mean from the start.

10 M tokens, lognormal replies (median 1,900, sigma 0.95, at most 10,240), prompts of 350; the limit
of requests in flight starts at 20 and doubles every 3 s. `share_of_best`: the time that a scheduler
would need that knows every length, on as many connections with no ramp, over the time it took.
Run: python benchmarks/budget_rules.py
"""

import argparse
import heapq
import json
import math
import random
import statistics
from collections.abc import Sequence

import numpy as np

from eyas.generation.budget import Budget
from eyas.generation.survival import Outlook

MARKETS = {"one speed": (60,), "three providers": (60,) * 5 + (80,) * 3 + (40,) * 2}  # tokens/s


class Knowing(Budget):
    """The same rule for one who knows mean and variance of the answers from the start."""

    def _rescan(self) -> None:
        if self._outlook is None:
            dice = random.Random(0)
            lengths = [length_of(dice) for _ in range(100_000)]
            mean, variance = statistics.fmean(lengths), statistics.pvariance(lengths)
            self._outlook = Outlook(
                mean=mean,
                variance=variance,
                doubt=0.0,
                open_mean_n=np.zeros(0),
                open_variance=0.0,
            )
        rows = len(self._answers) + len(self._open)
        self._foretold_tokens = rows * self._outlook.mean - sum(self.known_lengths())
        self._foretold_variance = len(self._open) * self._outlook.variance


def length_of(dice: random.Random) -> int:
    """Draw the tokens of a reply."""
    return min(10_240, round(1900 * math.exp(dice.gauss(0, 0.95))))


def run_through(
    seed: int, concurrency: int, speeds: Sequence[float], rule: type[Budget] = Budget
) -> tuple[float, float]:
    """Play 10 M tokens of lognormal replies; return overshoot in percent, and the share of best.

    Best: the same answers on as many connections, all lengths known, nothing to ramp up.
    """
    dice, budget, now_s, grow_s, limit = random.Random(seed), rule(10_000_000), 0.0, 3.0, 20
    flying: list[tuple[float, int, int]] = []  # end, ticket, length
    ends: list[float] = []  # of the best
    while True:
        while len(flying) < min(limit, concurrency) and budget.admits(350, 10_240):
            length = length_of(dice)
            takes_s = 2 + length / (dice.choice(speeds) * dice.uniform(0.75, 1.25))
            ticket = budget.admit(350, 10_240)
            budget.send(ticket, now_s)
            heapq.heappush(flying, (now_s + takes_s, ticket, length))
            begin_s = heapq.heappop(ends) if len(ends) >= concurrency else 0.0
            heapq.heappush(ends, begin_s + takes_s)
        if not flying:
            return 100 * (budget.spent_tokens / 10_000_000 - 1), max(ends) / now_s
        if limit < concurrency and flying[0][0] > grow_s:
            now_s, limit, grow_s = grow_s, 2 * limit, grow_s + 3.0
            continue
        now_s, ticket, length = heapq.heappop(flying)
        budget.settle(ticket, 350, length, now_s)


def main() -> None:
    """Print a line for each rule, market and concurrency."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    for rule in (Budget, Knowing):
        for market, speeds in MARKETS.items():
            for concurrency in (500, 2000):
                played = [run_through(i, concurrency, speeds, rule) for i in range(options.runs)]
                over, share = zip(*played, strict=True)
                line = {
                    "rule": "eyas" if rule is Budget else "knows the mean",
                    "market": market,
                    "concurrency": concurrency,
                    "runs": options.runs,
                    "overshoot_percent": [round(f(over), 2) for f in (min, statistics.fmean, max)],
                    "share_of_best": round(statistics.fmean(share), 3),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
