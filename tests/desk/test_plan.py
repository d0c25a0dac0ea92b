"""`eyas plan` over prepared prompts, against a market of one provider."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from rich.console import Console

from eyas.desk import approval
from eyas.desk import plan as desk
from eyas.desk.params import Params, compose
from eyas.desk.wish import wish_of
from eyas.errors import EyasError
from eyas.files import read_records, write_json, write_jsonl
from eyas.generation.jobs import build_jobs
from eyas.generation.server import build_app
from eyas.generation.shop import LocalAnswer, Seller
from eyas.records import Prompt
from eyas.settings import Prices


async def never(body: dict[str, Any]) -> LocalAnswer:
    raise AssertionError(f"a plan sends nothing, got {body}")


@pytest.fixture
def url() -> Iterator[str]:
    prices = Prices(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=2.0)
    seller = Seller(name="loopback", prices=prices, context_length=20_000)
    app = build_app(never, "lab/model", seller)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/api/v1"
    server.should_exit = server.force_exit = True
    thread.join(10)


@pytest.fixture
def tree(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_prompt: Callable[[int, int], Prompt],
) -> dict[str, Any]:
    overrides = ["endpoint=openrouter", "partition=kimi", "endpoint.model=lab/model"]
    tree = yaml.safe_load(compose([*overrides, "endpoint.provider={}"]))
    tree["runtime"]["connection"]["url"] = url
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-test")
    write_json(Path("models/target/config.json"), {"hidden_size": 576})
    write_jsonl(Path("data/prompts/chat.jsonl"), [make_prompt(i, 100) for i in range(40)])
    tree["datasets"]["chat"]["generate"]["budget_tokens"] = 200_000
    return tree


def shown(plan: desk.ProjectPlan) -> str:
    screen = io.StringIO()
    Console(file=screen, width=160).print(desk.render(plan))
    return screen.getvalue()


def test_a_plan_tells_what_is_to_come_and_what_it_does_not_know(tree: dict[str, Any]) -> None:
    plan = desk.make_plan(Params(tree))
    [chat] = [one for one in plan.sets if one.name == "chat"]
    assert chat.foretold is not None
    # 5, 25 and 100 % of 10,240 tokens, and a budget of 200,000
    assert chat.foretold.requests == (19, 40, 40)
    assert chat.foretold.tokens == (24_480, 106_400, 196_460)
    assert chat.foretold.usd == pytest.approx((0.04496, 0.2088, 0.39102))
    assert chat.foretold.concurrency == 19
    text = shown(plan)
    assert "not prepared: run `dvc repro prepare@tools`" in text
    assert "no answer yet: 5-25-100 % of max_tokens" in text
    assert "trajectories; nothing is sent" in text
    assert "hidden states of the new tokens: 491 MB" in text  # 4 + 4 * 2 * 576 bytes a token
    assert desk.to_dict(plan)["needs_yes"] is False


def test_windows_are_captured_once_for_the_start_and_in_every_epoch(tree: dict[str, Any]) -> None:
    tree["extract"]["window_gb"] = 0.2
    write_json(desk.EXTRACT, {"tokens_per_s": 106.4})
    times = "at most 0.2 GB at a time, captured {} times; extraction: {}"
    tree["train"] |= {"epochs": 3, "soup": 1, "induction": False}
    assert times.format(4, "67 min") in shown(desk.make_plan(Params(tree)))
    tree["train"]["induction"] = True
    assert times.format(6, "100 min") in shown(desk.make_plan(Params(tree)))
    tree["drafter"]["family"] = "eagle3_mla"  # whose heads do not look back
    assert times.format(4, "67 min") in shown(desk.make_plan(Params(tree)))
    tree["drafter"]["family"] = "eagle3"
    tree["train"] |= {"epochs": 1, "soup": 3}
    assert times.format(6, "100 min") in shown(desk.make_plan(Params(tree)))
    tree["train"]["start"] = "random"
    assert times.format(3, "50 min") in shown(desk.make_plan(Params(tree)))


def test_answers_that_were_pulled_count_as_held(tree: dict[str, Any]) -> None:
    prompts = read_records(Path("data/prompts/chat.jsonl"), Prompt)
    jobs = build_jobs(prompts, wish_of(Params(tree), "chat"))[:30]
    counts = {"prompt_tokens": 100, "completion_tokens": 50, "cost_usd": 0.001}
    rows = [{"fingerprint": job.fingerprint, **counts} for job in jobs]
    write_jsonl(Path("data/responses/chat.jsonl"), rows)
    write_jsonl(Path("var/journal/chat/responses.jsonl"), [])
    write_jsonl(Path("var/journal/chat/issued.jsonl"), [{"fingerprint": jobs[0].fingerprint}])
    [chat] = [one for one in desk.make_plan(Params(tree)).sets if one.name == "chat"]
    assert chat.foretold is not None
    assert (chat.held, chat.foretold.requests) == (30, (10, 10, 10))
    assert chat.held_usd == pytest.approx(0.03)


def test_a_dear_set_wants_a_yes_and_gets_it(tree: dict[str, Any]) -> None:
    tree["runtime"]["connection"]["confirm_above_usd"] = 0.1
    plan = desk.make_plan(Params(tree))
    assert plan.needs_yes
    [chat] = [one for one in plan.sets if one.name == "chat"]
    assert chat.foretold is not None
    assert "`eyas plan --yes` allows it" in shown(plan)
    with pytest.raises(EyasError, match=r"up to \$0\.39 .*\$0\.10 is allowed.*\n.*eyas plan --yes"):
        approval.check_approved("chat", chat.foretold, 0.1)
    desk.say_yes(plan)
    approval.check_approved("chat", chat.foretold, 0.1)
    approval.check_approved("chat", chat.foretold, None)
    assert not Path("var/journal").exists()


def test_prompts_that_do_not_fit_are_told(
    tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tree["partition"]["short"]["max_tokens"] = 19_950
    desk.make_plan(Params(tree))
    assert "40 prompts are not sent" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "lab/other"}, "endpoint.model 'lab/other'"),
        ({"provider": {"max_price": {"prompt": 0.5}}}, "above max_price"),
        ({"provider": {"onyl": ["x"]}}, "endpoint.provider.onyl"),
    ],
)
def test_what_the_market_refuses_is_told_before_anything_is_sent(
    tree: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    tree["endpoint"] |= changes
    with pytest.raises(EyasError) as caught:
        desk.make_plan(Params(tree))
    assert words in str(caught.value)


def test_no_key_is_told(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY")
    with pytest.raises(EyasError, match="OPENROUTER_API_KEY"):
        desk.make_plan(Params(tree))
