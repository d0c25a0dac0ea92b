"""What the last run made, in 80 columns, at the end of `make run`.

Reads: params.yaml, metrics/*.json, data/evaluation.json. Run: eyas summary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.desk.params import read_params
from eyas.desk.results import (
    ALL,
    DRAFTERS,
    Results,
    passes_saved,
    read_results,
    share_kept,
)
from eyas.desk.words import dollars, number, percent, ratio

_WIDTH = 80


def print_summary(root: Path) -> None:
    """Print both tables and where to look next.

    Raises: EyasError if nothing has run yet.
    """
    from rich.console import Console

    params = read_params(root / "params.yaml")
    results = read_results(root, params.section("merge.sources", tuple[str, ...]))
    console = Console(highlight=False, soft_wrap=False, width=_WIDTH)
    headings = ("data set", "prompts", "responses", "tokens", "cost USD", "accepted")
    console.print()
    console.print(_table("Data", headings, data_rows(results)))
    console.print()
    if results.evaluation is None:
        console.print("The drafter has not been evaluated yet: run `dvc repro`.")
    else:
        title = f"Acceptance length on held-out prompts, K={results.headline_steps}, bonus counted"
        heads = ("held-out set", *DRAFTERS, "passes saved")
        console.print(_table(title, heads, drafter_rows(results)))
        console.print(verdict(results))
    profile = params.section("export.profile", str)
    console.print(f"\nreport   reports/index.html\ndrafter  models/export (for {profile})")
    console.print("runs     make ui, then http://127.0.0.1:5000/#/experiments/1/runs")


def data_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row a data set: prompts, answers, tokens, cost, accepted share; and their sum."""
    rows: list[tuple[str, ...]] = []
    for name in results.datasets:
        kinds = [results.of("generate", name, f"{k}_tokens") for k in ("prompt", "completion")]
        known = [k for k in kinds if k is not None]
        rows.append(
            (
                name,
                number(results.of("prepare", name, "prompts")),
                number(results.of("generate", name, "responses")),
                number(sum(known) if known else None),
                dollars(results.of("generate", name, "cost_usd")),
                percent(results.of("validate", name, "accepted_share")),
            )
        )
    totals = [results.total("generate", f"{k}_tokens") for k in ("prompt", "completion")]
    known = [t for t in totals if t is not None]
    everything = (
        ALL,
        number(results.total("prepare", "prompts")),
        number(results.total("generate", "responses")),
        number(sum(known) if known else None),
        dollars(results.total("generate", "cost_usd")),
        percent(share_kept(results)),
    )
    return [*rows, everything]


def drafter_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row a held-out set: acceptance length of each drafter, forward passes saved."""
    rows: list[tuple[str, ...]] = []
    for name in (*results.heldout_sets, ALL):
        real = results.row("trained", name, method="real")
        taus = (ratio(results.tau(drafter, name)) for drafter in DRAFTERS)
        rows.append((name, *taus, percent(passes_saved(real) if real else None)))
    return rows


def verdict(results: Results) -> str:
    """Return losslessness and speed in one sentence."""
    metrics = results.metrics.get("evaluate", {})
    if "lossless_share" not in metrics:
        return ""
    return (
        f"lossless on {percent(metrics['lossless_share'], 0)} of {metrics['prompts']} prompts; "
        f"{metrics['wall_clock_ratio']:.2f}x the speed of plain decoding\n"
        "(wall clock, one sequence at a time, this machine)"
    )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for index, row in enumerate(rows):
        if index == len(rows) - 1:
            table.add_section()
        table.add_row(*row)
    return table
