"""The stage: from prompts to responses through a loopback endpoint, killed, resumed, refused."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvicorn
import yaml

from eyas.desk import colleagues, local_endpoint
from eyas.desk.params import Params, compose
from eyas.errors import EyasError
from eyas.files import read_records, write_json, write_jsonl
from eyas.generation.journal import Journal
from eyas.generation.server import build_app
from eyas.generation.shop import LocalAnswer, RefusalError, Seller
from eyas.records import Prompt, Response, row_id
from eyas.settings import Prices
from eyas.stages import generate

KEY = "sk-or-v1-deadbeef"
OUT = Path("data/responses/chat.jsonl")
PROMPTS = Path("data/prompts/chat.jsonl")


@dataclass
class Endpoint:
    """A loopback endpoint; `hold_after` answers, the others wait for `release`."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    hold_after: int | None = None
    release: threading.Event = field(default_factory=threading.Event)

    async def answer(self, body: dict[str, Any]) -> LocalAnswer:
        question = body["messages"][-1]["content"]
        self.asked.append(question)
        if question in self.refused:
            raise RefusalError(403, f"flagged; your key is {KEY}", "content_policy_violation")
        if self.hold_after is not None and len(self.asked) > self.hold_after:
            await asyncio.to_thread(self.release.wait)
        return LocalAnswer(
            content=f"answer to {question}",
            reasoning=None,
            tool_calls=(),
            finish_reason="length" if question.endswith("7") else "stop",
            prompt_tokens=10,
            completion_tokens=10,
            token_ids=(1, 2),
        )


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()
    prices = Prices(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=2.0)
    app = build_app(state.answer, "loopback/tiny", Seller(name="loopback", prices=prices))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    state.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/api/v1"
    yield state
    state.release.set()
    server.should_exit = server.force_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def composed() -> str:
    return compose(["experiment=tiny", "runtime.tracking=off", "select=chat"])


@pytest.fixture
def tree(
    composed: str, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return parameters that lead to the loopback endpoint, in an empty project folder."""
    monkeypatch.chdir(tmp_path)
    write_json(Path("models/target/eyas_target.json"), {"revision": "r1"})
    tree = yaml.safe_load(composed)
    tree["runtime"]["connection"]["url"] = endpoint.url
    tree["endpoint"]["model"] = "loopback/tiny"
    tree["runtime"]["concurrency"] = {"short": 4, "long": 2}
    tree["datasets"]["chat"]["generate"]["budget_tokens"] = None
    return tree


def prompts(count: int) -> list[Prompt]:
    rows = []
    for i in range(count):
        messages = ({"role": "user", "content": f"q{i}"},)
        rows.append(
            Prompt(
                id=row_id("chat", str(i), messages),
                dataset="chat",
                upstream_id=str(i),
                messages=messages,
                tools=(),
                prompt_tokens=10,
                partition="short",
                licence="MIT",
            )
        )
    return rows


def work(tree: dict[str, Any]) -> dict[str, float | int]:
    metrics = dict(generate.work(Params(tree)).metrics)
    assert metrics["rows_in"] == sum(
        metrics[name] for name in ("rows_out", "rejects_failed", "rejects_budget")
    )
    return metrics


def responses() -> list[Response]:
    return read_records(OUT, Response)


def test_every_prompt_is_answered_and_written_in_prompt_order(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    write_jsonl(PROMPTS, prompts(20))
    metrics = work(tree)
    assert [r.content for r in responses()] == [f"answer to q{i}" for i in range(20)]
    assert [r.id for r in responses()] == [p.id for p in prompts(20)]
    assert endpoint.asked != [f"q{i}" for i in range(20)]
    assert metrics["responses"] == metrics["new_responses"] == metrics["requests_sent"] == 20
    assert (metrics["truncated"], metrics["skipped_for_budget"], metrics["resumed"]) == (2, 0, 0)
    assert (metrics["prompt_tokens"], metrics["completion_tokens"]) == (200, 200)
    assert metrics["cost_usd"] == pytest.approx(20 * 30e-6)
    assert metrics["usd_per_mtok_new"] == pytest.approx(1.5)
    assert responses()[0].true_ids == (1, 2)
    assert responses()[0].source == "local"


def test_resume_sends_no_request_for_stored_rows_and_starts_no_server(
    tree: dict[str, Any], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(PROMPTS, prompts(10))
    work(tree)
    first = OUT.read_bytes()
    OUT.unlink()
    monkeypatch.setattr(local_endpoint, "serving", None)
    tree["runtime"]["connection"]["url"] = None
    metrics = work(tree)
    assert OUT.read_bytes() == first
    assert len(endpoint.asked) == 10
    assert (metrics["resumed"], metrics["new_responses"], metrics["requests_sent"]) == (10, 0, 0)
    assert (metrics["new_cost_usd"], metrics["usd_per_mtok_new"]) == (0, 0)


def lock_answers(*, endpoint: str, digest: str, size: int = 1) -> None:
    """Write a dvc.lock that names the answers of an earlier run."""
    out = {"path": OUT.as_posix(), "md5": digest, "size": size}
    ran = {"outs": [out], "params": {"params.yaml": {"endpoint": {"name": endpoint}}}}
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": {"generate@chat": ran}}))


def cache_as_dvc(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answer for `dvc cache dir`; return where the file of digest abcdef lies."""
    cache = Path("cache").resolve()
    monkeypatch.setattr(colleagues, "_cache_folder", lambda: cache)
    return cache / "files/md5/ab/cdef"


@pytest.mark.parametrize("place", ["workspace", "cache"])
def test_answers_of_a_colleague_count_as_held_when_the_budget_is_raised(
    tree: dict[str, Any], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write_jsonl(PROMPTS, prompts(60))
    tree["datasets"]["chat"]["generate"]["budget_tokens"] = 500
    bought = work(tree)["responses"]
    shutil.rmtree("var/journal")
    cached = cache_as_dvc(monkeypatch)
    lock_answers(endpoint="openrouter", digest="abcdef")
    if place == "cache":  # where DVC has removed the out before it runs the stage
        cached.parent.mkdir(parents=True)
        OUT.rename(cached)
    tree["datasets"]["chat"]["generate"]["budget_tokens"] = None
    metrics = work(tree)
    assert (metrics["resumed"], metrics["new_responses"]) == (bought, 60 - bought)
    assert len(set(endpoint.asked)) == len(endpoint.asked) == 60
    assert work(tree)["requests_sent"] == 0


def test_paid_answers_that_are_not_here_are_not_bought_again(
    tree: dict[str, Any], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(PROMPTS, prompts(2))
    cache_as_dvc(monkeypatch)
    lock_answers(endpoint="openrouter", digest="abcdef")
    openrouter(tree)
    with pytest.raises(
        EyasError, match=r"names answers of openrouter .*\n.*dvc pull generate@chat"
    ):
        work(tree)
    assert endpoint.asked == []
    lock_answers(endpoint="local", digest="abcdef")  # another endpoint's: nothing is bought twice
    with pytest.raises(EyasError, match="EYAS_TEST_KEY: expected the API key"):
        work(tree)


def test_a_journal_that_holds_what_dvc_has_lost_is_enough_and_a_smaller_one_is_not(
    tree: dict[str, Any], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(PROMPTS, prompts(2))
    work(tree)
    size = OUT.stat().st_size
    OUT.unlink()
    cache_as_dvc(monkeypatch)
    openrouter(tree)
    tree["generate"]["temperature"] = 0.1
    for more, words in ((0, "expected the API key"), (1, "names answers of openrouter")):
        lock_answers(endpoint="openrouter", digest="abcdef", size=size + more)
        with pytest.raises(EyasError, match=words):
            work(tree)


def test_new_prompts_and_samples_are_asked_and_the_old_ones_are_not(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    write_jsonl(PROMPTS, prompts(5))
    work(tree)
    write_jsonl(PROMPTS, prompts(8))
    tree["datasets"]["chat"]["generate"]["samples_per_prompt"] = 2
    metrics = work(tree)
    assert (metrics["prompts"], metrics["rows_in"], metrics["resumed"]) == (8, 16, 5)
    assert len(endpoint.asked) == 16
    assert [(r.id, r.sample) for r in responses()] == [
        (p.id, sample) for p in prompts(8) for sample in (0, 1)
    ]


def test_another_temperature_asks_anew_and_the_first_is_still_held(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    write_jsonl(PROMPTS, prompts(5))
    work(tree)
    first = OUT.read_bytes()
    tree["generate"]["temperature"] = 0.1
    work(tree)
    assert len(endpoint.asked) == 10
    assert {r.sampling["temperature"] for r in responses()} == {0.1}
    tree["generate"]["temperature"] = 0.7
    work(tree)
    assert OUT.read_bytes() == first
    assert len(endpoint.asked) == 10


def test_another_target_asks_anew(tree: dict[str, Any], endpoint: Endpoint) -> None:
    write_jsonl(PROMPTS, prompts(3))
    work(tree)
    write_json(Path("models/target/eyas_target.json"), {"revision": "r2"})
    work(tree)
    assert len(endpoint.asked) == 6


def test_the_budget_is_kept_and_what_is_written_depends_on_the_journal_alone(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    write_jsonl(PROMPTS, prompts(60))
    budget = tree["datasets"]["chat"]["generate"]
    budget["budget_tokens"] = 500  # 20 tokens a row; 34 reserved
    metrics = work(tree)
    assert 24 <= metrics["responses"] == len(endpoint.asked) <= 25
    assert metrics["skipped_for_budget"] == 60 - metrics["responses"]
    first, asked = OUT.read_bytes(), len(endpoint.asked)
    assert work(tree)["requests_sent"] == 0
    budget["budget_tokens"] = 100
    metrics = work(tree)
    assert (metrics["responses"], metrics["skipped_for_budget"]) == (5, 55)
    assert {r.id for r in responses()} <= {orjson.loads(x)["id"] for x in first.splitlines()}
    budget["budget_tokens"] = 500
    work(tree)
    assert OUT.read_bytes() == first
    assert len(endpoint.asked) == asked


def test_a_budget_smaller_than_one_answer_is_told_before_anything_is_sent(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    write_jsonl(PROMPTS, prompts(3))
    tree["datasets"]["chat"]["generate"]["budget_tokens"] = 33
    with pytest.raises(
        EyasError, match=r"chat\.generate: expected room for one .*budget_tokens 33"
    ):
        work(tree)
    assert endpoint.asked == []
    assert not OUT.exists()


def test_trajectories_need_no_replies(tree: dict[str, Any], endpoint: Endpoint) -> None:
    write_jsonl(PROMPTS, prompts(3))
    tree["datasets"]["chat"]["kind"] = "trajectories"
    report = generate.work(Params(tree))
    assert OUT.read_bytes() == b""
    assert report.summary.startswith("3 trajectories")
    assert (report.metrics["prompts"], report.metrics["requests_sent"]) == (3, 0)
    assert endpoint.asked == []


def test_rows_that_the_endpoint_refuses_are_counted_and_not_asked_again(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    endpoint.refused = {"q1", "q2"}
    write_jsonl(PROMPTS, prompts(6))
    metrics = work(tree)
    assert (metrics["responses"], metrics["failed"], metrics["failures_moderation"]) == (4, 2, 2)
    assert work(tree)["failed"] == 2
    assert len(endpoint.asked) == 6


def test_a_data_set_without_a_single_answer_is_an_error(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    endpoint.refused = {"q0", "q1"}
    write_jsonl(PROMPTS, prompts(2))
    with pytest.raises(EyasError, match="no row was answered: moderation 2"):
        work(tree)
    assert not OUT.exists()


def test_a_corrupt_journal_line_costs_its_row_only(
    tree: dict[str, Any], endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(PROMPTS, prompts(6))
    work(tree)
    path = Path("var/journal/chat/responses.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[3:]]))
    OUT.unlink()
    metrics = work(tree)
    assert "responses.jsonl:3: skipped" in caplog.text
    assert (metrics["requests_sent"], metrics["responses"], metrics["resumed"]) == (1, 6, 5)


def test_a_journal_in_use_is_refused(tree: dict[str, Any]) -> None:
    write_jsonl(PROMPTS, prompts(2))
    with (
        Journal(Path("var/journal/chat")),
        pytest.raises(EyasError, match="is using this journal"),
    ):
        work(tree)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], r"chat\.jsonl: expected prompts, got an empty file"),
        ([replace(prompts(1)[0], partition="huge")], "partition 'huge' has no rule"),
        (prompts(1) * 2, "occurs more than once"),
    ],
)
def test_prompts_that_cannot_be_asked_are_an_error(
    tree: dict[str, Any], rows: list[Prompt], words: str
) -> None:
    write_jsonl(PROMPTS, rows)
    with pytest.raises(EyasError, match=words):
        work(tree)


def openrouter(tree: dict[str, Any]) -> None:
    tree["endpoint"] |= {"name": "openrouter", "prices": None, "provider": {"only": ["loopback"]}}
    tree["runtime"]["connection"]["api_key_env"] = "EYAS_TEST_KEY"


def test_a_missing_key_is_told_before_anything_is_sent(
    tree: dict[str, Any], endpoint: Endpoint
) -> None:
    openrouter(tree)
    write_jsonl(PROMPTS, prompts(2))
    with pytest.raises(EyasError, match="EYAS_TEST_KEY: expected the API key"):
        work(tree)
    assert endpoint.asked == []


def test_openrouter_needs_an_address(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    openrouter(tree)
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    tree["runtime"]["connection"]["url"] = None
    write_jsonl(PROMPTS, prompts(2))
    with pytest.raises(EyasError, match=r"runtime\.connection\.url is null"):
        work(tree)


def test_the_key_stands_in_no_file_and_no_log(
    tree: dict[str, Any],
    endpoint: Endpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    openrouter(tree)
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    caplog.set_level("DEBUG")
    endpoint.refused = {"q1"}  # this refusal repeats the key
    write_jsonl(PROMPTS, prompts(4))
    assert work(tree)["failed"] == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert b"your key is [key]" in (tmp_path / "var/journal/chat/failures.jsonl").read_bytes()
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in caplog.text
    assert {r.source for r in responses()} == {"openrouter"}


def test_the_local_endpoint_is_started_when_no_address_is_given(
    tree: dict[str, Any], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    @contextlib.contextmanager
    def serving(target: local_endpoint.LocalTarget) -> Generator[str]:
        started.append(target)
        yield endpoint.url

    monkeypatch.setattr(local_endpoint, "serving", serving)
    tree["runtime"]["connection"]["url"] = None
    write_jsonl(PROMPTS, prompts(2))
    assert work(tree)["responses"] == 2
    assert [(t.model_name, t.codec, t.folder) for t in started] == [
        ("loopback/tiny", "chatml", "models/target")
    ]


def test_the_summary_tells_what_was_bought(tree: dict[str, Any]) -> None:
    write_jsonl(PROMPTS, prompts(8))
    tree["datasets"]["chat"]["generate"]["budget_tokens"] = 100
    summary = generate.work(Params(tree)).summary
    assert summary.startswith("4 responses (0 held, 4 new), 80 tokens, $0.0001")
    assert "budget reached, 4 not kept" in summary


def test_after_a_kill_no_answer_is_lost_and_none_is_bought_twice(
    tree: dict[str, Any], endpoint: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(PROMPTS, prompts(20))
    write_json(Path("tree.json"), tree)
    endpoint.hold_after = 8
    code = (
        "from pathlib import Path\nfrom eyas.desk.params import Params\n"
        "from eyas.files import read_json\nfrom eyas.stages import generate\n"
        "generate.work(Params(read_json(Path('tree.json'))))"
    )
    source = str(Path(generate.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source}, cwd=tmp_path
    )
    path = Path("var/journal/chat/responses.jsonl")
    while len(endpoint.asked) < 12 or path.read_bytes().count(b"\n") < 8:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(endpoint.asked) == 12  # 8 answered, 4 in flight
    stored = path.read_bytes()
    endpoint.release.set()
    metrics = work(tree)
    assert path.read_bytes().startswith(stored)
    assert "4 earlier requests have no end on record" in caplog.text
    assert (metrics["resumed"], metrics["requests_sent"], metrics["responses"]) == (8, 12, 20)
    assert len(endpoint.asked) == 20 + 4
    lines = [orjson.loads(line)["fingerprint"] for line in path.read_bytes().splitlines()]
    assert len(lines) == len(set(lines)) == 20
