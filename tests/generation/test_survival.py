"""The product-limit estimate by hand, against a naive one, and without bias."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.generation.survival import foretell


def test_the_worked_example_of_the_docstring() -> None:
    outlook = foretell([(2.0, 20), (1.0, 10)], [1.5], [100])
    assert outlook.mean == pytest.approx(10 / 6 + 20 * 5 / 24 + 100 * 15 / 24)
    assert outlook.open_mean_n.tolist() == pytest.approx([80.0])
    square = 100 / 6 + 400 * 5 / 24 + 10_000 * 15 / 24
    assert outlook.variance == pytest.approx(square - outlook.mean**2)
    assert outlook.open_variance == pytest.approx(400 / 4 + 30_000 / 4 - 80**2)


def test_with_nothing_in_flight_it_is_the_mean_but_for_the_made_up_requests() -> None:
    outlook = foretell([(1.0, 10), (3.0, 50), (2.0, 30)], [], [])
    assert outlook.mean == pytest.approx((10 + 50 + 30 + 3 * 50) / 6)
    assert outlook.open_mean_n.size == 0


def naive(
    answers: list[tuple[float, int]], ages_s: list[float], caps: list[int], older_than_s: float
) -> float:
    """Return E[tokens | seconds > older_than_s] by walking through the answers in turn."""
    everyone = [seconds for seconds, _ in answers] + ages_s + [float("inf")] * 3
    alive, total = 1.0, 0.0
    start = 1.0
    for seconds, tokens in sorted(answers):
        at_risk = sum(other >= seconds for other in everyone)
        weight = alive / at_risk
        # equal times leave one after another; each takes its own share of what is left
        everyone.remove(seconds)
        alive -= weight
        if seconds > older_than_s:
            total += weight * tokens
        else:
            start -= weight
    return (total + alive * max(caps)) / start


@given(
    answers=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=12),
    ages=st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_it_is_the_naive_walk(answers: list[tuple[int, int]], ages: list[int]) -> None:
    timed = [(float(seconds), tokens) for seconds, tokens in answers]
    ages_s, caps = [age + 0.5 for age in ages], [60] * len(ages)
    outlook = foretell(timed, ages_s, caps)
    assert outlook.mean == pytest.approx(naive(timed, ages_s, caps, 0.0))
    for age_s, mean in zip(ages_s, outlook.open_mean_n, strict=True):
        assert mean == pytest.approx(naive(timed, ages_s, caps, age_s))
    assert outlook.doubt >= 0


def test_it_is_not_taken_in_by_the_short_answers_that_come_first() -> None:
    # 1,000 requests begun one a tenth of a second, each as many seconds long as it has tokens
    errors, naive_errors, sure = [], [], 0
    for seed in range(40):
        dice = random.Random(seed)
        lengths = [dice.randint(1, 100) for _ in range(1000)]
        born = [i / 10 for i in range(1000)]
        now_s = 100.0
        ended = [i for i in range(1000) if born[i] + lengths[i] <= now_s]
        still = [i for i in range(1000) if born[i] + lengths[i] > now_s]
        answers = [(float(lengths[i]), lengths[i]) for i in ended]
        outlook = foretell(answers, [now_s - born[i] for i in still], [100] * len(still))
        truth = statistics.fmean(lengths)
        errors.append(outlook.mean - truth)
        naive_errors.append(statistics.fmean(tokens for _, tokens in answers) - truth)
        sure += abs(errors[-1]) <= 2 * np.sqrt(outlook.doubt + outlook.variance / 1000)
    assert abs(statistics.fmean(errors)) < 1.0
    assert statistics.fmean(naive_errors) < -10
    assert sure >= 36
