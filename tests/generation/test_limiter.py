"""The limiter on a clock of its own."""

from eyas.generation.limiter import Limiter


def answers(limiter: Limiter, count: int, now_s: float, in_flight: float | None = None) -> None:
    for _ in range(count):
        limiter.on_success(limiter.limit if in_flight is None else in_flight, now_s)


def test_it_starts_slowly_and_doubles_up_to_its_maximum() -> None:
    limiter = Limiter(100)
    seen = [limiter.limit]
    for _ in range(4):
        answers(limiter, limiter.limit, 0.0)
        seen.append(limiter.limit)
    assert seen == [20, 40, 80, 100, 100]
    assert Limiter(8).limit == 8


def test_it_does_not_grow_beyond_what_is_used() -> None:
    limiter = Limiter(100)
    answers(limiter, 100, 0.0, in_flight=15)
    assert limiter.limit == 20
    answers(limiter, 20, 0.0, in_flight=16)
    assert limiter.limit == 40


def test_a_burst_of_refusals_cuts_once() -> None:
    limiter = Limiter(100)
    for _ in range(980):
        limiter.on_overload(1.0, "rate_limited")
    assert limiter.limit == 16
    limiter.on_overload(16.5, "rate_limited")
    assert limiter.limit == 12
    assert limiter.history == [(1.0, 16, "rate_limited"), (16.5, 12, "rate_limited")]


def test_after_a_cut_it_grows_again_by_little() -> None:
    limiter = Limiter(100)
    limiter.on_overload(0.0, "overloaded")
    answers(limiter, 100, 14.0)
    assert limiter.limit == 16
    answers(limiter, 16, 15.0)
    assert limiter.limit == 17


def test_it_never_falls_to_nothing() -> None:
    limiter = Limiter(1)
    limiter.on_overload(0.0, "overloaded")
    assert limiter.limit == 1
    assert limiter.has_room(0.0, 0.0)
    assert not limiter.has_room(1.0, 0.0)


def test_a_pause_stops_everything_until_it_ends() -> None:
    limiter = Limiter(10)
    limiter.pause(5.0)
    limiter.pause(3.0)
    assert not limiter.has_room(0, 4.9)
    assert limiter.has_room(0, 5.0)
