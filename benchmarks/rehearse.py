"""Rehearse the whole Kimi project's spend against a simulated market, in compressed time.

The data sets, budgets, partitions, routing and concurrency are those of conf/; the prompts are made
up, as long as those of their partition. Every time is given as it would be at scale 1. `best` is
what a scheduler that knew every latency would need for the same answers with the same number of
connections: no ramp, no fault, no budget to respect. Run: make rehearse
"""

import argparse
import asyncio
import heapq
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import market
import yaml
from rich.console import Console
from rich.table import Table

from eyas.desk.params import Params, check, compose
from eyas.desk.wish import wish_of
from eyas.generation.jobs import Job, admission_order, build_jobs
from eyas.records import Prompt
from eyas.settings import Dataset, Runtime

SIMULATION = Path("conf/simulation/default.yaml")
PROMPT_TOKENS = {"short": (350, 0.6), "long": (3000, 0.5)}  # median, sigma; assumption
STORM = {"first": 0, "count": 1000, "fault": "rate_limited", "retry_after_s": 89.0}


def prompts_of(name: str, dataset: Dataset) -> list[Prompt]:
    """Return as many prompts as the data set may have, of lengths drawn for its partition."""
    dice = random.Random(name)
    partition = dataset.prepare.partition or "short"
    median, sigma = PROMPT_TOKENS[partition]
    count = dataset.prepare.max_rows or 1000
    made = []
    for prompt in market.prompts(count, 8, partition):
        tokens = max(8, round(median * math.exp(dice.gauss(0, sigma))))
        text = prompt.messages[0]["content"].ljust(4 * tokens, ".")
        messages = ({"role": "user", "content": text},)
        made.append(replace(prompt, dataset=name, messages=messages, prompt_tokens=tokens))
    return made


def best_s(latencies: Iterable[float], slots: int) -> float:
    """Return when the last of these would end, begun in order on so many connections."""
    ends: list[float] = []
    for latency in latencies:
        begin = heapq.heappop(ends) if len(ends) >= slots else 0.0
        heapq.heappush(ends, begin + latency)
    return max(ends, default=0.0)


def latencies_of(folder: Path, jobs: Sequence[Job]) -> list[float]:
    """Return the stored answers' latencies in the order of admission."""
    lines = (folder / "journal" / "responses.jsonl").read_bytes().splitlines()
    rows = (json.loads(line) for line in lines)
    found = {row["fingerprint"]: row["latency_s"] for row in rows}
    return [found[job.fingerprint] for job in jobs if job.fingerprint in found]


async def rehearse(
    url: str, name: str, params: Params, model: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one data set through the client and compare its books with the server's."""
    dataset = params.section(f"datasets.{name}", Dataset)
    common = wish_of(params, name)
    common = replace(common, endpoint=replace(common.endpoint, model=model))
    if options.no_budget:
        common = replace(common, generate=replace(common.generate, budget_tokens=None))
    jobs = admission_order(build_jobs(prompts_of(name, dataset), common), common.sampling.seed)
    jobs = jobs[: options.rows]
    runtime = params.knob("runtime", Runtime)
    concurrency = runtime.concurrency[jobs[0].prompt.partition]
    before, started = market.ledger(url), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = await market.go(
            *(url, jobs, common, Path(folder)),
            plan=market.plan_of(
                concurrency,
                timeout_s=max(runtime.connection.timeout_s / options.time_scale, 20.0),
                time_scale=options.time_scale,
            ),
        )
        elapsed_s, latencies = time.monotonic() - started, latencies_of(Path(folder), jobs)
    after, tally, facts = market.ledger(url), run.tally, run.facts()
    tokens = sum(after[k] - before[k] for k in ("prompt_tokens", "completion_tokens"))
    minutes = elapsed_s * options.time_scale / 60
    best = best_s(latencies, concurrency) * options.time_scale / 60
    return {
        "dataset": name,
        "answers": tally.new,
        "tokens": tally.new_tokens,
        "billed_tokens": tokens,
        "usd": round(tally.new_usd, 4),
        "billed_usd": round(after["usd"] - before["usd"], 4),
        "unexplained_usd": tally.key["unexplained_usd"],
        "budget_percent": _percent(tokens, common.generate.budget_tokens),
        "errors": dict(Counter(facts["attempts"]["failed"]).most_common()),
        "rows_failed": dict(tally.failed_rows),
        "minutes": round(minutes, 1),
        "best_minutes": round(best, 1),
        "share_of_best": round(best / minutes, 3),
        "limit_at_end": facts["limit"]["now"],
    }


def _percent(tokens: int, budget: int | None) -> float | None:
    return round(100 * tokens / budget, 2) if budget else None


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table that people read."""
    table = Table(box=None, pad_edge=False)
    titles = ("data set", "answers", "tokens", "of budget", "dollars", "billed", "errors")
    for title in (*titles, "minutes", "of best"):
        table.add_column(title, justify="left" if title == "data set" else "right")
    for row in [*rows, total(rows)]:
        budget = "-" if row["budget_percent"] is None else f"{row['budget_percent']:.2f} %"
        table.add_row(
            row["dataset"],
            f"{row['answers']:,}",
            f"{row['tokens']:,}",
            budget,
            f"{row['usd']:.2f}",
            f"{row['billed_usd']:.2f}",
            f"{sum(row['errors'].values()):,}",
            f"{row['minutes']:.1f}",
            f"{100 * row['share_of_best']:.0f} %",
        )
    return table


def total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of all data sets."""
    keys = ("answers", "tokens", "usd", "billed_usd", "minutes", "best_minutes")
    sums: dict[str, Any] = {key: sum(row[key] for row in rows) for key in keys}
    errors: Counter[str] = Counter()
    for row in rows:
        errors.update(row["errors"])
    share = sums["best_minutes"] / max(sums["minutes"], 1e-9)
    head = {"dataset": "all", "budget_percent": None, "errors": dict(errors)}
    return head | sums | {"share_of_best": share}


def main() -> None:
    """Print the table, and a JSON line for each data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-scale", type=float, default=15.0)
    parser.add_argument("--sets", nargs="*", help="some of the data sets")
    parser.add_argument("--rows", type=int, help="at most so many prompts of each")
    parser.add_argument("--no-budget", action="store_true")
    parser.add_argument("--no-storm", action="store_true")
    options = parser.parse_args()
    params = check(compose(["endpoint=openrouter", "datasets=kimi", "partition=kimi"]))
    simulation = yaml.safe_load(SIMULATION.read_text(encoding="utf-8"))
    storm = STORM | {"retry_after_s": STORM["retry_after_s"] / options.time_scale}
    changes = {"time_scale": options.time_scale, "storms": [] if options.no_storm else [storm]}
    names = [
        name
        for name in params.value("datasets")
        if params.section(f"datasets.{name}.kind", str) == "prompts"
        and (not options.sets or name in options.sets)
    ]
    rows = []
    with market.market(**{**simulation, **changes}) as url:
        for name in names:
            rows.append(asyncio.run(rehearse(url, name, params, simulation["model"], options)))
            print(json.dumps(rows[-1]), flush=True)
    Console(width=120).print(render(rows))


if __name__ == "__main__":
    main()
