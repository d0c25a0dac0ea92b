"""What the last run made, at the end of `make run` and on the report page.

Reads: metrics/*.json, data/evaluation.json. Run: eyas summary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_json

ALL = "all"
DRAFTERS = ("trained", "untrained", "random", "lookup")
TITLES = {
    "trained": "trained drafter",
    "untrained": "its start, untrained",
    "random": "random weights",
    "lookup": "prompt lookup",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Every number of a run, as the stages wrote them."""

    metrics: Mapping[str, Mapping[str, Any]]  # by stage or stage-data set
    evaluation: Mapping[str, Any]
    datasets: tuple[str, ...]

    def of(self, stage: str, dataset: str, name: str) -> float | int | None:
        """Return a stage's metric for a data set, or None where it has none."""
        return self.metrics.get(f"{stage}-{dataset}", {}).get(name)

    def tau(self, drafter: str, dataset: str, steps: int | None = None) -> float | None:
        """Return an acceptance length of the replayed table; K is the headline's by default."""
        row = self.row(drafter, dataset, steps)
        return row["tau"] if row else None

    def row(self, drafter: str, dataset: str, steps: int | None = None) -> dict[str, Any] | None:
        """Return a row of the replayed table."""
        wanted = (drafter, dataset, steps or self.evaluation["headline_steps"], "replay")
        for row in self.evaluation["rows"]:
            if (row["drafter"], row["dataset"], row["draft_steps"], row["method"]) == wanted:
                return row
        return None


def read_results(root: Path) -> Results:
    """Read the numbers of the last run.

    Raises: EyasError if there was none.
    """
    files = sorted((root / "metrics").glob("*.json"))
    if not files:
        raise EyasError(f"{root / 'metrics'}: no run has been here", hint="run `make run`")
    metrics = {path.stem: read_json(path) for path in files}
    names = [stem.removeprefix("prepare-") for stem in metrics if stem.startswith("prepare-")]
    evaluation = read_json(root / "data/evaluation.json", hint="run `dvc repro evaluate`")
    return Results(metrics=metrics, evaluation=evaluation, datasets=tuple(names))


def data_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row a data set: prompts, answers, tokens, cost, accepted share."""
    rows: list[tuple[str, ...]] = []
    for name in results.datasets:
        tokens = [
            results.of("generate", name, f"{kind}_tokens") for kind in ("prompt", "completion")
        ]
        accepted = results.of("validate", name, "accepted_share")
        rows.append(
            (
                name,
                number(results.of("prepare", name, "prompts")),
                number(results.of("generate", name, "responses")),
                number(sum(int(t or 0) for t in tokens)),
                f"{results.of('generate', name, 'cost_usd') or 0:.4f}",
                "-" if accepted is None else f"{accepted:.1%}",
            )
        )
    return rows


def drafter_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row a held-out set: acceptance length of each drafter at the headline K."""
    sets = [n for n in results.datasets if results.row("trained", n)]
    return [(name, *(ratio(results.tau(d, name)) for d in DRAFTERS)) for name in (*sets, ALL)]


def number(value: float | int | None) -> str:
    """Return a count with separators, or a dash."""
    return "-" if value is None else f"{value:,}"


def ratio(value: float | None) -> str:
    """Return two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def print_summary(root: Path) -> None:
    """Print both tables and where to look next."""
    from rich.console import Console

    results = read_results(root)
    console = Console(highlight=False)
    steps = results.evaluation["headline_steps"]
    headings = ("data set", "prompts", "responses", "tokens", "cost USD", "accepted")
    console.print(_table("Data", headings, data_rows(results)))
    title = f"Acceptance length on held-out prompts (K={steps}, bonus token counted)"
    console.print(
        _table(title, ("held-out set", *(TITLES[d] for d in DRAFTERS)), drafter_rows(results))
    )
    metrics = results.metrics["evaluate"]
    console.print(
        f"lossless on {metrics['lossless_share']:.0%} of {metrics['prompts']} prompts; "
        f"{metrics['forward_passes_saved_share']:.0%} of the target's forward passes saved; "
        f"{metrics['wall_clock_ratio']:.2f}x the speed of plain decoding here (batch 1)"
    )
    console.print("\nreport   reports/index.html\ndrafter  models/export  (SGLang, vLLM)")
    console.print("runs     make ui, then http://127.0.0.1:5000")


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table
