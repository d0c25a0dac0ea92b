"""Play the budget's rule on a simulated clock, beside bolder ones.

`knows the mean`: from the start. `extrapolates`: what no answer has shown yet is foretold by a
Pareto tail fitted to the later half of the answers, where ours takes it to run to max_tokens.

10 M tokens, lognormal replies (median 1,900, sigma 0.95, at most 10,240), prompts of 350; the limit
of requests in flight starts at 20 and doubles every 3 s. In the market with loops, 5 % of the
replies run to max_tokens, the others are lognormal (median 1,200, sigma 0.6). `share_of_best`: the
time that a scheduler would need that knows every length, on as many connections with no ramp, over
the time it took.
Run: python benchmarks/budget_rules.py
"""

import argparse
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from eyas.generation.budget import Budget
from eyas.generation.survival import Outlook, foretell

LIMIT = 10_000_000
MAX_TOKENS = 10_240


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


class Extrapolating(Budget):
    """The same rule, but what is older than every answer is not taken to run to max_tokens."""

    def _rescan(self) -> None:
        before = self._outlook
        super()._rescan()
        if self._outlook is before or self._outlook is None:
            return
        ages_s = [self._now_s - self._sent_s.get(ticket, self._now_s) for ticket in self._open]
        tokens = pareto_mean(self._answers, ages_s)
        self._outlook = foretell(self._answers, ages_s, [round(tokens)] * len(ages_s))
        self._foretold = dict(zip(self._open, self._outlook.open_mean_n.tolist(), strict=True))
        self._foretold_tokens = sum(self._foretold.values())
        self._foretold_variance = self._outlook.open_variance


def pareto_mean(answers: Sequence[tuple[float, int]], ages_s: Sequence[float]) -> float:
    """Return the tokens of a reply slower than those seen, at most MAX_TOKENS, by a Pareto tail.

    Its exponent is Hill's estimate with censoring: answers later than the median, over the sum of
    log(seconds / median) of all requests older than it.
    """
    by_time = sorted(answers)
    median_s = by_time[len(by_time) // 2][0]
    late = [seconds for seconds, _ in by_time if seconds > median_s]
    exposure = sum(math.log(age_s / median_s) for age_s in [*late, *ages_s] if age_s > median_s)
    alpha = len(late) / exposure
    seen = statistics.fmean(tokens for _, tokens in by_time[-max(len(by_time) // 20, 5) :])
    room = max(MAX_TOKENS / seen, 1.0)
    excess = math.log(room) if alpha == 1 else (room ** (1 - alpha) - 1) / (1 - alpha)
    return min(seen * (1 + excess), MAX_TOKENS)


def length_of(dice: random.Random) -> int:
    """Draw the tokens of a reply."""
    return min(MAX_TOKENS, round(1900 * math.exp(dice.gauss(0, 0.95))))


def length_with_loops(dice: random.Random) -> int:
    """Draw the tokens of a reply where one of twenty repeats itself to the limit."""
    if dice.random() < 0.05:
        return MAX_TOKENS
    return min(MAX_TOKENS, round(1200 * math.exp(dice.gauss(0, 0.6))))


Market = tuple[Sequence[float], Callable[[random.Random], int]]  # tokens/s, lengths
MARKETS: dict[str, Market] = {
    "one speed": ((60,), length_of),
    "three providers": ((60,) * 5 + (80,) * 3 + (40,) * 2, length_of),
    "loops": ((60,), length_with_loops),
}
RULES = {"eyas": Budget, "knows the mean": Knowing, "extrapolates": Extrapolating}


def run_through(
    seed: int, concurrency: int, market: Market, rule: type[Budget] = Budget
) -> tuple[float, float]:
    """Play a budget of 10 M tokens; return overshoot in percent, and the share of best.

    Best: the same answers on as many connections, all lengths known, nothing to ramp up.
    """
    speeds, length_of = market
    dice, budget, now_s, grow_s, limit = random.Random(seed), rule(LIMIT), 0.0, 3.0, 20
    flying: list[tuple[float, int, int]] = []  # end, ticket, length
    ends: list[float] = []  # of the best
    while True:
        while len(flying) < min(limit, concurrency) and budget.admits(350, MAX_TOKENS):
            length = length_of(dice)
            takes_s = 2 + length / (dice.choice(speeds) * dice.uniform(0.75, 1.25))
            ticket = budget.admit(350, MAX_TOKENS)
            budget.send(ticket, now_s)
            heapq.heappush(flying, (now_s + takes_s, ticket, length))
            begin_s = heapq.heappop(ends) if len(ends) >= concurrency else 0.0
            heapq.heappush(ends, begin_s + takes_s)
        if not flying:
            return 100 * (budget.spent_tokens / LIMIT - 1), max(ends) / now_s
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
    for name, rule in RULES.items():
        for market, how in MARKETS.items():
            if rule is Knowing and how[1] is not length_of:
                continue  # it knows the mean of the other markets
            for concurrency in (500, 2000):
                played = [run_through(i, concurrency, how, rule) for i in range(options.runs)]
                over, share = zip(*played, strict=True)
                line = {
                    "rule": name,
                    "market": market,
                    "concurrency": concurrency,
                    "runs": options.runs,
                    "overshoot_percent": [round(f(over), 2) for f in (min, statistics.fmean, max)],
                    "share_of_best": round(statistics.fmean(share), 3),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
