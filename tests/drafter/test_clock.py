from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from eyas.drafter import clock as clock_module
from eyas.drafter.clock import Clock


def by_hand(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let a test say what time it is."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: now.s)
    return now


def test_what_lies_within_a_kind_of_work_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock = by_hand(monkeypatch), Clock()
    with clock.timed("fetch"):
        now.s += 1
    now.s += 50  # of no kind
    with clock.timed("forward"):
        now.s += 2
    with clock.timed("evaluate"):
        now.s += 2
        with clock.timed("forward"):
            now.s += 3
    clock.tokens = 600
    assert clock.seconds() == {"fetch": 1.0, "forward": 2.0, "evaluate": 5.0}
    assert clock.shares() == {"fetch": 0.125, "forward": 0.25, "evaluate": 0.625}
    assert clock.figures() == {"train_wall_s": 8.0, "tokens_per_s": 200.0}


def test_a_clock_that_has_not_run_tells_nothing() -> None:
    assert Clock().shares() == {}
    assert Clock().figures() == {}


def test_on_a_gpu_its_queue_is_read_and_waited_for_only_when_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks: Iterator[int] = iter(range(10_000))
    waits: list[int] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = 500 * next(ticks)

        def synchronize(self) -> None:
            waits.append(self.at_ms)

        def elapsed_time(self, end: "Event") -> int:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clock_module, "_QUEUED", 4)
    clock = Clock(cuda=True)
    for _ in range(3):
        with clock.timed("backward"):
            pass
    assert not waits
    with clock.timed("forward"):
        pass
    assert len(waits) == 4
    assert clock.seconds() == {"backward": 1.5, "forward": 0.5}
