"""The report page: one self-contained HTML file, plots inside, no request to anywhere.

Reads: what `eyas.desk.summary` reads, models/drafter/curves.jsonl, data/valid/*.parquet.
Writes: reports/index.html, reports/acceptance.svg.
"""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from eyas.desk import plots
from eyas.desk.summary import ALL, DRAFTERS, TITLES, Results, data_rows, drafter_rows, ratio
from eyas.files import read_jsonl
from eyas.parquet import read_samples

CSS = """
:root{--ink:#1d2328;--soft:#5c6770;--line:#d9dee2;--back:#fff;--card:#f5f7f8;--mark:#1f6f8b}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaed;--soft:#9aa5ad;--line:#333c43;
--back:#14181b;--card:#1c2226;--mark:#6cc0dc}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1.5rem 1rem 4rem;background:var(--back);
color:var(--ink);font:16px/1.55 system-ui,sans-serif}
h1{font-size:1.7rem;margin:0}h2{font-size:1.2rem;margin:2.5rem 0 .5rem}
p,figcaption,dd{color:var(--soft)}p.lead{margin:.2rem 0 1.5rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem}
.card{background:var(--card);border-radius:.6rem;padding:.9rem 1rem}
.card b{display:block;font-size:1.8rem;line-height:1.2;color:var(--mark)}
.card span{color:var(--soft);font-size:.9rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding-bottom:.4rem}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left}
figure{margin:1rem 0;background:var(--card);border-radius:.6rem;padding:.8rem}
img{max-width:100%;height:auto;display:block;margin:auto}
figcaption{font-size:.9rem;padding-top:.4rem}dt{font-weight:600}dd{margin:0 0 .5rem}
code{font-size:.9em}
"""
GLOSSARY = (
    (
        "acceptance length",
        "tokens that one forward pass of the target gains: accepted drafts plus the bonus token",
    ),
    ("drafter", "the small model that guesses the target's next tokens"),
    ("prompt lookup", "the free baseline: copies what followed the same words earlier in the text"),
    ("untrained start", "a closed-form regression laid into the drafter before any training"),
    ("lossless", "the drafted reply has the very ids of plain greedy decoding"),
    ("accepted share", "samples that passed every rule, of all answers"),
)


def build_page(results: Results, root: Path) -> str:
    """Return the page."""
    sections = [
        "<h1>From prompts to a drafter</h1>",
        f"<p class=lead>{_lead(results)}</p>",
        _cards(results),
        "<h2>What the drafter accepts</h2>",
        _table(
            f"Acceptance length at K={results.evaluation['headline_steps']}, held-out prompts.",
            ("held-out set", *(TITLES[d] for d in DRAFTERS)),
            drafter_rows(results),
        ),
        _acceptance_figures(results),
        "<h2>What the data cost</h2>",
        _table(
            "Each data set, from prompts to samples.",
            ("data set", "prompts", "responses", "tokens", "cost USD", "accepted"),
            data_rows(results),
        ),
        _data_figures(results, root),
        "<h2>What was rejected, and why</h2>",
        _table("Rows dropped by each stage.", ("stage", "reason", "rows"), reject_rows(results)),
        "<h2>How training went</h2>",
        _training_figures(root),
        "<h2>Terms</h2>",
        "<dl>" + "".join(f"<dt>{t}</dt><dd>{d}</dd>" for t, d in GLOSSARY) + "</dl>",
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>eyas report</title><style>{CSS}</style></head>\n<body><main>{body}</main></body>"
        "</html>\n"
    )


def acceptance_plot(results: Results) -> bytes:
    """Return acceptance length by held-out set and drafter."""
    sets = [*(n for n in results.datasets if results.row("trained", n)), ALL]
    series = {TITLES[d]: [results.tau(d, name) or 0.0 for name in sets] for d in DRAFTERS}
    return plots.bars(sets, series, "acceptance length")


def reject_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row for every reason that dropped rows."""
    return [
        (stage, name.removeprefix("rejects_").replace("_", " "), f"{count:,}")
        for stage, metrics in results.metrics.items()
        for name, count in metrics.items()
        if name.startswith(("rejects_", "failures_")) and count
    ] or [("-", "nothing was rejected", "0")]


def _lead(results: Results) -> str:
    train = results.metrics.get("train", {})
    return (
        f"{results.metrics['merge']['tokens']:,} tokens of the target's own replies, "
        f"{train.get('steps', 0):,} optimiser steps, {results.metrics['evaluate']['prompts']} "
        "held-out prompts decoded twice: plainly, and with drafts."
    )


def _cards(results: Results) -> str:
    metrics, row = results.metrics["evaluate"], results.row("trained", ALL)
    interval = f"{row['tau_low']:.2f} to {row['tau_high']:.2f}" if row else ""
    steps = results.evaluation["headline_steps"]
    cost = sum(results.of("generate", n, "cost_usd") or 0 for n in results.datasets)
    cards = (
        (ratio(results.tau("trained", ALL)), f"acceptance length, K={steps} (95 %: {interval})"),
        (ratio(results.tau("lookup", ALL)), "prompt lookup, the free baseline"),
        (f"{metrics['lossless_share']:.0%}", f"lossless, of {metrics['prompts']} prompts"),
        (f"{metrics['wall_clock_ratio']:.2f}x", "speed of plain decoding, on this machine"),
        (f"${cost:.4f}", "spent on answers"),
    )
    inner = "".join(
        f"<div class=card><b>{big}</b><span>{small}</span></div>" for big, small in cards
    )
    return f"<div class=cards>{inner}</div>"


def _acceptance_figures(results: Results) -> str:
    by_set = _figure(
        acceptance_plot(results),
        "Acceptance length by held-out set and drafter; 1.0 saves nothing.",
    )
    steps = sorted(
        {r["draft_steps"] for r in results.evaluation["rows"] if r["method"] == "replay"}
    )
    taus = [results.tau("trained", ALL, k) or 0.0 for k in steps]
    ks = [float(k) for k in steps]
    by_steps = plots.lines({"trained": ks}, {"trained": taus}, "drafts a chain (K)", "length")
    positions: dict[str, Sequence[float]] = {}
    for name in (*results.datasets, ALL):
        if (row := results.row("trained", name, steps[-1])) is not None:
            positions[name] = row["acceptance_by_position"]
    places = {n: list(range(1, len(v) + 1)) for n, v in positions.items()}
    by_position = plots.lines(places, positions, "draft position", "share accepted")
    return (
        by_set
        + _figure(by_steps, "Acceptance length of the trained drafter as the chain grows.")
        + _figure(by_position, "Share accepted at each position, of those reached.")
    )


def _data_figures(results: Results, root: Path) -> str:
    tokens = {
        kind: [float(results.of("generate", n, f"{kind}_tokens") or 0) for n in results.datasets]
        for kind in ("prompt", "completion")
    }
    cost = {"cost": [float(results.of("generate", n, "cost_usd") or 0) for n in results.datasets]}
    lengths = {
        name: [e - s for sample in read_samples(path) for s, e in sample.spans]
        for name in results.datasets
        if (path := root / f"data/valid/{name}.parquet").is_file()
    }
    return (
        _figure(plots.bars(results.datasets, tokens, "tokens"), "Tokens by data set.")
        + _figure(plots.bars(results.datasets, cost, "USD"), "Cost by data set.")
        + _figure(plots.histogram(lengths, "tokens a reply"), "How long the kept replies are.")
    )


def _training_figures(root: Path) -> str:
    rows = list(read_jsonl(root / "models/drafter/curves.jsonl"))
    parts = {s: smoothed([r for r in rows if r["split"] == s]) for s in ("train", "val")}
    parts = {split: part for split, part in parts.items() if part}
    xs = {split: [float(r["step"]) for r in part] for split, part in parts.items()}
    loss = {split: [r["loss_step1"] for r in part] for split, part in parts.items()}
    length = {
        split: [r["simulated_acceptance_length"] for r in part] for split, part in parts.items()
    }
    last = list(parts)[-1]
    keys = [k for k in parts[last][0] if k.startswith("accuracy_")]
    accuracy = {k.removeprefix("accuracy_"): [r[k] for r in parts[last]] for k in keys}
    shared = dict.fromkeys(accuracy, xs[last])
    step = "optimiser step"
    return (
        _figure(plots.lines(xs, loss, step, "loss"), "Loss of the first draft, a supervised row.")
        + _figure(
            plots.lines(xs, length, step, "length"),
            "Simulated acceptance length, tokens teacher-forced, bonus token counted.",
        )
        + _figure(
            plots.lines(shared, accuracy, step, "accuracy"),
            "Accuracy on the validation split at each training-time-test step.",
        )
    )


def smoothed(rows: Sequence[dict[str, float]], points: int = 60) -> list[dict[str, float]]:
    """Return at most `points` rows, each the mean of a run of neighbours."""
    if not rows:
        return []
    size = -(-len(rows) // points)
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    numeric = [k for k, v in rows[0].items() if isinstance(v, int | float)]
    return [{k: sum(r[k] for r in group) / len(group) for k in numeric} for group in groups]


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{html.escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div class=wide><table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figure(svg: bytes, caption: str) -> str:
    data = base64.b64encode(svg).decode()
    text = html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )
