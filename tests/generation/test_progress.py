"""What the progress line says, and that the status file is kept beside it."""

import io
import logging
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from eyas.generation import progress as module
from eyas.generation.budget import Budget
from eyas.generation.facts import Tally, View, eta_s, facts_of
from eyas.generation.limiter import Limiter
from eyas.generation.meter import Meter
from eyas.generation.progress import Progress, clock, describe
from eyas.status import Status


def view_of(tally: Tally, meter: Meter | None = None, *, state: str = "run") -> View:
    facts = facts_of(
        *(tally, Budget(None), Limiter(20), meter or Meter()),
        now_s=100.0,
        started_s=60.0,
        sent_s=(),
    )
    return View(state=state, reason="", facts=facts)


def test_the_line_tells_rows_rates_money_time_and_in_words_what_waits() -> None:
    tally, meter = Tally(total=200, resumed=20, held_usd=1.0), Meter()
    tally.new, tally.new_completion_tokens, tally.new_usd = 80, 4000, 0.25
    tally.in_flight = 12
    tally.waiting.update({"rate_limited": 412, "server_error": 0})
    tally.failed_rows["moderation"] = 1
    for _ in range(80):
        meter.answered("A", 90.0, latency_s=1.0, tokens=(1, 50), usd=0.1, truncated=False)
    facts = view_of(tally, meter).facts
    facts["limit"]["paused_s"] = 38.4
    assert describe(facts) == (
        "101/200 rows | 2.00 answers/s | 100 tokens/s | $1.2500 | ETA 0:49 | 12 of 20 in flight"
        " | 412 wait after rate_limited | all paused for 38 s | 1 failed"
    )


@pytest.mark.parametrize(
    ("budget_tokens", "left_s"), [(None, 90.0), (1000, 10.0), (500, 0.0), (10**6, 90.0)]
)
def test_the_time_left_is_to_the_budget_or_the_prompts_whichever_is_nearer(
    budget_tokens: int | None, left_s: float
) -> None:
    tally = Tally(total=100, resumed=0)
    tally.new, tally.new_prompt_tokens, tally.new_completion_tokens = 10, 300, 200
    budget = Budget(budget_tokens)
    budget.charge(500)
    assert eta_s(tally, budget, 20.0, 1.0) == left_s


def test_before_the_first_answer_no_time_is_promised() -> None:
    assert "ETA ?" in describe(view_of(Tally(total=5, resumed=0)).facts)


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (59.9, "0:59"), (3725, "1:02:05")])
def test_a_clock_is_read_at_a_glance(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_off_a_terminal_it_logs_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 0.0, 1.0, 15.0, 16.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    caplog.set_level(logging.INFO, logger="eyas")
    with Progress("generate@chat", Console(file=io.StringIO())) as progress:
        for _ in range(3):
            progress.show(view_of(Tally(total=5, resumed=0)))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("generate@chat: 0/5 rows")


def test_on_a_terminal_it_draws() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Progress("generate@chat", console) as progress:
        progress.show(view_of(Tally(total=5, resumed=0)))
    assert "generate@chat: 0/5 rows" in screen.getvalue()


def test_the_status_file_is_kept(tmp_path: Path) -> None:
    status = Status("generate@chat", tmp_path)
    with Progress("generate@chat", Console(file=io.StringIO()), status) as progress:
        progress.show(view_of(Tally(total=5, resumed=2), state="ramp"))
        progress.show(view_of(Tally(total=5, resumed=4), state="run"))  # too soon for another
        early = orjson.loads((tmp_path / "generate-chat.json").read_bytes())
    assert (early["state"], early["done"]) == ("ramp", 2)
    value = orjson.loads((tmp_path / "generate-chat.json").read_bytes())
    assert (value["stage"], value["dataset"], value["state"]) == ("generate", "chat", "run")
    assert (value["done"], value["total"], value["unit"]) == (4, 5, "rows")
    assert [path.name for path in tmp_path.iterdir()] == ["generate-chat.json"]
