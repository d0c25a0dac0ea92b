"""The dispatcher against an asker that says what a test wants, on a real journal."""

import asyncio
import errno
import io
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from eyas.errors import EyasError
from eyas.generation import journal as journal_module
from eyas.generation.facts import Tally
from eyas.generation.jobs import Job, Wish, build_jobs
from eyas.generation.journal import Journal
from eyas.generation.limits import Limits
from eyas.generation.outcomes import Outcome, classify, lost
from eyas.generation.patience import Plan
from eyas.generation.progress import Progress
from eyas.generation.run import Run
from eyas.records import Prompt
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Sampling

Make = Callable[[int], list[Prompt]]
Body = Callable[..., str]
Say = Callable[[str, int], Awaitable[Outcome]]
RULE = PartitionRule(max_prompt_tokens=None, max_tokens=100)
WISH = Wish(
    endpoint=Endpoint(name="openrouter", model="m", provider={}, prices=None),
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=3),
    generate=DatasetGenerate(budget_tokens=None, samples_per_prompt=1, max_tokens=None),
    partition={"short": RULE, "long": RULE},
    target_revision=None,
)
PLAN = Plan(concurrency={"short": 4}, attempts=3, patience_s=5.0, backoff_s=0.0, pause_s=0.01)
LIMITED = Outcome(kind="retry", reason="rate_limited", retry_after_s=0.01)
BROKEN = Outcome(kind="retry", reason="server_error", detail="502: no")


class Asker:
    """Answers by `say(question, n-th request for it)` and remembers who was asked when."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.asked: list[str] = []
        self.flying = self.most = 0

    async def ask(self, body: bytes) -> Outcome:
        question = orjson.loads(body)["messages"][0]["content"]
        self.asked.append(question)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            return await self.say(question, self.asked.count(question))
        finally:
            self.flying -= 1


def limits_of(budget_tokens: int | None) -> Limits:
    return Limits(replace(WISH.generate, budget_tokens=budget_tokens), None)


async def go(
    jobs: list[Job],
    say: Say,
    folder: Path,
    *,
    plan: Plan = PLAN,
    budget: int | None = None,
    wish: Wish = WISH,
) -> tuple[Asker, Tally]:
    asker, tally = Asker(say), Tally(total=len(jobs), resumed=0)
    with Journal(folder, reserve_bytes=4096) as journal:
        run = Run(wish, plan, journal, limits=limits_of(budget), tally=tally)
        with Progress("test", Console(file=io.StringIO())) as progress:
            await run.go(jobs, asker, progress)
    return asker, tally


def stored(folder: Path, name: str = "responses") -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_bytes().splitlines()
    return [orjson.loads(line) for line in lines]


@pytest.fixture
def good(ok_body: Body) -> Outcome:
    return classify(200, {}, ok_body())


async def test_every_row_is_asked_once_in_order_and_journalled(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        await asyncio.sleep(0)
        return good

    jobs = build_jobs(make_prompts(30), WISH)
    asker, tally = await go(jobs, say, tmp_path)
    assert asker.asked == [f"question {i}" for i in range(30)]
    assert asker.most == 4
    assert (tally.new, tally.requests_sent, tally.new_tokens) == (30, 30, 450)
    assert tally.new_usd == pytest.approx(0.03)
    rows = stored(tmp_path)
    assert {row["fingerprint"] for row in rows} == {job.fingerprint for job in jobs}
    assert len(rows) == len(stored(tmp_path, "issued")) == 30
    assert rows[0]["sampling"].keys() == {"temperature", "top_p", "seed", "max_tokens"}
    assert (rows[0]["source"], rows[0]["attempts"], rows[0]["cost_usd"]) == ("openrouter", 1, 0.001)


async def test_rate_limits_are_waited_out_and_cost_no_attempt(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(_question: str, n: int) -> Outcome:
        return LIMITED if n <= 5 else good

    _, tally = await go(build_jobs(make_prompts(3), WISH), say, tmp_path)
    assert tally.new == 3
    assert tally.failures == {"rate_limited": 15}
    assert tally.waiting.total() == 0
    assert {row["attempts"] for row in stored(tmp_path)} == {6}
    assert len(stored(tmp_path, "failures")) == 15
    assert {row["final"] for row in stored(tmp_path, "failures")} == {False}


async def test_a_row_that_is_only_ever_limited_is_given_up(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return LIMITED

    plan = replace(PLAN, patience_s=0.02)
    _, tally = await go(build_jobs(make_prompts(2), WISH), say, tmp_path, plan=plan)
    assert tally.failed_rows == {"rate_limited": 2}


async def test_a_row_that_keeps_failing_is_given_up_and_the_others_are_kept(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(question: str, _n: int) -> Outcome:
        return BROKEN if question == "question 3" else good

    asker, tally = await go(build_jobs(make_prompts(8), WISH), say, tmp_path)
    assert asker.asked.count("question 3") == 3
    assert (tally.new, tally.failed_rows) == (7, {"server_error": 1})
    assert tally.done == 8


async def test_an_endpoint_that_fails_every_row_stops_the_run(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return Outcome(kind="reject", reason="not_found", detail="404: No endpoints found")

    with pytest.raises(EyasError, match=r"20 rows failed one after another.*not_found: 404"):
        await go(build_jobs(make_prompts(60), WISH), say, tmp_path)
    assert 20 <= len(stored(tmp_path, "failures")) <= 24


async def test_moderated_rows_are_final_and_blame_no_endpoint(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return Outcome(kind="reject", reason="moderation")

    asker, tally = await go(build_jobs(make_prompts(30), WISH), say, tmp_path)
    assert tally.failed_rows == {"moderation": 30}
    assert len(asker.asked) == 30
    with Journal(tmp_path) as journal:
        assert len(journal.books.final) == 30


async def test_a_refused_key_stops_the_run_and_lets_the_others_land(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    gate = asyncio.Event()

    async def say(question: str, _n: int) -> Outcome:
        if question == "question 5":
            gate.set()
            return Outcome(kind="stop", reason="unauthorized", detail="401: no")
        if question in ("question 4", "question 6"):
            await gate.wait()
            await asyncio.sleep(0.01)
        return good

    with pytest.raises(EyasError, match=r"refused \(unauthorized\): 401: no\n  hint: check the"):
        await go(build_jobs(make_prompts(50), WISH), say, tmp_path)
    ids = {row["id"] for row in stored(tmp_path)}
    late = {p.id for p in make_prompts(50) if p.upstream_id in ("4", "6")}
    assert late <= ids
    assert len(ids) <= 9


async def test_an_in_flight_hold_pauses_everybody_and_then_goes_on(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(question: str, n: int) -> Outcome:
        first = question == "question 0" and n == 1
        return Outcome(kind="pause", reason="in_flight_budget") if first else good

    asker, tally = await go(build_jobs(make_prompts(5), WISH), say, tmp_path)
    assert tally.new == 5
    assert tally.failures == {"in_flight_budget": 1}
    assert asker.asked.count("question 0") == 2


async def test_a_lost_answer_is_tried_once_more_and_its_cost_is_assumed(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return lost("deadline", "", maybe_billed=True)

    asker, tally = await go(build_jobs(make_prompts(1), WISH), say, tmp_path)
    assert (len(asker.asked), tally.failed_rows) == (2, {"deadline": 1})
    assert [row["charged_tokens"] for row in stored(tmp_path, "failures")] == [110, 110]


async def test_nobody_charges_for_an_answer_lost_on_the_local_endpoint(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return lost("deadline", "", maybe_billed=True)

    wish = replace(WISH, endpoint=replace(WISH.endpoint, name="local"))
    await go(build_jobs(make_prompts(1), wish), say, tmp_path, wish=wish)
    assert [row["charged_tokens"] for row in stored(tmp_path, "failures")] == [0, 0]


async def test_the_budget_ends_admission_and_cancels_nothing(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        await asyncio.sleep(0.001)
        return good

    jobs = build_jobs(make_prompts(500), WISH)
    asker, tally = await go(jobs, say, tmp_path, budget=3000)
    assert tally.new == len(asker.asked) == tally.requests_sent
    assert 0.985 * 3000 <= tally.new_tokens <= 1.005 * 3000
    assert asker.asked == [f"question {i}" for i in range(tally.new)]
    assert tally.abandoned == 0


async def test_an_answer_without_counts_fills_the_budget_at_its_longest(
    make_prompts: Make, ok_body: Body, tmp_path: Path
) -> None:
    silent = replace(classify(200, {}, ok_body()), usage=None)

    async def say(_question: str, _n: int) -> Outcome:
        return silent

    _, tally = await go(build_jobs(make_prompts(10), WISH), say, tmp_path, budget=330)
    assert tally.new == 3


async def test_a_row_of_a_narrow_partition_weighs_more(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        await asyncio.sleep(0.001)
        return good

    prompts = [replace(p, partition="long") for p in make_prompts(20)]
    plan = replace(PLAN, concurrency={"short": 12, "long": 3})
    asker, _ = await go(build_jobs(prompts, WISH), say, tmp_path, plan=plan)
    assert asker.most == 3


@pytest.mark.parametrize("times", [1, 2])
async def test_ctrl_c_once_drains_and_twice_abandons_with_a_record(
    make_prompts: Make, good: Outcome, tmp_path: Path, times: int
) -> None:
    started = Counter[str]()

    async def say(question: str, _n: int) -> Outcome:
        started[question] += 1
        if started.total() == 4:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        return good

    with pytest.raises(KeyboardInterrupt):
        await go(build_jobs(make_prompts(50), WISH), say, tmp_path)
    assert started.total() == 4
    kept, given_up = len(stored(tmp_path)), len(stored(tmp_path, "abandoned"))
    assert (kept, given_up) == ((4, 0) if times == 1 else (0, 4))
    with Journal(tmp_path) as journal:
        assert journal.books.all_unended() == 0


async def test_sigterm_abandons_at_once(make_prompts: Make, good: Outcome, tmp_path: Path) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(1)
        return good

    with pytest.raises(KeyboardInterrupt):
        await go(build_jobs(make_prompts(5), WISH), say, tmp_path)
    assert not stored(tmp_path)
    assert stored(tmp_path, "abandoned")[0]["estimated_tokens"] == 110


async def test_a_full_disk_stops_the_run_and_loses_no_answer(
    make_prompts: Make, good: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = os.write, []

    def fake(handle: int, data: memoryview) -> int:
        if b"generation_id" in bytes(data) and (tmp_path / "reserve").exists():
            answers.append(1)
            if len(answers) > 6:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    async def say(_question: str, _n: int) -> Outcome:
        await asyncio.sleep(0.005)
        return good

    monkeypatch.setattr(journal_module.os, "write", fake)
    with pytest.raises(EyasError, match="No space left on device"):
        await go(build_jobs(make_prompts(50), WISH), say, tmp_path)
    assert len(stored(tmp_path)) == len(stored(tmp_path, "issued")) < 50


async def test_a_disk_that_takes_nothing_more_is_told_with_the_number_of_lost_answers(
    make_prompts: Make,
    good: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, full = os.write, []

    def fake(handle: int, data: memoryview) -> int:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    async def say(question: str, _n: int) -> Outcome:
        if question == "question 9":
            full.append(1)
        return good

    monkeypatch.setattr(journal_module.os, "write", fake)
    with pytest.raises(EyasError, match="answers stored before are intact"):
        await go(build_jobs(make_prompts(50), WISH), say, tmp_path)
    assert "answers that had been paid for could not be stored" in caplog.text
    with Journal(tmp_path) as journal:
        assert len(journal.books.entries) >= 6


async def test_a_request_whose_record_cannot_be_written_is_not_sent(
    make_prompts: Make, good: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(_handle: int, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked = []

    async def say(question: str, _n: int) -> Outcome:
        asked.append(question)
        return good

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", fake)
        with pytest.raises(EyasError, match="issued: cannot write"):
            await go(build_jobs(make_prompts(5), WISH), say, tmp_path)
    assert asked == []


async def test_a_failed_sync_stops_the_run(
    make_prompts: Make, good: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(_handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def say(_question: str, _n: int) -> Outcome:
        await asyncio.sleep(0.005)
        return good

    jobs = build_jobs(make_prompts(400), WISH)
    with Journal(tmp_path) as journal:
        run = Run(WISH, PLAN, journal, limits=limits_of(None), tally=Tally(total=400, resumed=0))
        with (
            monkeypatch.context() as patch,
            Progress("test", Console(file=io.StringIO())) as progress,
        ):
            patch.setattr(journal_module.os, "fdatasync", fake)
            with pytest.raises(EyasError, match="cannot sync"):
                await run.go(jobs, Asker(say), progress)
    assert 0 < len(stored(tmp_path)) < 400


async def test_a_fault_of_our_own_ends_the_run_with_its_traceback(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await go(build_jobs(make_prompts(5), WISH), say, tmp_path)


async def test_unknown_shapes_are_recorded_whole(make_prompts: Make, tmp_path: Path) -> None:
    body = '{"choices": [{"finish_reason": "paused"}], "usage": {"cost": 0.5}}'

    async def say(_question: str, _n: int) -> Outcome:
        return classify(200, {}, body)

    _, tally = await go(build_jobs(make_prompts(1), WISH), say, tmp_path)
    [row] = stored(tmp_path, "failures")
    assert (row["raw"], row["final"], row["cost_usd"]) == (body, True, 0.5)
    assert tally.new_usd == 0.5


async def test_an_outage_holds_the_run_and_blames_no_row(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    calls = 0

    async def say(_question: str, _n: int) -> Outcome:
        nonlocal calls
        calls += 1
        return BROKEN if calls <= 150 else good

    asker, tally = await go(build_jobs(make_prompts(60), WISH), say, tmp_path)
    assert tally.new + tally.failed_rows.total() == 60
    assert tally.failed_rows.total() <= 10  # those that failed three times before it was plain
    assert len(asker.asked) < 300


async def test_an_endpoint_that_stays_silent_ends_the_run(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        await asyncio.sleep(0.002)
        return BROKEN

    plan = replace(PLAN, patience_s=0.1, attempts=100)
    with pytest.raises(EyasError, match=r"no answer for .* server_error: 502: no"):
        await go(build_jobs(make_prompts(400), WISH), say, tmp_path, plan=plan)


async def test_shapes_that_nobody_knows_do_not_buy_a_whole_data_set(
    make_prompts: Make, tmp_path: Path
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return Outcome(
            kind="reject", reason="unknown_shape", detail="finish_reason 'eos'", raw="{}"
        )

    with pytest.raises(EyasError, match="unknown_shape"):
        await go(build_jobs(make_prompts(100), WISH), say, tmp_path)
    assert len(stored(tmp_path, "failures")) <= 24


@pytest.mark.parametrize("asked_s", [0.0, 1e9])
async def test_a_retry_after_of_nothing_or_of_ages_is_bounded(
    make_prompts: Make, tmp_path: Path, asked_s: float
) -> None:
    async def say(_question: str, _n: int) -> Outcome:
        return replace(LIMITED, retry_after_s=asked_s)

    plan = replace(PLAN, patience_s=0.2, backoff_s=0.05)
    asker, tally = await go(build_jobs(make_prompts(4), WISH), say, tmp_path, plan=plan)
    assert tally.failed_rows == {"rate_limited": 4}
    assert len(asker.asked) < 200


async def test_ctrl_c_while_it_is_stopping_anyway_abandons_nothing(
    make_prompts: Make, good: Outcome, tmp_path: Path
) -> None:
    async def say(question: str, _n: int) -> Outcome:
        if question == "question 0":
            return Outcome(kind="stop", reason="out_of_credits", detail="402")
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT) if question == "question 1" else None
        await asyncio.sleep(0.3)
        return good

    with pytest.raises(EyasError, match="out_of_credits"):
        await go(build_jobs(make_prompts(4), WISH), say, tmp_path)
    assert len(stored(tmp_path)) == 3
    assert not stored(tmp_path, "abandoned")
