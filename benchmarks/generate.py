"""Measure what an answer costs the client: CPU, event-loop lag, memory; beside two peers.

Every client asks the same simulated market for the same rows, parses each answer and appends it to
a file. eyas does all that `generate` does besides: fingerprints, four journals with fdatasync,
budget, adaptive limit, status file. Each runs in a process of its own, one after another.
Run: python benchmarks/generate.py --concurrency 2000 --answers 20000
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import market
import orjson

from eyas.generation.jobs import Job, Wish, build_body
from eyas.generation.meter import quantiles

MAX_TOKENS = 1_000_000
_LAG_S = 0.05


async def lags(found: list[float]) -> None:
    """Note how late a sleeper wakes."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_S)
        found.append(max(time.monotonic() - before - _LAG_S, 0.0))


async def ask_all(
    jobs: list[Job],
    common: Wish,
    concurrency: int,
    ask: Callable[[dict[str, Any]], Awaitable[bytes]],
    path: Path,
) -> dict[str, Any]:
    """Ask every row once, `concurrency` at a time, and append what comes back."""
    gate, found = asyncio.Semaphore(concurrency), list[float]()
    watcher = asyncio.create_task(lags(found))
    failed = 0
    with path.open("ab") as out:

        async def one(job: Job) -> None:
            nonlocal failed
            async with gate:
                try:
                    out.write(await ask(build_body(job.prompt, job.sample, common)) + b"\n")
                except Exception:
                    failed += 1

        await asyncio.gather(*(one(job) for job in jobs))
    watcher.cancel()
    return {"answers": len(jobs) - failed, "failed": failed, "loop_lag_s": quantiles(found)}


async def with_aiohttp(url: str, jobs: list[Job], common: Wish, options: Any, folder: Path) -> Any:
    """Ask with plain aiohttp and orjson."""
    connector = aiohttp.TCPConnector(limit=options.concurrency)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(body: dict[str, Any]) -> bytes:
            async with session.post(f"{url}/chat/completions", data=orjson.dumps(body)) as answer:
                value = orjson.loads(await answer.read())
            assert value["choices"][0]["finish_reason"]
            return orjson.dumps(value)

        return await ask_all(jobs, common, options.concurrency, ask, folder / "out.jsonl")


async def with_openai(url: str, jobs: list[Job], common: Wish, options: Any, folder: Path) -> Any:
    """Ask with openai-python over its aiohttp client."""
    openai: Any = importlib.import_module("openai")
    http = openai.DefaultAioHttpClient(
        limits=openai.Limits(max_connections=options.concurrency)
        if hasattr(openai, "Limits")
        else openai.DEFAULT_CONNECTION_LIMITS
    )
    client = openai.AsyncOpenAI(
        base_url=url, api_key="sk-bench", http_client=http, timeout=300, max_retries=2
    )
    async with client:

        async def ask(body: dict[str, Any]) -> bytes:
            extra = {"plugins": body.pop("plugins")}
            answer = await client.chat.completions.create(**body, extra_body=extra)
            assert answer.choices[0].finish_reason
            return answer.model_dump_json().encode()

        return await ask_all(jobs, common, options.concurrency, ask, folder / "out.jsonl")


async def with_eyas(url: str, jobs: list[Job], common: Wish, options: Any, folder: Path) -> Any:
    """Ask as `generate` does, everything on."""
    run = await market.go(url, jobs, common, folder, plan=market.plan_of(options.concurrency))
    facts = run.facts()
    failed = sum(facts["attempts"]["failed"].values())
    return {"answers": run.tally.new, "failed": failed, "loop_lag_s": facts["loop_lag_s"]}


CLIENTS = {"eyas": with_eyas, "aiohttp": with_aiohttp, "openai": with_openai}


def measure(name: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one client in this process and return its figures."""
    common = market.wish(MAX_TOKENS)
    jobs = market.jobs_of(options.answers, common)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(CLIENTS[name](url, jobs, common, options, Path(folder)))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "client": name,
        "concurrency": options.concurrency,
        **result,
        "cpu_s_per_1000": round(1000 * cpu_s / max(result["answers"], 1), 3),
        "wall_s": round(time.monotonic() - started, 1),
        "rss_mb": round(after.ru_maxrss / 1024),
        "rss_at_start_mb": round(before.ru_maxrss / 1024),
    }


def main() -> None:
    """Print a line for each client."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=2000)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--delay-mean-s", type=float, default=8.0)
    parser.add_argument("--answer-kb", type=float, default=20.0)
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--url", help="internal: measure one client against this server")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < options.concurrency + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    if options.url:
        print(json.dumps(measure(options.clients[0], options.url, options)), flush=True)
        return
    tokens = options.answer_kb * 1000 / 4
    changes = {
        "delay_mean_s": options.delay_mean_s,
        "lengths": [{"max_tokens": MAX_TOKENS, "median_tokens": tokens, "sigma": 0.1}],
    }
    for name in options.clients:
        if importlib.util.find_spec(name) is None:
            print(json.dumps({"client": name, "skipped": "not installed: make .venv/.bench"}))
            continue
        with market.market(**changes) as url:
            command = [sys.executable, *sys.argv, "--clients", name, "--url", url]
            subprocess.run(command, check=True, env=os.environ)


if __name__ == "__main__":
    main()
