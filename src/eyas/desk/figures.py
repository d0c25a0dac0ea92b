"""What the report draws, each plot with its title, its alternative text and its caption."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.desk import plots
from eyas.desk.plots import Bars, Draw, Line
from eyas.desk.results import ALL, DRAFTERS, TITLES, Results
from eyas.files import read_jsonl
from eyas.parquet import read_samples

CURVES = Path("models/drafter/curves.jsonl")
_POINTS = 60  # of a training curve on the page
_HISTOGRAM_IN = 1.15
Figure = tuple[str, str, str]  # title, SVG, caption


def by_set(results: Results) -> Bars:
    """Return acceptance length by held-out set and drafter."""
    sets = (*results.heldout_sets, ALL)
    known = [d for d in DRAFTERS if results.row(d, ALL)]
    rows = [results.row("trained", name) for name in sets]
    return Bars(
        labels=sets,
        series={TITLES[d]: [results.tau(d, name) or 1.0 for name in sets] for d in known},
        xlabel="tokens a verification; 1 is plain decoding",
        base=1.0,
        intervals={TITLES["trained"]: [(r["tau_low"], r["tau_high"]) for r in rows if r]},
    )


def by_position(results: Results) -> Draw:
    """Return the trained drafter's acceptance at each position of its longest chain."""
    lines: dict[str, Line] = {}
    longest = max(r["draft_steps"] for r in results.rows() if r["drafter"] == "trained")
    for name in (*results.heldout_sets, ALL):
        if (row := results.row("trained", name, longest)) is not None:
            shares = row["acceptance_by_position"]
            lines[name] = Line(xs=range(1, len(shares) + 1), ys=shares)
    return plots.lines(lines, "position in the chain", "accepted, of those reached", whole=True)


def acceptance_figures(results: Results) -> list[Figure]:
    """Return the plots of the evaluation."""
    bars = by_set(results)
    words = [f"{TITLES[d]} {results.tau(d, ALL) or 0:.2f}" for d in DRAFTERS if results.row(d, ALL)]
    rows = sorted(
        (r for r in results.rows() if (r["drafter"], r["dataset"]) == ("trained", ALL)),
        key=_steps_of,
    )
    steps = [_steps_of(r) for r in rows]
    taus = [r["tau"] for r in rows]
    low, high = [r["tau_low"] for r in rows], [r["tau_high"] for r in rows]
    by_steps = plots.lines(
        {"trained": Line(xs=steps, ys=taus, low=low, high=high)},
        "drafts a chain, K",
        "tokens a verification",
        whole=True,
    )
    told = ", ".join(f"{t:.2f} at K = {k}" for k, t in zip(steps, taus, strict=True))
    chain = rows[-1]["acceptance_by_position"]
    shares = ", ".join(f"{share:.0%}" for share in chain)
    return [
        (
            "Acceptance length by held-out set",
            plots.svg_of(
                {"": bars.draw},
                name="sets",
                alt=f"Bars of acceptance length; over all sets {', '.join(words)}.",
                height_in=bars.height_in,
            ),
            f"K = {results.headline_steps}. The bars begin at 1, where nothing is gained; the line "
            "is the 95 % interval over prompts.",
        ),
        (
            "Longer chains",
            plots.svg_of({"": by_steps}, name="steps", alt=f"Acceptance length: {told}."),
            "Trained, over all sets. Each draft costs a pass of the drafter, so a longer "
            "chain is not always a faster one. Shaded: 95 % interval.",
        ),
        (
            "Acceptance by position",
            plots.svg_of(
                {"": by_position(results)},
                name="positions",
                alt=f"Share of drafts accepted by position, over all sets: {shares}.",
            ),
            "The share of k-th drafts that were right where all before them were.",
        ),
    ]


def _steps_of(row: Mapping[str, Any]) -> int:
    return row["draft_steps"]


def data_figures(results: Results, root: Path) -> tuple[list[Figure], list[str]]:
    """Return the plots of the data, and the names of the files they lack."""
    answered = [d for d in results.datasets if results.of("generate", d, "responses")]
    drawn: list[Figure] = []
    if answered:
        drawn += _generation_figures(results, answered)
    paths = {name: root / f"data/valid/{name}.parquet" for name in results.datasets}
    lengths = {
        name: [end - start for sample in read_samples(path) for start, end in sample.spans]
        for name, path in paths.items()
        if path.is_file()
    }
    if lengths := {name: values for name, values in lengths.items() if values}:
        drawn.append(_length_figure(lengths))
    missing = [p.relative_to(root).as_posix() for p in paths.values() if not p.is_file()]
    return drawn, missing


def _generation_figures(results: Results, answered: Sequence[str]) -> list[Figure]:
    def of(metric: str) -> list[float]:
        return [float(results.of("generate", d, metric) or 0) for d in answered]

    tokens = Bars(
        labels=answered,
        series={"prompt": of("prompt_tokens"), "reply": of("completion_tokens")},
        xlabel="tokens",
        stacked=True,
        number="{:,.0f}",
    )
    told = ", ".join(
        f"{d} {p + r:,.0f}" for d, p, r in zip(answered, *tokens.series.values(), strict=True)
    )
    drawn = [
        (
            "Tokens bought",
            plots.svg_of(
                {"": tokens.draw},
                name="tokens",
                alt=f"Bars of prompt and reply tokens: {told}.",
                height_in=tokens.height_in,
            ),
            "What the endpoint counted, prompts and replies on top of each other.",
        )
    ]
    if not any(of("cost_usd")):
        return drawn
    cost = Bars(
        labels=answered,
        series={"cost": of("cost_usd")},
        xlabel="USD",
        stacked=True,
        number="{:,.4f}" if max(of("cost_usd")) < 1 else "{:,.2f}",
    )
    told = ", ".join(f"{d} {c:.4g}" for d, c in zip(answered, of("cost_usd"), strict=True))
    plot = plots.svg_of(
        {"": cost.draw}, name="cost", alt=f"Bars of cost in USD: {told}.", height_in=cost.height_in
    )
    return [*drawn, ("Money spent", plot, "The sum of what the endpoint charged for each answer.")]


def _length_figure(lengths: Mapping[str, Sequence[int]]) -> Figure:
    top = max(max(values) for values in lengths.values())
    names = list(lengths)
    draws = {
        name: plots.distribution(values, top, "tokens" if name == names[-1] else "")
        for name, values in lengths.items()
    }
    medians = ", ".join(f"{n} {sorted(v)[len(v) // 2]}" for n, v in lengths.items())
    plot = plots.svg_of(
        draws,
        name="lengths",
        alt=f"Histograms of reply lengths in tokens; medians: {medians}.",
        height_in=0.35 + _HISTOGRAM_IN * len(lengths),
    )
    return ("How long the replies are", plot, "Replies of the samples that passed every rule.")


def training_figures(root: Path) -> list[Figure]:
    """Return the training curves; none where there is no curve."""
    path = root / CURVES
    rows = list(read_jsonl(path)) if path.is_file() else []
    train = smoothed([row for row in rows if row["split"] == "train"])
    val = [row for row in rows if row["split"] == "val"]
    if not train:
        return []
    last = (val or train)[-1]
    specs = (
        ("loss", "Loss by TTT step", "loss a supervised row"),
        ("accuracy", "Accuracy by TTT step", "share right, the text before it given"),
    )
    drawn = [
        (
            title,
            plots.svg_of(
                {"": plots.lines(_by_ttt_step(train, val, kind), "optimiser step", kind)},
                name=kind,
                alt=f"{title}; at the end {_last_values(last, kind)}.",
                height_in=3.3,
            ),
            f"Lines: training, neighbours averaged; dots: validation. {words.capitalize()}.",
        )
        for kind, title, words in specs
    ]
    key = "simulated_acceptance_length"
    lines = {"training": _line(train, key)} | ({"validation": _line(val, key)} if val else {})
    plot = plots.svg_of(
        {"": plots.lines(lines, "optimiser step", "tokens a verification")},
        name="length",
        alt=f"Simulated acceptance length; at the end {last[key]:.2f}.",
        height_in=3.1,
    )
    caption = "As if the text so far were always the target's; the bonus token is counted."
    return [*drawn, ("Simulated acceptance length", plot, caption)]


def _by_ttt_step(
    train: Sequence[Mapping[str, float]], val: Sequence[Mapping[str, float]], kind: str
) -> dict[str, Line]:
    keys = sorted((k for k in train[0] if k.startswith(f"{kind}_step")), key=_number_of)
    lines = {
        f"step {_number_of(key)}": _line(train, key, style=index) for index, key in enumerate(keys)
    }
    for index, key in enumerate(keys if val else ()):
        lines[f"_{key}"] = _line(val, key, style=index, dots=True)  # "_": not in the legend
    return lines


def _line(
    rows: Sequence[Mapping[str, float]], key: str, *, style: int | None = None, dots: bool = False
) -> Line:
    return Line(xs=[r["step"] for r in rows], ys=[r[key] for r in rows], style=style, dots=dots)


def _number_of(key: str) -> int:
    return int(key.rpartition("step")[2])


def _last_values(row: Mapping[str, Any], kind: str) -> str:
    keys = sorted((k for k in row if k.startswith(f"{kind}_step")), key=_number_of)
    return ", ".join(f"{row[key]:.2f} at step {_number_of(key)}" for key in keys)


def smoothed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return at most `_POINTS` rows, each the mean of a run of neighbours."""
    if not rows:
        return []
    run = -(-len(rows) // _POINTS)
    groups = [rows[begin : begin + run] for begin in range(0, len(rows), run)]
    keys = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return [{key: sum(r[key] for r in group) / len(group) for key in keys} for group in groups]
