"""The simulated market, asked by the real client."""

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from eyas.errors import EyasError
from eyas.generation.client import Client
from eyas.generation.facts import Tally
from eyas.generation.jobs import Wish, build_body, build_jobs
from eyas.generation.journal import Journal
from eyas.generation.limits import Limits
from eyas.generation.patience import Plan
from eyas.generation.preflight import survey
from eyas.generation.progress import Progress
from eyas.generation.purse import look_at_key, settle_lost
from eyas.generation.run import Run
from eyas.generation.shop import RefusalError
from eyas.generation.simulation import (
    FAULTS,
    ReplyLength,
    SimulatedProvider,
    Simulation,
    Storm,
    check_simulation,
    eligible,
)
from eyas.generation.simulator import serve_simulation
from eyas.records import Prompt
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Sampling

PROVIDER = SimulatedProvider(
    name="A",
    share=1.0,
    prompt_usd_per_mtok=1.0,
    completion_usd_per_mtok=2.0,
    quantization="int4",
    context_length=100_000,
    max_completion_tokens=100_000,
    tokens_per_s=None,
    capacity=None,
    broken=None,
)
QUIET = Simulation(
    model="lab/model",
    seed=0,
    time_scale=100.0,
    limit_usd=None,
    hold_usd=None,
    delay_mean_s=1.0,
    delay_sigma=0.3,
    reasoning_share=0.5,
    tool_call_share=1.0,
    providers=(PROVIDER,),
    lengths=(ReplyLength(max_tokens=1000, median_tokens=100.0, sigma=0.5),),
    faults={},
    storms=(),
)
WISH = Wish(
    endpoint=Endpoint(name="openrouter", model="lab/model", provider={}, prices=None),
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=3),
    generate=DatasetGenerate(budget_tokens=None, samples_per_prompt=1, max_tokens=None),
    partition={"short": PartitionRule(max_prompt_tokens=None, max_tokens=200)},
    target_revision=None,
)
PLAN = Plan(
    concurrency={"short": 50},
    attempts=4,
    patience_s=5.0,
    backoff_s=0.01,
    pause_s=0.01,
    time_scale=100.0,
)
Serve = Callable[[Simulation], str]
Make = Callable[[int], list[Prompt]]


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Return a function that serves a simulation and returns its base URL."""
    from eyas.desk.local_endpoint import bind

    ends: list[Callable[[], object]] = []

    def start(simulation: Simulation) -> str:
        check_simulation(simulation)
        listener, loop = bind(0), asyncio.new_event_loop()
        task = loop.create_task(serve_simulation(simulation, listener))

        def run() -> None:
            with pytest.raises(asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        ends.append(lambda: (loop.call_soon_threadsafe(task.cancel), thread.join(10))[0])
        return f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1"

    yield start
    for end in ends:
        end()


async def run_all(
    url: str, prompts: list[Prompt], folder: Path, *, wish: Wish = WISH, timeout_s: float = 5.0
) -> tuple[Tally, dict[str, Any]]:
    """Ask for every prompt; return our books and the server's."""
    jobs = build_jobs(prompts, wish)
    tally = Tally(total=len(jobs), resumed=0)
    client = Client(url, key="sk-test", connections=50, timeout_s=timeout_s)
    with Journal(folder, reserve_bytes=4096) as journal:
        run = Run(wish, PLAN, journal, limits=Limits(wish.generate, None), tally=tally)
        with Progress("test", Console(file=io.StringIO())) as progress:
            async with client:
                await look_at_key(client, tally)
                try:
                    await run.go(jobs, client, progress)
                finally:
                    await settle_lost(client, journal, tally)
                    await look_at_key(client, tally)
                books = await client.fetch("ledger")
    return tally, books


async def test_our_books_are_the_servers(serve: Serve, make_prompts: Make, tmp_path: Path) -> None:
    tally, books = await run_all(serve(QUIET), make_prompts(60), tmp_path)
    assert tally.new == books["answered"] == books["requests"] == 60
    assert tally.new_completion_tokens == books["completion_tokens"]
    assert tally.new_usd == pytest.approx(books["usd"])
    assert tally.key["unexplained_usd"] == pytest.approx(0.0)


async def test_equal_requests_get_equal_replies_and_are_told(
    serve: Serve, make_prompts: Make, tmp_path: Path
) -> None:
    texts, url = [], serve(QUIET)
    for name, repeated in (("a", 0), ("b", 5)):
        _, books = await run_all(url, make_prompts(5), tmp_path / name)
        assert books["repeated"] == repeated
        lines = (tmp_path / name / "responses.jsonl").read_bytes().splitlines()
        texts.append(sorted(str(orjson.loads(line)["content"]) for line in lines))
    assert texts[0] == texts[1]


RETRIED = sorted(
    set(FAULTS)
    - {"content_filter", "unknown_shape", "moderation", "context_length", "hang"}
    - {"bad_request", "not_found", "unauthorized", "out_of_credits", "key_limit"}
    - {"no_usage", "leaked_end", "blank_lines"}
)


@pytest.mark.parametrize("fault", RETRIED)
async def test_a_fault_that_passes_is_tried_again_until_every_row_is_there(
    serve: Serve, make_prompts: Make, tmp_path: Path, fault: str
) -> None:
    storm = Storm(first=0, count=6, fault=fault, retry_after_s=0.01)
    tally, books = await run_all(serve(replace(QUIET, storms=(storm,))), make_prompts(20), tmp_path)
    assert tally.new == 20
    assert sum(tally.failures.values()) == 6
    assert books["requests"] == 26
    if fault in ("cut", "truncated_body"):  # billed, lost, and found again by the generation's id
        assert tally.settled == 6
    assert tally.key["unexplained_usd"] == pytest.approx(0.0)


@pytest.mark.parametrize("fault", ["blank_lines", "leaked_end", "no_usage"])
async def test_an_odd_answer_is_an_answer(
    serve: Serve, make_prompts: Make, tmp_path: Path, fault: str
) -> None:
    simulation = replace(QUIET, faults={fault: 1.0})
    tally, books = await run_all(serve(simulation), make_prompts(5), tmp_path)
    assert (tally.new, dict(tally.failures)) == (5, {})
    assert tally.new_completion_tokens == books["completion_tokens"]
    assert tally.key["unexplained_usd"] == pytest.approx(0.0)


async def test_a_hang_ends_at_the_deadline_and_is_told_as_maybe_billed(
    serve: Serve, make_prompts: Make, tmp_path: Path
) -> None:
    storm = Storm(first=0, count=2, fault="hang", retry_after_s=None)
    simulation = replace(QUIET, storms=(storm,))
    tally, books = await run_all(serve(simulation), make_prompts(5), tmp_path, timeout_s=0.5)
    assert (tally.new, tally.maybe_billed, dict(tally.failures)) == (5, 2, {"deadline": 2})
    assert books["answered"] == 7
    unexplained = tally.key["unexplained_usd"]
    assert unexplained is not None
    assert unexplained > 0


@pytest.mark.parametrize("fault", ["unauthorized", "out_of_credits", "key_limit"])
async def test_no_key_and_no_money_stop_the_run(
    serve: Serve, make_prompts: Make, tmp_path: Path, fault: str
) -> None:
    storm = Storm(first=3, count=10**6, fault=fault, retry_after_s=None)
    with pytest.raises(EyasError, match=fault):
        await run_all(serve(replace(QUIET, storms=(storm,))), make_prompts(20), tmp_path)
    assert len((tmp_path / "responses.jsonl").read_bytes().splitlines()) == 3


async def test_a_provider_that_keeps_refusing_is_put_aside_by_name_and_no_row_is_lost(
    serve: Serve, make_prompts: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = replace(PROVIDER, name="Gone", broken="not_found")
    simulation = replace(QUIET, providers=(PROVIDER, gone))
    tally, books = await run_all(serve(simulation), make_prompts(200), tmp_path)
    assert tally.new == 200
    assert "provider 'Gone' is put aside" in caplog.text
    assert books["refusals"]["404"] < 60  # of about 100 that would have gone there


async def test_where_one_provider_is_pinned_its_refusals_end_the_run(
    serve: Serve, make_prompts: Make, tmp_path: Path
) -> None:
    gone = replace(PROVIDER, name="Gone", broken="not_found")
    endpoint = replace(WISH.endpoint, provider={"only": ["Gone"]})
    url = serve(replace(QUIET, providers=(PROVIDER, gone)))
    with pytest.raises(EyasError, match="not_found"):
        await run_all(url, make_prompts(40), tmp_path, wish=replace(WISH, endpoint=endpoint))


async def test_holds_and_full_providers_only_slow_it_down(
    serve: Serve, make_prompts: Make, tmp_path: Path
) -> None:
    narrow = replace(PROVIDER, capacity=10)
    hold_usd = 15 * (200 * 2.0 + 2) / 1e6
    simulation = replace(QUIET, providers=(narrow,), hold_usd=hold_usd)
    tally, books = await run_all(serve(simulation), make_prompts(60), tmp_path)
    assert tally.new == 60
    assert books["refusals"]


async def test_an_empty_key_is_refused_before_it_is_overdrawn(
    serve: Serve, make_prompts: Make, tmp_path: Path
) -> None:
    with pytest.raises(EyasError, match="out_of_credits"):
        await run_all(serve(replace(QUIET, limit_usd=0.002)), make_prompts(60), tmp_path)


async def test_the_market_can_be_surveyed(serve: Serve) -> None:
    url = serve(
        replace(QUIET, providers=(PROVIDER, replace(PROVIDER, name="B", quantization="fp8")))
    )
    async with Client(url, key=None, connections=2, timeout_s=5.0) as client:
        endpoint = replace(WISH.endpoint, provider={"quantizations": ["fp8"]})
        market = await survey(client, endpoint, 100)
        assert [offer.provider for offer in market.usable] == ["B"]
        assert market.context_length == 100_000
        assert len(market.as_found["endpoints"]) == 2
        with pytest.raises(EyasError, match="'lab/other'"):
            await survey(client, replace(WISH.endpoint, model="lab/other"), 100)
        asking = replace(WISH.endpoint, provider={"require_parameters": True}, logprobs=True)
        with pytest.raises(EyasError, match="A: does not take logprobs"):
            await survey(client, asking, 100)
        with pytest.raises(EyasError, match="404"):
            await client.fetch("generation?id=none")
        assert (await client.fetch("key"))["usage"] == 0


def test_a_request_that_no_provider_takes_is_a_404() -> None:
    assert eligible((PROVIDER,), {"order": ["A"]}, 10) == [0]
    for wish in ({"only": ["B"]}, {"ignore": ["A"]}, {"max_price": {"prompt": 0.5}}):
        with pytest.raises(RefusalError, match="No endpoints"):
            eligible((PROVIDER,), wish, 10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"faults": {"typo": 0.1}}, "fault 'typo'"),
        ({"providers": ()}, "at least one"),
        ({"time_scale": 0.0}, "time_scale"),
    ],
)
def test_an_impossible_simulation_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_simulation(replace(QUIET, **changes))


async def test_an_answer_out_of_the_cache_is_free_and_has_the_counts_of_the_billed_one(
    serve: Serve, make_prompts: Make
) -> None:
    [job] = build_jobs(make_prompts(1), WISH)
    body = orjson.dumps(build_body(job.prompt, job.sample, WISH))
    url = serve(QUIET)
    async with Client(url, key=None, connections=2, timeout_s=5.0, cache_ttl_s=600) as client:
        first, second = await client.ask(body), await client.ask(body)
    assert first.reply is not None
    assert second.reply is not None
    assert second.reply.content == first.reply.content
    assert second.completion_tokens == first.completion_tokens
    assert (second.cost_usd, first.cost_usd > 0) == (0.0, True)
    assert second.usage is not None
    assert second.usage["cached_from"] == first.reply.generation_id
