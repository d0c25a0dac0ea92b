"""What the generation benchmarks share: a simulated market in its own process, prompts, a run."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from eyas.generation.client import Client
from eyas.generation.facts import Tally
from eyas.generation.jobs import Job, Wish, admission_order, build_jobs
from eyas.generation.journal import Journal
from eyas.generation.limits import Limits
from eyas.generation.patience import Plan
from eyas.generation.progress import Progress
from eyas.generation.purse import look_at_key, settle_lost
from eyas.generation.run import Run
from eyas.records import Prompt, row_id
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Sampling
from eyas.status import Status

MODEL = "rehearsal/model"
_CHARS_PER_TOKEN = 4  # as the simulator counts prompts
_PROVIDER = {
    "name": "A",
    "share": 1.0,
    "prompt_usd_per_mtok": 0.6,
    "completion_usd_per_mtok": 2.5,
    "quantization": "int4",
    "context_length": 1_000_000,
    "max_completion_tokens": 1_000_000,
    "tokens_per_s": None,
    "capacity": None,
    "broken": None,
}
QUIET: Mapping[str, Any] = {
    "model": MODEL,
    "seed": 0,
    "time_scale": 1.0,
    "limit_usd": None,
    "hold_usd": None,
    "delay_mean_s": 0.2,
    "delay_sigma": 0.5,
    "reasoning_share": 0.6,
    "tool_call_share": 0.0,
    "providers": [_PROVIDER],
    "lengths": [{"max_tokens": 1_000_000, "median_tokens": 500.0, "sigma": 0.8}],
    "faults": {},
    "storms": [],
}


def provider(**changes: Any) -> dict[str, Any]:
    """Return a provider with some properties changed."""
    return _PROVIDER | changes


@contextlib.contextmanager
def market(**changes: Any) -> Generator[str]:
    """Serve a simulation in a process of its own; yield its base URL."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump({**QUIET, **changes}, file)
        file.flush()
        command = [sys.executable, "-m", "eyas.cli", "serve", "--simulate", file.name]
        process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                sys.exit("the simulator did not start")
            yield line.split()[-1]
        finally:
            process.terminate()
            process.wait(10)


def ledger(url: str) -> dict[str, Any]:
    """Return the server's own books."""
    with urllib.request.urlopen(f"{url}/ledger") as reply:
        return json.load(reply)["data"]


def prompts(count: int, tokens: int = 350, partition: str = "short") -> list[Prompt]:
    """Return prompts that the simulator counts as `tokens` tokens each."""
    rows = []
    for i in range(count):
        text = f"question {i} ".ljust(tokens * _CHARS_PER_TOKEN, ".")
        messages = ({"role": "user", "content": text},)
        rows.append(
            Prompt(
                id=row_id("bench", str(i), messages),
                dataset="bench",
                upstream_id=str(i),
                messages=messages,
                tools=(),
                prompt_tokens=tokens,
                partition=partition,
                licence="none",
            )
        )
    return rows


def wish(max_tokens: int, budget_tokens: int | None = None) -> Wish:
    """Return what every request has in common."""
    return Wish(
        endpoint=Endpoint(name="openrouter", model=MODEL, provider={}, prices=None),
        sampling=Sampling(temperature=0.7, top_p=0.95, seed=0),
        generate=DatasetGenerate(
            budget_tokens=budget_tokens, samples_per_prompt=1, max_tokens=None
        ),
        partition={"short": PartitionRule(max_prompt_tokens=None, max_tokens=max_tokens)},
        target_revision=None,
    )


def jobs_of(count: int, common: Wish, tokens: int = 350) -> list[Job]:
    """Return jobs in the order of admission."""
    return admission_order(build_jobs(prompts(count, tokens), common), 0)


def plan_of(concurrency: int, *, timeout_s: float = 300.0, time_scale: float = 1.0) -> Plan:
    """Return how hard to try, in compressed time where the market's is."""
    return Plan(
        concurrency={"short": concurrency, "long": concurrency},
        attempts=5,
        patience_s=timeout_s,
        backoff_s=1.0 / time_scale,
        backoff_cap_s=60.0 / time_scale,
        pause_s=5.0 / time_scale,
        time_scale=time_scale,
    )


async def go(
    url: str,
    jobs: list[Job],
    common: Wish,
    folder: Path,
    *,
    plan: Plan,
    limits: Limits | None = None,
) -> Run:
    """Run the whole client as `generate` does: journal, budget, limiter, status."""
    client = Client(
        url, key="sk-bench", connections=max(plan.concurrency.values()), timeout_s=plan.patience_s
    )
    tally = Tally(total=len(jobs), resumed=0)
    limits = limits or Limits(common.generate, None)
    screen = Console(file=io.StringIO())
    with Journal(folder / "journal") as journal:
        run = Run(common, plan, journal, limits=limits, tally=tally)
        status = Status("generate@bench", folder / "status")
        with Progress("bench", screen, status) as progress:
            async with client:
                await look_at_key(client, tally)
                await run.go(jobs, client, progress)
                await settle_lost(client, journal, tally)
                await look_at_key(client, tally)
    return run
