"""What `eyas status` shows, and its exit codes."""

import io
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from eyas.desk import status as desk
from eyas.errors import EyasError
from eyas.generation.budget import Budget
from eyas.generation.facts import Tally, facts_of
from eyas.generation.limiter import Limiter
from eyas.generation.meter import Meter
from eyas.status import Status


def generation(folder: Path, state: str = "run") -> None:
    """Write the status of a generation in mid-run."""
    tally, budget, limiter, meter = (
        Tally(total=100, resumed=5),
        Budget(10_000),
        Limiter(50),
        Meter(),
    )
    tally.new, tally.new_usd, tally.in_flight, tally.truncated = 20, 1.5, 7, 3
    tally.new_completion_tokens, tally.maybe_billed = 4000, 1
    tally.waiting["rate_limited"] = 4
    tally.key = {"unexplained_usd": 0.25, "limit_left_usd": 8.0}
    budget.charge(4000)
    limiter.on_success(20, 8.0)
    meter.failed("Bargain", "rate_limited", 50.0)
    meter.answered("Moonshot AI", 50.0, latency_s=9.0, tokens=(10, 200), usd=1.5, truncated=True)
    facts = facts_of(tally, budget, limiter, meter, now_s=60.0, started_s=0.0, sent_s=(50.0,))
    Status("generate@chat", folder).tell(state, facts)


def shown(folder: Path, later_s: float = 0.0) -> tuple[str, int]:
    found = desk.read_status(str(folder))
    now_s = found[-1]["heartbeat_s"] + later_s
    screen = io.StringIO()
    Console(file=screen, width=200).print(desk.render(found, now_s))
    return screen.getvalue(), desk.exit_code(found, now_s)


def test_a_run_tells_money_budget_limit_and_what_it_waits_for(tmp_path: Path) -> None:
    generation(tmp_path)
    text, code = shown(tmp_path)
    assert code == 0
    for words in (
        "generate@chat  run",
        "25/100 rows 25 %",
        "4 wait after rate_limited",
        "budget 10,000 tokens: 4,000 spent",
        "$1.50 new, $0.00 held",
        "$0.2500 of the key's use unexplained, $8.00 left on the key",
        "oldest in flight 10 s",
        "7 of 40 in flight, at most 50; 0:08 40 (well used)",
        "3 truncated, 1 maybe billed",
        "failed attempts in the last minute: 1 rate_limited",
        "Moonshot AI",
    ):
        assert words in text


def test_it_fits_eighty_columns(tmp_path: Path) -> None:
    generation(tmp_path)
    screen = io.StringIO()
    found = desk.read_status(str(tmp_path))
    Console(file=screen, width=80).print(desk.render(found, found[0]["heartbeat_s"]))
    assert max(map(len, screen.getvalue().splitlines())) <= 80


def test_silence_is_a_stall_and_only_of_those_at_work(tmp_path: Path) -> None:
    generation(tmp_path)
    text, code = shown(tmp_path, later_s=31.0)
    assert code == 3
    assert "stalled" in text
    assert "no word for 31 s from process" in text
    Status("generate@chat", tmp_path).end("done", "20 responses")
    text, code = shown(tmp_path, later_s=1e6)
    assert code == 0
    assert "20 responses" in text


def test_a_failure_is_told_with_its_reason(tmp_path: Path) -> None:
    Status("train", tmp_path).tell("run", {"done": 3, "total": 10, "unit": "steps", "eta_s": 9.0})
    Status("train", tmp_path).end("failed", "loss is not finite")
    text, code = shown(tmp_path)
    assert code == 4
    assert "3/10 steps 30 %" in text
    assert "train: loss is not finite" in text


def test_a_training_at_work_tells_where_its_time_goes(tmp_path: Path) -> None:
    facts = {"done": 3, "total": 10, "unit": "steps", "eta_s": 9.0}
    Status("train", tmp_path).tell("run", facts | {"shares": {"fetch": 0.25, "forward": 0.75}})
    assert "train: time: fetch 25 %, forward 75 %" in shown(tmp_path)[0]
    Status("train", tmp_path).end("done", "10 steps")
    assert "time:" not in shown(tmp_path)[0]


def test_the_last_word_of_another_process_is_not_taken_over(tmp_path: Path) -> None:
    Status("train", tmp_path).tell("run", {"done": 3, "total": 10, "unit": "steps", "eta_s": 9.0})
    path = tmp_path / "train.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"pid": 1}))
    Status("train", tmp_path).end("done", "")
    assert "done" not in orjson.loads(path.read_bytes())


@pytest.mark.parametrize(
    ("text", "words"),
    [("[]", "not a status file"), ("{", "not a status file"), ('{"schema": 99}', "expected 1")],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(EyasError, match=words):
        desk.read_status(str(tmp_path))


def test_nothing_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no status file"):
        desk.read_status(str(tmp_path / "none"))


def test_a_far_folder_is_read_with_one_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation(tmp_path)
    calls: list[list[str]] = []

    really_run = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        return really_run(["sh", "-c", command[-1]], **options)

    monkeypatch.setattr(desk.subprocess, "run", run)
    for source in (tmp_path, tmp_path / "generate-chat.json"):
        [word] = desk.read_status(f"ssh://me@box:2222{source}")
        assert word["stage"] == "generate"
    assert calls[0][:-1] == ["ssh", "-o", "BatchMode=yes", "-p", "2222", "me@box"]


def test_an_ssh_that_fails_says_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 255, b"", b"Host key verification failed.\n")

    monkeypatch.setattr(desk.subprocess, "run", run)
    with pytest.raises(EyasError, match="255: Host key verification failed"):
        desk.read_status("ssh://box/x")
    with pytest.raises(EyasError, match="expected ssh://"):
        desk.read_status("ssh://box")


def test_watching_ends_with_the_last_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation(tmp_path)
    monkeypatch.setattr(
        desk.time, "sleep", lambda _: Status("generate@chat", tmp_path).end("failed", "no money")
    )
    screen = Console(file=io.StringIO(), width=100)
    assert desk.watch(str(tmp_path), screen) == 4
