"""Foretell the configured run before anything is spent: `eyas plan [--yes] [--json]`.

Reads: params.yaml, data/prompts/*.jsonl, var/journal, data/responses, metrics/extract.json, the
endpoint's market and key. Writes: var/approved.json (--yes).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eyas.desk import words
from eyas.desk.approval import approve, approved_usd
from eyas.desk.forecast import forecast, read_held
from eyas.desk.params import Params
from eyas.desk.wish import wish_of
from eyas.errors import EyasError
from eyas.files import read_json, read_records
from eyas.generation.client import Client, read_key
from eyas.generation.estimate import Estimate
from eyas.generation.holdings import take_stock
from eyas.generation.jobs import Job, build_jobs
from eyas.generation.market import Offer
from eyas.generation.preflight import survey, without_too_long
from eyas.generation.purse import key_left_usd
from eyas.records import Prompt
from eyas.settings import Dataset, Endpoint, Extract, PartitionRule, Runtime, Train

EXTRACT = Path("metrics/extract.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlan:
    """One data set: what is held, what is to come, or why that cannot be told."""

    name: str
    prompts: int = 0
    held: int = 0
    held_usd: float = 0.0
    foretold: Estimate | None = None
    approved_usd: float = 0.0  # that `eyas plan --yes` has allowed
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectPlan:
    """All data sets, the key, and what the states of their tokens will take."""

    sets: tuple[SetPlan, ...]
    usd: tuple[float, float, float]
    tokens: tuple[int, int, int]
    minutes: float
    key_left_usd: float | None
    confirm_above_usd: float | None
    state_bytes_per_token: float | None
    extract_tokens_per_s: float | None
    window_gb: float | None
    captures: int  # of every token

    @property
    def needs_yes(self) -> bool:
        """Tell whether a data set may cost more than goes without a yes."""
        limit = self.confirm_above_usd
        return limit is not None and any(
            one.foretold and one.foretold.usd[2] > max(limit, one.approved_usd) for one in self.sets
        )


def make_plan(params: Params) -> ProjectPlan:
    """Foretell every data set that is sent.

    Raises: EyasError if the market refuses, or the key is missing.
    """
    names = list(params.value("datasets"))
    runtime = params.knob("runtime", Runtime)
    offers, left_usd = _look(params, runtime)
    sets = tuple(_plan_set(params, name, offers, runtime) for name in names)
    foretold = [one.foretold for one in sets if one.foretold]
    tokens = _sum([f.tokens for f in foretold])
    replies = sum(f.completion_tokens[1] for f in foretold)
    window_gb, train = params.section("extract", Extract).window_gb, params.section("train", Train)
    looks_back = train.induction and params.value("drafter")["family"] == "eagle3"
    of_start = 1 + 2 * looks_back + train.feedback_rounds if train.start == "ridge" else 0
    return ProjectPlan(
        sets=sets,
        usd=_sum([f.usd for f in foretold]),
        tokens=tokens,
        minutes=sum(f.minutes for f in foretold),
        key_left_usd=left_usd,
        confirm_above_usd=runtime.connection.confirm_above_usd,
        state_bytes_per_token=_state_bytes(params, replies / max(tokens[1], 1)),
        extract_tokens_per_s=read_json(EXTRACT)["tokens_per_s"] if EXTRACT.is_file() else None,
        window_gb=window_gb,
        captures=train.epochs * train.soup + of_start if window_gb else 1,
    )


def say_yes(plan: ProjectPlan) -> None:
    """Approve the high end of every data set."""
    approve({one.name: one.foretold.usd[2] for one in plan.sets if one.foretold})


def render(plan: ProjectPlan) -> Group:
    """Return the table and what follows from it."""
    table = Table(box=None, pad_edge=False)
    for title in (
        "data set",
        "prompts",
        "held",
        "requests",
        "M tokens",
        "dollars",
        "minutes",
        "at",
    ):
        table.add_column(title, justify="left" if title == "data set" else "right")
    for one in plan.sets:
        table.add_row(*_cells(one))
    lines = [
        f"in all: {words.number(plan.tokens[1])} tokens ({_range(plan.tokens, 1e6)} million), "
        f"${words.dollars(plan.usd[1])} ({_range(plan.usd)}), "
        f"{words.seconds(60 * plan.minutes)} one set after another",
        *(f"{one.name}: {note}" for one in plan.sets if (note := one.note)),
        *sorted({f"foretold from {f.basis}" for one in plan.sets if (f := one.foretold)}),
    ]
    if plan.key_left_usd is not None:
        lines.append(f"left on the key: ${words.dollars(plan.key_left_usd)}")
    if plan.state_bytes_per_token:
        lines.append(_states_line(plan))
    if plan.needs_yes:
        lines.append(
            f"a data set may cost more than ${words.dollars(plan.confirm_above_usd)}: "
            "`eyas plan --yes` allows it"
        )
    return Group(table, *map(Text, lines))


def to_dict(plan: ProjectPlan) -> dict[str, Any]:
    """Return the plan as plain values."""
    return asdict(plan) | {"needs_yes": plan.needs_yes}


def _cells(one: SetPlan) -> list[str]:
    f = one.foretold
    if f is None:
        return [one.name, words.number(one.prompts or None), *[words.UNKNOWN] * 6]
    return [
        one.name,
        words.number(one.prompts),
        words.number(one.held),
        words.number(f.requests[1]),
        f"{f.tokens[1] / 1e6:.2f} ({_range(f.tokens, 1e6)})",
        f"{words.dollars(f.usd[1])} ({_range(f.usd)})",
        f"{f.minutes:.0f}",
        words.number(f.concurrency),
    ]


def _range(values: Sequence[float], scale: float = 1.0) -> str:
    return f"{values[0] / scale:.2f}-{values[2] / scale:.2f}"


def _states_line(plan: ProjectPlan) -> str:
    assert plan.state_bytes_per_token is not None
    size = words.size(plan.tokens[1] * plan.state_bytes_per_token)
    speed = plan.extract_tokens_per_s
    time = words.seconds(plan.captures * plan.tokens[1] / speed) if speed else "unmeasured"
    if plan.window_gb:
        size += f"; at most {plan.window_gb:g} GB at a time, captured {plan.captures} times"
    return f"hidden states of the new tokens: {size}; extraction: {time} at this machine's rate"


def _plan_set(
    params: Params,
    name: str,
    offers: Sequence[Offer],
    runtime: Runtime,
) -> SetPlan:
    dataset = params.section(f"datasets.{name}", Dataset)
    path = Path(f"data/prompts/{name}.jsonl")
    if dataset.kind == "trajectories":
        return SetPlan(name=name, note="trajectories; nothing is sent")
    if not path.is_file():
        return SetPlan(name=name, note=f"not prepared: run `dvc repro prepare@{name}`")
    wish = wish_of(params, name)
    prompts = read_records(path, Prompt, hint=f"run `dvc repro -s prepare@{name}`")
    jobs = build_jobs(prompts, wish)
    if not jobs:
        return SetPlan(name=name, note=f"no prompt: see data/prompts/{name}.rejects.jsonl")
    stock = take_stock(jobs, read_held(name), wish, wish.endpoint.prices)
    context = max((o.context_length or 1 << 62 for o in offers), default=None)
    todo = without_too_long(stock, context)
    return SetPlan(
        name=name,
        prompts=len(prompts),
        held=len(stock.held),
        held_usd=stock.tally.held_usd,
        approved_usd=approved_usd(name),
        foretold=forecast(
            *(name, stock, todo, wish, offers),
            concurrency=min(runtime.concurrency[p] for p in {_partition(j) for j in jobs}),
        ),
    )


def _partition(job: Job) -> str:
    return job.prompt.partition


def _look(params: Params, runtime: Runtime) -> tuple[tuple[Offer, ...], float | None]:
    """Return who would answer, and what the key has left."""
    endpoint = params.section("endpoint", Endpoint)
    if endpoint.prices:
        local = Offer(
            provider=endpoint.name,
            slug=endpoint.name,
            quantization="unknown",
            context_length=None,
            max_completion_tokens=None,
            prices=endpoint.prices,
        )
        return (local,), None
    connection = runtime.connection
    if connection.url is None:
        raise EyasError(f"endpoint '{endpoint.name}': runtime.connection.url is null")
    rules = params.section("partition", dict[str, PartitionRule])
    own = [params.value(f"datasets.{n}.generate.max_tokens") for n in params.value("datasets")]
    longest = max([rule.max_tokens for rule in rules.values()] + [n for n in own if n])
    key = read_key(connection.api_key_env)
    client = Client(connection.url, key=key, connections=4, timeout_s=60)

    async def look() -> tuple[tuple[Offer, ...], float | None]:
        async with client:
            market = await survey(client, endpoint, longest)
            return market.usable, await key_left_usd(client)

    return asyncio.run(look())


def _state_bytes(params: Params, reply_share: float) -> float | None:
    """Return bytes of a token's hidden states, as `extract` would store them.

    None before there is a target. `reply_share`: of all tokens, those of replies.
    """
    config = Path("models/target/config.json")
    if not config.is_file():
        return None
    from eyas.states.layout import make_layout
    from eyas.states.size import bytes_per_token

    settings, value = params.section("extract", Extract), read_json(config)
    choice = settings.codec, settings.final_codec, settings.final_rows
    final_share = reply_share if settings.final_rows == "supervised" else 1.0
    return bytes_per_token(
        make_layout(*choice, settings.teacher_k, settings.final_every),
        num_layers=len(settings.layers or (1, 2, 3)),
        hidden_size=int(value.get("text_config", value)["hidden_size"]),
        final_share=final_share / settings.final_every,
        teacher_share=reply_share,
    )


def _sum(triples: Sequence[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    return (
        sum(low for low, _, _ in triples),
        sum(middle for _, middle, _ in triples),
        sum(high for _, _, high in triples),
    )
