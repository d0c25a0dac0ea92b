import io
import logging
import sys
from typing import Any

import pytest

from eyas.drafter import progress as progress_module
from eyas.drafter.clock import Clock
from eyas.drafter.progress import Meter, reporting
from eyas.drafter.training import Progress

ROW: dict[str, Any] = {
    "epoch": 2,
    "loss_step1": 2.5,
    "accuracy_step1": 0.25,
    "simulated_acceptance_length": 1.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int) -> Progress:
    return Progress(step=number, total=10, tokens=300, row=ROW)


def test_the_line_gives_rate_and_time_left_of_this_run_not_of_the_resumed_part() -> None:
    meter = Meter(100.0, Clock())
    meter.line(step(5), 101.0)
    assert meter.line(step(6), 104.0) == (
        "step 6/10 | epoch 2 | loss 2.500 | accuracy 0.250 | acceptance length 1.50 | "
        "150 tokens/s | ETA 0.1 min"
    )


def test_without_a_terminal_there_is_a_line_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 1000, 8))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO, logger="eyas"), reporting(1, Clock()) as on_step:
        for number in range(1, 11):
            on_step(step(number))
    assert [message.split(" |")[0] for message in caplog.messages] == [
        f"train: step {n}/10" for n in (3, 6, 9, 10)
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with reporting(2, Clock()) as on_step:
        for number in range(1, 11):
            on_step(step(number))
    assert "step 10/10" in terminal.getvalue()
