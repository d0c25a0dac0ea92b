"""The page that holds two runs against each other: cost, data, drafters, changes, lineage.

Run: eyas report --compare RUN RUN; a RUN is what `eyas.desk.runs` reads.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from eyas.desk import markup, plots
from eyas.desk.digests import git
from eyas.desk.plots import Bars
from eyas.desk.results import ALL, DRAFTERS, TITLES, headlines
from eyas.desk.runs import Run, difference
from eyas.desk.words import UNKNOWN, dollars, number, ratio

Row = tuple[str, ...]
_SOURCES = ("src", "conf", "dvc.yaml", "requirements")
_MOST_FILES = 40
_QUESTIONS = (
    ("What did it cost?", ("data_responses", "data_prompt_tokens", "data_completion_tokens")),
    ("", ("data_cost_usd", "data_failures_", "states_bytes_per_token", "train_")),
    ("Was the data clean?", ("data_accepted_share", "data_rejects_", "data_mixture_tokens")),
    ("Is it faster?", ("lossless_share", "wall_clock_ratio", "forward_passes_saved_share")),
    ("", ("tau_simulated", "accepted_share_")),
)


def build_comparison(a: Run, b: Run) -> str:
    """Return the page: `b` against `a`."""
    heads = ("", a.name, b.name)
    body = [
        markup.paragraph("eyas · two runs compared", "kicker"),
        markup.heading(1, f"{b.name} against {a.name}"),
        markup.paragraph(lead(a, b), "lead"),
        *(markup.note(words) for words in warnings(a, b)),
        markup.heading(2, "Which drafter is better?"),
        *_acceptance(a, b),
        *_figures(a, b),
        markup.heading(2, "What changed between the two?"),
        _table("Parameters that differ", heads, param_rows(a.params, b.params)),
        _table("Data that differ (the first digits of DVC's md5)", heads, digest_rows(a, b)),
        *_sources(a, b),
        markup.heading(2, "Where each drafter comes from"),
        _table("What each was made with", heads, origin_rows(a, b)),
        *(
            _table(f"{run.name}: answers and samples", _LINEAGE, lineage_rows(run))
            for run in (a, b)
        ),
        markup.footer("Made by `eyas report --compare`. Runs over time: `make ui`."),
    ]
    return markup.page(f"eyas: {b.name} against {a.name}", body)


def lead(a: Run, b: Run) -> str:
    """Return the result in a sentence."""
    first, second = a.results.tau("trained", ALL), b.results.tau("trained", ALL)
    if first is None or second is None:
        return "At least one of the two has not been evaluated, so no drafter can be called better."
    words = f"Acceptance length {second:.2f} against {first:.2f}"
    gap = difference(a.results, b.results)
    if gap is None:
        return f"{words}. They were not decoded on the same replies, so the gap has no interval."
    low, high = gap
    same = "more" if low > 0 else "less" if high < 0 else "no difference that the prompts can tell"
    return f"{words}: {second - first:+.2f} (95 % {low:+.2f} to {high:+.2f}, paired): {same}."


def warnings(a: Run, b: Run) -> list[str]:
    """Return what a reader must know before comparing."""
    told = [
        f"{run.name}: DVC does not have `{p}` here: `dvc fetch`."
        for run in (a, b)
        for p in run.missing
    ]
    if a.params.get("evaluate") != b.params.get("evaluate"):
        told.append("The two were evaluated with different settings: see the parameters.")
    return told


def _acceptance(a: Run, b: Run) -> list[str]:
    if not (a.results.evaluation and b.results.evaluation):
        return [markup.note("An evaluation is missing, so there is no table.")]
    sets = [n for n in a.results.heldout_sets if n in b.results.heldout_sets]
    rows = [acceptance_row(a, b, name) for name in (*sets, ALL)]
    heads = ("held-out set", a.name, "95 %", b.name, "95 %", "gap", "95 %, paired")
    caption = f"Acceptance length of the trained drafters, K = {b.results.headline_steps}"
    names = (f"A: {a.name}", f"B: {b.name}")
    runs = dict(zip(names, (a, b), strict=True))
    bars = Bars(
        labels=(*sets, ALL),
        series={
            k: [r.results.tau("trained", n) or 1.0 for n in (*sets, ALL)] for k, r in runs.items()
        },
        xlabel="tokens a verification; 1 is plain decoding",
        base=1.0,
        intervals={k: [_interval(r, n) for n in (*sets, ALL)] for k, r in runs.items()},
    )
    told = "; ".join(f"{row[0]} {row[1]} and {row[3]}" for row in rows)
    svg = plots.svg_of(
        {"": bars.draw},
        name="compare",
        alt=f"Bars of acceptance length of {a.name} and {b.name}: {told}.",
        height_in=bars.height_in,
    )
    caption_of_plot = "The bars begin at 1, where nothing is gained; lines are 95 % intervals."
    baselines: list[Row] = [
        (TITLES[d], *(ratio(run.results.tau(d, ALL)) for run in (a, b))) for d in DRAFTERS[1:]
    ]
    return [
        markup.table(caption, heads, rows),
        markup.figure("Acceptance length by held-out set", svg, caption_of_plot),
        _table("The baselines, all sets", ("", a.name, b.name), baselines),
    ]


def acceptance_row(a: Run, b: Run, name: str) -> Row:
    """Return a held-out set's row: both lengths, their intervals, and the gap."""
    first, second = (run.results.tau("trained", name) for run in (a, b))
    gap = difference(a.results, b.results, None if name == ALL else name)
    spans = [f"{low:.2f} to {high:.2f}" for low, high in (_interval(r, name) for r in (a, b))]
    moved = UNKNOWN if first is None or second is None else f"{second - first:+.2f}"
    paired = UNKNOWN if gap is None else f"{gap[0]:+.2f} to {gap[1]:+.2f}"
    return (name, ratio(first), spans[0], ratio(second), spans[1], moved, paired)


def _interval(run: Run, name: str) -> tuple[float, float]:
    row = run.results.row("trained", name) or {"tau_low": 1.0, "tau_high": 1.0}
    return row["tau_low"], row["tau_high"]


def _figures(a: Run, b: Run) -> list[str]:
    """Return a table for each question, of the figures that MLflow has under the same names."""
    told = [headlines(run.results, "evaluate") | _training(run) for run in (a, b)]
    parts: list[str] = []
    tables: dict[str, list[Row]] = {}
    title = ""
    for question, prefixes in _QUESTIONS:
        title = question or title
        for name in sorted({n for t in told for n in t if n.startswith(prefixes)}):
            tables.setdefault(title, []).append(_figure_row(name, *(t.get(name) for t in told)))
    for question, rows in tables.items():
        parts.append(markup.heading(2, question))
        parts.append(_table("In MLflow under these names", ("", a.name, b.name, "gap"), rows))
    return parts


def _training(run: Run) -> dict[str, float]:
    train = run.results.metrics.get("train", {})
    return {
        f"train_{n.removeprefix('train_')}": train[n]
        for n in ("train_cpu_s", "wall_s", "tokens", "steps")
        if n in train
    }


def _figure_row(name: str, first: float | None, second: float | None) -> Row:
    gap = UNKNOWN if first is None or second is None else f"{second - first:+,.6g}"
    return (name, _value(first), _value(second), gap)


def _value(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def param_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Return a row for each parameter that differs."""
    first, second = dict(_leaves("", a)), dict(_leaves("", b))
    names = sorted({*first, *second})
    return [
        (name, first.get(name, UNKNOWN), second.get(name, UNKNOWN))
        for name in names
        if first.get(name) != second.get(name)
    ]


def _leaves(path: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, item)
    else:
        yield path, str(value)


def digest_rows(a: Run, b: Run) -> list[Row]:
    """Return a row for each out of data/ and models/ that differs and that both runs use."""
    unused = [d for d in _datasets_of(a, b) if d not in (*a.results.datasets, *b.results.datasets)]
    return [
        (path, *(run.digests.get(path, UNKNOWN)[:12] for run in (a, b)))
        for path in sorted({*a.digests, *b.digests})
        if path.startswith(("data/", "models/"))
        and not path.endswith(".rejects.jsonl")
        and path.split("/")[-1].split(".")[0] not in unused
        and a.digests.get(path) != b.digests.get(path)
    ]


def _datasets_of(a: Run, b: Run) -> set[str]:
    """Return the data sets that dvc.lock knows, those of other experiments among them."""
    paths = [p for p in (*a.digests, *b.digests) if p.startswith("data/responses/")]
    return {path.split("/")[-1].removesuffix(".jsonl") for path in paths}


def _sources(a: Run, b: Run) -> list[str]:
    words = f"Sources: `{a.commit[:12]}` and `{b.commit[:12]}`"
    changed = git("diff", "--stat=100", a.commit, b.commit, "--", *_SOURCES).splitlines()
    if not changed:
        return [markup.paragraph(f"{words}; no difference in `{'`, `'.join(_SOURCES)}`.")]
    rows = [tuple(part.strip() for part in line.rsplit("|", 1)) for line in changed[:-1]]
    table = _table("Files that differ", ("file", "lines"), rows[:_MOST_FILES])
    return [markup.paragraph(f"{words}: {changed[-1].strip()}."), markup.folded("Files", table)]


def origin_rows(a: Run, b: Run) -> list[Row]:
    """Return what each was made with: target, template, prices, sampling, mixture, layers."""
    facts = [_origin(run) for run in (a, b)]
    return [(name, *(fact[name] for fact in facts)) for name in facts[0]]


def _origin(run: Run) -> dict[str, str]:
    params, endpoint = run.params, run.params.get("endpoint", {})
    prices = endpoint.get("prices") or {}
    sampling = params.get("generate", {})
    return {
        "commit": run.commit[:12] or UNKNOWN,
        "target": str(params.get("target", {}).get("name", UNKNOWN)),
        "target revision": str(run.drafter.get("target_revision", UNKNOWN))[:16],
        "template": str(params.get("target", {}).get("codec", UNKNOWN)),
        "answered by": f"{endpoint.get('model', UNKNOWN)} at {endpoint.get('name', UNKNOWN)}",
        "providers allowed": ", ".join(f"{k} {v}" for k, v in endpoint.get("provider", {}).items())
        or "any",
        "prices, USD a million tokens": " / ".join(str(v) for v in prices.values())
        or "the market's",
        "temperature, top_p": f"{sampling.get('temperature')}, {sampling.get('top_p')}",
        "mixture": ", ".join(params["merge"]["sources"]),
        "mixture, md5": run.digests.get("data/mixture/train.parquet", UNKNOWN)[:12],
        "aux layers": " ".join(map(str, run.drafter.get("aux_layers", (UNKNOWN,)))),
    }


_LINEAGE = (
    "data set",
    "answers",
    "tokens",
    "USD",
    "USD a Mtok",
    "kept",
    "dropped",
    "providers",
    "answers, md5",
)


def lineage_rows(run: Run) -> list[Row]:
    """Return a row a data set: what was bought of whom, what was kept, and the digest of it."""
    found = run.results
    rows: list[Row] = []
    for name in found.datasets:
        tokens = sum(
            found.of("generate", name, f"{k}_tokens") or 0 for k in ("prompt", "completion")
        )
        cost = found.of("generate", name, "cost_usd")
        valid = found.metrics.get(f"validate-{name}", {})
        rejects = {
            k: v
            for s in ("reconstruct", "validate")
            for k, v in found.metrics.get(f"{s}-{name}", {}).items()
            if k.startswith("rejects_") and v
        }
        dropped = ", ".join(f"{k.removeprefix('rejects_')} {v}" for k, v in rejects.items())
        providers = [
            k.removeprefix("provider_").removesuffix("_replies")
            for k in valid
            if k.startswith("provider_") and k.endswith("_replies")
        ]
        rows.append(
            (
                name,
                number(found.of("generate", name, "responses")),
                number(tokens),
                dollars(cost),
                dollars(cost / tokens * 1e6) if cost and tokens else UNKNOWN,
                number(valid.get("rows_out")),
                dropped or "none",
                ", ".join(providers) or "none",
                run.digests.get(f"data/responses/{name}.jsonl", UNKNOWN)[:12],
            )
        )
    return rows


def _table(caption: str, heads: Row, rows: list[Row]) -> str:
    return markup.table(caption, heads, rows) if rows else markup.paragraph(f"{caption}: none.")
