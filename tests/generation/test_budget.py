"""The budget by hand, and played on a simulated clock by benchmarks/budget_rules.py."""

import statistics

import pytest
from budget_rules import MARKETS, Extrapolating, Knowing, run_through
from hypothesis import given
from hypothesis import strategies as st

from eyas.generation.budget import Budget, rows_within


def sent(budget: Budget, prompt_tokens: int, max_tokens: int, now_s: float) -> int:
    """Admit and send a request; return its ticket."""
    ticket = budget.admit(prompt_tokens, max_tokens)
    budget.send(ticket, now_s)
    return ticket


def test_without_a_limit_everything_is_admitted() -> None:
    assert Budget(None).admits(10**9, 10**9)


def test_the_first_request_is_reserved_at_its_longest() -> None:
    assert Budget(100).admits(40, 60)
    assert not Budget(100).admits(41, 60)


def test_requests_in_flight_hold_their_room_until_they_end() -> None:
    budget = Budget(200)
    first = budget.admit(40, 60)
    assert budget.admits(40, 60)
    budget.admit(40, 60)
    assert not budget.admits(1, 1)
    budget.send(first, 0.0)
    budget.settle(first, 40, 10, 1.0)
    assert budget.spent_tokens == 50
    assert budget.admits(10, 40)
    assert not budget.admits(10, 41)


def test_a_failed_row_gives_its_room_back_and_a_charge_takes_it() -> None:
    budget = Budget(100)
    budget.void(budget.admit(40, 60))
    assert budget.admits(40, 60)
    budget.charge(1)
    assert not budget.admits(40, 60)


def test_held_rows_count() -> None:
    budget = Budget(100)
    budget.hold(40, 30)
    assert budget.admits(10, 20)
    assert not budget.admits(10, 21)


def test_few_failures_do_not_spoil_the_mean() -> None:
    budget = Budget(10**6)
    for _ in range(50):
        budget.void(budget.admit(1, 1000))
    for second in range(100):
        budget.settle(sent(budget, 1, 1000, second), 1, 10, second + 1.0)
    assert budget.mean_tokens() == pytest.approx(10)


def test_what_the_longest_requests_take_is_foreseen_before_they_end() -> None:
    # half of the answers have 10 tokens and take 1 s, half 1,000 and 100 s
    budget = Budget(10**7)
    tickets = [sent(budget, 0, 2000, 0.0) for _ in range(1000)]
    for ticket in tickets[:500]:
        budget.settle(ticket, 0, 10, 1.0)
    mean = budget.mean_tokens()
    assert mean is not None
    assert mean == pytest.approx((10 + 2000) / 2, rel=0.01)  # unseen: at their longest
    for ticket in tickets[500:600]:
        budget.settle(ticket, 0, 1000, 100.0)
    mean = budget.mean_tokens()
    assert mean is not None
    # the made-up request is one of 501 that outlive 1 s and the only one left unseen by the rest
    assert 505 < mean < 1000
    assert budget.projected_tokens() > 505_000


def test_a_wait_before_a_request_is_sent_again_says_nothing_of_its_length() -> None:
    # a storm refuses all for 89 s; then 300 tokens take 3 s, as they would have at once
    stormed, calm = Budget(10**7), Budget(10**7)
    for budget, begin_s in ((stormed, 89.0), (calm, 0.0)):
        tickets = [sent(budget, 0, 2000, 0.0) for _ in range(200)]
        for ticket in tickets:
            budget.rest(ticket)
            budget.send(ticket, begin_s)
        for ticket in tickets[:150]:
            budget.settle(ticket, 0, 300, begin_s + 3.0)
    assert stormed.mean_tokens() == calm.mean_tokens()
    assert stormed.projected_tokens() == calm.projected_tokens()


def test_a_budget_that_is_surely_full_to_half_a_percent_waits_for_nobody() -> None:
    budget = Budget(100_000)
    for second in range(99):
        budget.settle(sent(budget, 0, 2000, second), 0, 1000, second + 1.0)
    assert budget.admits(0, 1000)  # 99.0 %
    ticket = sent(budget, 0, 2000, 99.0)
    assert not budget.admits(0, 100)  # 100 % once it is in
    budget.void(ticket)
    assert budget.admits(0, 1000)


@pytest.mark.parametrize(
    ("concurrency", "market", "most", "share"),
    [
        (500, "one speed", 0.5, 0.9),
        (2000, "one speed", 2.5, 0.65),
        (2000, "three providers", 2.5, 0.7),
        (2000, "loops", 2.5, 0.75),
    ],
)
def test_a_run_lands_on_its_budget_without_waiting_for_its_longest_answers(
    concurrency: int, market: str, most: float, share: float
) -> None:
    played = [run_through(seed, concurrency, MARKETS[market]) for seed in range(8)]
    assert max(overshoot for overshoot, _ in played) <= most
    assert min(overshoot for overshoot, _ in played) >= -1.5
    assert statistics.fmean(share for _, share in played) >= share


@given(
    sizes=st.lists(st.integers(1, 50), max_size=30),
    limit=st.integers(0, 500),
)
def test_rows_within_a_budget_are_those_that_start_before_its_end(
    sizes: list[int], limit: int
) -> None:
    kept = rows_within(limit, sizes)
    naive = [i for i in range(len(sizes)) if sum(sizes[:i]) < limit]
    assert kept == len(naive)
    assert rows_within(None, sizes) == len(sizes)


def test_rows_within_as_its_docstring_says() -> None:
    assert rows_within(100, [60, 50, 10]) == 2
    assert rows_within(100, [60, 40, 10]) == 2
    assert rows_within(100, []) == 0


def test_it_is_nearly_as_fast_as_one_that_knows_the_mean_from_the_start() -> None:
    ours = [run_through(seed, 2000, MARKETS["one speed"])[1] for seed in range(8)]
    knowing = [run_through(seed, 2000, MARKETS["one speed"], Knowing)[1] for seed in range(8)]
    assert statistics.fmean(ours) > 0.9 * statistics.fmean(knowing)


def test_extrapolating_the_tail_spends_far_too_much_where_replies_loop() -> None:
    over, _ = run_through(0, 2000, MARKETS["loops"], Extrapolating)
    assert over > 5.0
