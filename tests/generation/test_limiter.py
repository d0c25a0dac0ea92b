"""The limiter on a clock of its own."""

from eyas.generation.limiter import Limiter


def answers(limiter: Limiter, count: int, now_s: float, in_flight: float | None = None) -> None:
    for _ in range(count):
        limiter.on_success(limiter.limit if in_flight is None else in_flight, now_s)


def refusals(limiter: Limiter, count: int, now_s: float) -> None:
    for _ in range(count):
        limiter.on_overload(now_s, "rate_limited")


def test_it_doubles_every_three_seconds_up_to_its_maximum() -> None:
    limiter = Limiter(100)
    seen = [limiter.limit]
    for now_s in (8.0, 10.9, 11.0, 14.0, 17.0):
        answers(limiter, 1, now_s)
        seen.append(limiter.limit)
    assert seen == [20, 40, 40, 80, 100, 100]
    assert not limiter.ramping
    assert Limiter(8).limit == 8


def test_it_does_not_grow_beyond_what_is_used() -> None:
    limiter = Limiter(100)
    answers(limiter, 100, 0.0, in_flight=15)
    assert limiter.limit == 20
    answers(limiter, 1, 5.0, in_flight=16)
    assert limiter.limit == 40


def test_a_burst_of_refusals_cuts_once() -> None:
    limiter = Limiter(100)
    refusals(limiter, 980, 1.0)
    assert limiter.limit == 16
    refusals(limiter, 3, 16.5)
    assert limiter.limit == 12
    assert limiter.history == [(1.0, 16, "rate_limited"), (16.5, 12, "rate_limited")]


def test_a_refusal_in_a_hundred_is_no_reason_to_send_less() -> None:
    limiter = Limiter(1000)
    for second in range(200):
        answers(limiter, 99, float(second))
        refusals(limiter, 1, float(second))
    assert limiter.limit == 1000


def test_after_a_cut_it_grows_by_little_and_then_faster() -> None:
    limiter = Limiter(1000)
    answers(limiter, 1, 0.0)
    answers(limiter, 1, 5.0)
    answers(limiter, 1, 10.0)
    refusals(limiter, 3, 11.0)
    assert limiter.limit == 128
    answers(limiter, 100, 25.9)  # within 15 s of the cut
    assert limiter.limit == 128
    seen = []
    for now_s in (26.0, 31.0, 36.0, 41.0, 46.0, 51.0):
        answers(limiter, 1, now_s)
        seen.append(limiter.limit)
    assert seen == [134, 147, 176, 246, 442, 884]


def test_a_storm_at_the_start_is_over_in_a_minute() -> None:
    limiter = Limiter(2000)
    refusals(limiter, 1000, 0.5)
    now_s = 15.5
    while limiter.limit < 2000:
        answers(limiter, 5, now_s)
        now_s += 5.0
    assert now_s < 80.0


def test_it_never_falls_to_nothing() -> None:
    limiter = Limiter(1)
    refusals(limiter, 5, 0.0)
    assert limiter.limit == 1
    assert limiter.has_room(0.0, 0.0)
    assert not limiter.has_room(1.0, 0.0)


def test_a_pause_stops_everything_until_it_ends() -> None:
    limiter = Limiter(10)
    limiter.pause(5.0)
    limiter.pause(3.0)
    assert not limiter.has_room(0, 4.9)
    assert limiter.has_room(0, 5.0)


def test_a_rehearsal_divides_its_times() -> None:
    limiter = Limiter(100, time_scale=10.0)
    answers(limiter, 1, 0.0)
    answers(limiter, 1, 0.5)
    assert limiter.limit == 80
