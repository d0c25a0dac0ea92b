"""Ask the endpoint for a reply to every prompt of a data set, within its budget.

Reads: data/prompts/DS.jsonl, var/journal/DS, answers that DVC pulled. Writes: the journal,
data/responses/DS.jsonl.
Run: python -m eyas.stages.generate select=chat.
Source: shared/facts/generation.md section 3. A stopped run goes on where it was: run it again.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk import local_endpoint
from eyas.desk.approval import check_approved
from eyas.desk.colleagues import take_shared
from eyas.desk.forecast import JOURNAL, forecast
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.desk.wish import wish_of
from eyas.errors import EyasError
from eyas.files import read_records, write_json, write_jsonl
from eyas.generation.client import Client, read_key
from eyas.generation.facts import Tally
from eyas.generation.faults import FINAL
from eyas.generation.holdings import Stock, counting, take_stock
from eyas.generation.jobs import Job, Wish, build_jobs
from eyas.generation.journal import Journal
from eyas.generation.patience import Plan
from eyas.generation.preflight import survey, without_too_long
from eyas.generation.prices import usd_per_mtok
from eyas.generation.progress import Progress
from eyas.generation.purse import look_at_key, settle_lost, watch_key
from eyas.generation.run import Run
from eyas.records import Prompt, Response
from eyas.settings import Runtime
from eyas.status import Status

MARKET = "endpoints.json"  # beside the journal: who offered the model, and at what price
_GIVEN_UP = 0.02  # of the rows, for reasons that may pass: more is no result
_RESERVE_BYTES = 1 << 16  # on disk for each request in flight, should the disk run full
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What this stage reads."""

    dataset: str
    kind: str
    codec: str
    wish: Wish
    runtime: Runtime


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Answer the prompts of one data set."""
    run_stage("generate", work, config)


def work(params: Params) -> Report:
    """Ask what the journal does not hold, then write every answer that counts, in prompt order."""
    settings = read_settings(params)
    source = Path(f"data/prompts/{settings.dataset}.jsonl")
    out = Path(f"data/responses/{settings.dataset}.jsonl")
    prompts = read_records(source, Prompt, hint=f"run `dvc repro -s prepare@{settings.dataset}`")
    if settings.kind == "trajectories":
        write_jsonl(out, [])
        zero = _metrics([], Tally(total=0, resumed=0), prompts=len(prompts), seconds=0.0)
        summary = f"{len(prompts)} trajectories: their replies are already there, nothing is sent"
        return Report(summary=summary, metrics=zero, inputs=(source,))
    jobs = plan_jobs(prompts, settings, source)
    reserve_bytes = _RESERVE_BYTES * max(settings.runtime.concurrency.values())
    with Journal(JOURNAL / settings.dataset, reserve_bytes=reserve_bytes) as journal:
        take_shared(jobs, journal, settings.wish, out)
        _tell_of_the_past(jobs, journal)
        started_s = time.monotonic()
        tally = ask_missing(jobs, journal, settings)
        seconds = time.monotonic() - started_s
        kept = counting(jobs, journal.books, settings.wish)
        responses = [journal.read(j.fingerprint) for j in jobs if j.fingerprint in kept]
        check_complete(responses, tally, settings)
        write_jsonl(out, responses)
    metrics = _metrics(responses, tally, prompts=len(prompts), seconds=seconds)
    market = JOURNAL / settings.dataset / MARKET
    return Report(
        summary=_summary(metrics),
        metrics=metrics,
        inputs=(source,),
        artifacts=(market,) if market.is_file() else (),
    )


def _tell_of_the_past(jobs: Sequence[Job], journal: Journal) -> None:
    """Say what earlier runs left behind: requests without an end, answers to other requests."""
    if lost := journal.books.all_unended():
        log.warning("%d earlier requests have no end on record: they may be billed", lost)
    wanted = {job.fingerprint for job in jobs}
    if others := sum(fingerprint not in wanted for fingerprint in journal.books.entries):
        log.warning(
            "%d answers in %s are to other requests (model, routing, sampling or prompts have "
            "changed) and do not count; `eyas import %s %s/responses.jsonl` takes them as they are",
            *(others, journal.folder, journal.folder.name, journal.folder),
        )


def read_settings(params: Params) -> Settings:
    """Read every section that this stage declares."""
    dataset = str(params.value("select"))
    return Settings(
        dataset=dataset,
        kind=params.section(f"datasets.{dataset}.kind", str),
        codec=params.section("target.codec", str),
        wish=wish_of(params, dataset),
        runtime=params.knob("runtime", Runtime),
    )


def plan_jobs(prompts: Sequence[Prompt], settings: Settings, source: Path) -> list[Job]:
    """Return the wanted answers in prompt order.

    Raises: EyasError for no prompts, a partition without its rule, or an id that comes twice.
    """
    if not prompts:
        raise EyasError(
            f"{source}: expected prompts, got an empty file",
            hint=f"see data/prompts/{settings.dataset}.rejects.jsonl",
        )
    for name in {prompt.partition for prompt in prompts}:
        if name not in settings.wish.partition or not settings.runtime.concurrency.get(name):
            raise EyasError(
                f"{source}: partition '{name}' has no rule or no concurrency",
                hint=f"add partition.{name} and runtime.concurrency.{name} under conf/",
            )
    jobs = build_jobs(prompts, settings.wish)
    counts = Counter(job.fingerprint for job in jobs)
    if twice := next((job for job in jobs if counts[job.fingerprint] > 1), None):
        raise EyasError(f"{source}: id {twice.prompt.id} occurs more than once")
    return jobs


def ask_missing(jobs: Sequence[Job], journal: Journal, settings: Settings) -> Tally:
    """Ask for what the journal lacks and the budget allows; no server is started for nothing."""
    stock = take_stock(jobs, journal.books, settings.wish, settings.wish.endpoint.prices)
    paid = settings.wish.endpoint.prices is None
    if not (stock.todo and _admits(stock)) and not (paid and journal.books.unsettled()):
        return stock.tally
    connection = settings.runtime.connection
    key = read_key(connection.api_key_env)
    title = f"generate@{settings.dataset}"
    with contextlib.ExitStack() as stack:
        client = Client(
            connection.url or stack.enter_context(_own_server(settings)),
            key=key,
            connections=max(settings.runtime.concurrency.values()),
            timeout_s=connection.timeout_s,
            cache_ttl_s=connection.cache_ttl_s,
        )
        progress = stack.enter_context(Progress(title, status=Status(title)))
        return asyncio.run(_ask(client, jobs, journal, settings, progress))


def _admits(stock: Stock) -> bool:
    job = stock.todo[0]
    return stock.limits.admits(job.prompt.prompt_tokens, job.max_tokens)


async def _ask(
    client: Client, jobs: Sequence[Job], journal: Journal, settings: Settings, progress: Progress
) -> Tally:
    """Look at the market and the key, ask, and settle what may have been billed."""
    wish, connection = settings.wish, settings.runtime.connection
    async with client:
        market = None
        if wish.endpoint.prices is None:
            market = await survey(client, wish.endpoint, max(job.max_tokens for job in jobs))
            write_json(journal.folder / MARKET, market.as_found)
        stock = take_stock(
            jobs, journal.books, wish, market.dearest if market else wish.endpoint.prices
        )
        todo = without_too_long(stock, market.context_length if market else None)
        if market:
            foretold = forecast(settings.dataset, stock, todo, wish, market.usable)
            check_approved(settings.dataset, foretold, connection.confirm_above_usd)
        plan = Plan(
            concurrency={n: settings.runtime.concurrency[n] for n in _partitions(jobs)},
            attempts=connection.attempts,
            patience_s=connection.timeout_s,
            slugs=market.slugs if market else {},
            quantizations=market.quantizations if market else {},
        )
        run = Run(wish, plan, journal, limits=stock.limits, tally=stock.tally)
        await look_at_key(client, stock.tally)
        keyed = asyncio.create_task(watch_key(client, stock.tally))
        try:
            await run.go(todo, client, progress)
        finally:
            keyed.cancel()
            await settle_lost(client, journal, stock.tally)
            await look_at_key(client, stock.tally)
    return stock.tally


def _partitions(jobs: Sequence[Job]) -> set[str]:
    return {job.prompt.partition for job in jobs}


def _own_server(settings: Settings) -> contextlib.AbstractContextManager[str]:
    if settings.wish.endpoint.name != "local":
        raise EyasError(
            f"endpoint '{settings.wish.endpoint.name}': runtime.connection.url is null",
            hint="only endpoint=local is started from here; set the URL under conf/endpoint",
        )
    target = local_endpoint.local_target(settings.wish.endpoint, settings.codec, settings.runtime)
    return local_endpoint.serving(target)


def check_complete(responses: Sequence[Response], tally: Tally, settings: Settings) -> None:
    """Refuse an empty result, and one in which many rows were given up that may yet be answered.

    Raises: EyasError with the reasons; what was answered stays in the journal.
    """
    open_rows = {r: n for r, n in tally.failed_rows.items() if r not in FINAL}
    if responses and sum(open_rows.values()) > _GIVEN_UP * tally.total:
        reasons = ", ".join(f"{reason} {count}" for reason, count in open_rows.items())
        raise EyasError(
            f"{sum(open_rows.values())} of {tally.total} rows were given up: {reasons}",
            hint="run the same command: they are asked again, what was answered is kept",
        )
    if responses:
        return
    if failed := tally.failed_rows:
        reasons = ", ".join(f"{reason} {count}" for reason, count in failed.most_common())
        raise EyasError(
            f"no row was answered: {reasons}",
            hint=f"see {JOURNAL / settings.dataset}/failures.jsonl",
        )
    generate = settings.wish.generate
    raise EyasError(
        f"datasets.{settings.dataset}.generate: expected room for one prompt and its longest "
        f"answer, got budget_tokens {generate.budget_tokens}, budget_usd {generate.budget_usd}",
        hint="raise the budget, or lower max_tokens",
    )


def _metrics(
    responses: Sequence[Response], tally: Tally, *, prompts: int, seconds: float
) -> dict[str, float | int]:
    failed = tally.failed_rows.total()
    skipped = tally.total - len(responses) - failed
    return {
        "prompts": prompts,
        "rows_in": tally.total,
        "rows_out": len(responses),
        "rejects_failed": failed,
        "rejects_budget": skipped,
        "responses": len(responses),
        "failed": failed,
        "skipped_for_budget": skipped,
        "resumed": tally.resumed,
        "imported": sum(r.source == "imported" for r in responses),
        "new_responses": tally.new,
        "requests_sent": tally.requests_sent,
        "maybe_billed": tally.maybe_billed,
        "settled": tally.settled,
        "abandoned": tally.abandoned,
        "unexplained_usd": round(tally.key.get("unexplained_usd") or 0.0, 9),
        **{f"failures_{reason}": count for reason, count in sorted(tally.failures.items())},
        "truncated": sum(r.finish_reason == "length" for r in responses),
        "prompt_tokens": sum(r.prompt_tokens for r in responses),
        "completion_tokens": sum(r.completion_tokens for r in responses),
        "new_tokens": tally.new_tokens,
        "cost_usd": round(sum(r.cost_usd for r in responses), 9),
        "new_cost_usd": round(tally.new_usd, 9),
        "usd_per_mtok_new": usd_per_mtok(tally.new_usd, tally.new_tokens),
        "duration_s": round(seconds, 2),
        "tokens_per_s": round(tally.new_completion_tokens / seconds, 1) if seconds else 0.0,
    }


def _summary(metrics: dict[str, float | int]) -> str:
    tokens = metrics["prompt_tokens"] + metrics["completion_tokens"]
    parts = [
        f"{metrics['responses']} responses ({metrics['resumed']} held, "
        f"{metrics['new_responses']} new)",
        f"{tokens:,} tokens",
        f"${metrics['cost_usd']:.4f}",
        f"{metrics['truncated']} truncated",
        f"{metrics['duration_s']:.1f} s",
    ]
    if metrics["unexplained_usd"]:
        parts.append(f"${metrics['unexplained_usd']:.4f} of the key's use unexplained")
    if metrics["failed"]:
        parts.append(f"{metrics['failed']} failed")
    if metrics["skipped_for_budget"]:
        parts.append(f"budget reached, {metrics['skipped_for_budget']} not kept")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
