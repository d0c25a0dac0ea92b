"""What the progress line says."""

import io
import logging
from collections import Counter

import pytest
from rich.console import Console

from eyas.generation import progress as module
from eyas.generation.progress import Progress, Tally, describe


def test_the_line_tells_rows_rates_money_time_and_in_words_what_waits() -> None:
    tally = Tally(total=200, resumed=20, held_usd=1.0)
    tally.new, tally.new_completion_tokens, tally.new_usd = 80, 4000, 0.25
    tally.in_flight, tally.limit = 12, 20
    tally.waiting = Counter({"rate_limited": 412, "server_error": 0})
    tally.failed_rows["moderation"] = 1
    assert describe(tally, 40.0, waits_s=38.4) == (
        "101/200 rows | 2.00 answers/s | 100 tokens/s | $1.2500 | ETA 0:49 | 12 of 20 in flight"
        " | 412 wait after rate_limited | all paused for 38 s | 1 failed"
    )


@pytest.mark.parametrize(
    ("budget_tokens", "eta"), [(None, "1:30"), (1000, "0:10"), (100, "0:00"), (10**6, "1:30")]
)
def test_the_time_left_is_to_the_budget_or_the_prompts_whichever_is_nearer(
    budget_tokens: int | None, eta: str
) -> None:
    tally = Tally(total=100, resumed=0, budget_tokens=budget_tokens)
    tally.new, tally.new_prompt_tokens, tally.new_completion_tokens = 10, 300, 200
    assert f"ETA {eta} " in describe(tally, 10.0)


def test_before_the_first_answer_no_time_is_promised() -> None:
    assert "ETA ?" in describe(Tally(total=5, resumed=0), 0.0)


def test_off_a_terminal_it_logs_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.0, 0.0, 1.0, 15.0, 16.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    caplog.set_level(logging.INFO, logger="eyas")
    with Progress("generate@chat", Console(file=io.StringIO())) as progress:
        for _ in range(3):
            progress.show(Tally(total=5, resumed=0))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("generate@chat: 0/5 rows")


def test_on_a_terminal_it_draws() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Progress("generate@chat", console) as progress:
        progress.show(Tally(total=5, resumed=0))
    assert "generate@chat: 0/5 rows" in screen.getvalue()
