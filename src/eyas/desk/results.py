"""Every number of the last run, as the stages wrote it. What is not there yet is None.

Reads: metrics/*.json, data/evaluation.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_json

ALL = "all"  # the rows over all held-out sets
DRAFTERS = ("trained", "untrained", "random", "lookup")
TITLES = {
    "trained": "trained",
    "untrained": "untrained start",
    "random": "random weights",
    "lookup": "prompt lookup",
}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The numbers of a run."""

    metrics: Mapping[str, Mapping[str, Any]]  # by stage or stage-data set
    evaluation: Mapping[str, Any] | None
    datasets: tuple[str, ...]

    def of(self, stage: str, dataset: str, name: str) -> float | int | None:
        """Return a stage's metric for a data set."""
        return self.metrics.get(f"{stage}-{dataset}", {}).get(name)

    def total(self, stage: str, name: str) -> float | int | None:
        """Return the sum of a metric over the data sets that have it."""
        known = [v for d in self.datasets if (v := self.of(stage, d, name)) is not None]
        return sum(known) if known else None

    @property
    def headline_steps(self) -> int | None:
        """Return the K of the headline figures."""
        return self.evaluation["headline_steps"] if self.evaluation else None

    @property
    def heldout_sets(self) -> tuple[str, ...]:
        """Return the data sets with evaluated prompts, in order."""
        return tuple(name for name in self.datasets if self.row("trained", name))

    def rows(self, method: str = "replay") -> list[Row]:
        """Return the rows of the evaluation; a server's own counts stand for either method."""
        rows = self.evaluation["rows"] if self.evaluation else []
        return [row for row in rows if row["method"] in (method, "served")]

    def row(
        self, drafter: str, dataset: str, steps: int | None = None, *, method: str = "replay"
    ) -> Row | None:
        """Return a row of the evaluation; K is the headline's by default."""
        wanted = (drafter, dataset, steps or self.headline_steps)
        for row in self.rows(method):
            if (row["drafter"], row["dataset"], row["draft_steps"]) == wanted:
                return row
        return None

    def tau(self, drafter: str, dataset: str, steps: int | None = None) -> float | None:
        """Return an acceptance length."""
        row = self.row(drafter, dataset, steps)
        return row["tau"] if row else None


def read_results(root: Path, datasets: Sequence[str]) -> Results:
    """Read the numbers of the last run for these data sets.

    Raises: EyasError if there was none.
    """
    files = sorted((root / "metrics").glob("*.json"))
    if not files:
        raise EyasError(f"{root / 'metrics'}: no run has been here", hint="run `make run`")
    evaluation = root / "data/evaluation.json"
    return Results(
        metrics={path.stem: read_json(path, hint="run `dvc repro`") for path in files},
        evaluation=read_json(evaluation) if evaluation.is_file() else None,
        datasets=tuple(datasets),
    )


def passes_saved(row: Row) -> float | None:
    """Return the share of the target's forward passes that drafting saves.

    Plain decoding of a reply of n tokens takes n passes, the prefill among them; drafting takes
    the prefill and the verifications. `tokens` leaves out the prefill's token.
    """
    plain = row["tokens"] + row["prompts"]
    return (row["tokens"] - row["verifications"]) / plain if plain else None


def share_kept(results: Results) -> float | None:
    """Return samples that passed every rule / answers and trajectories, over all data sets."""
    kept = results.total("validate", "rows_out")
    made = results.total("reconstruct", "rows_in")
    return kept / made if kept is not None and made else None


def headlines(results: Results, stage: str) -> dict[str, float]:
    """Return the figures by which people compare runs, as far as they are in step after a stage.

    Metrics of later stages may lie on disk from an earlier state, so they are left out. Names are
    short, since MLflow's table cuts them: tau is the acceptance length. docs/desk.md has them all.
    """
    order = ("merge", "extract", "train", "export", "evaluate", "report")
    reached = order[: order.index(stage) + 1] if stage in order else ()
    figures: dict[str, float | int | None] = {}
    if "merge" in reached:
        figures |= _data_headlines(results)
    if "extract" in reached:
        states = results.metrics.get("extract", {})
        figures["states_bytes_per_token"] = states.get("bytes_per_token")
    if "train" in reached:
        train = results.metrics.get("train", {})
        figures["tau_simulated"] = train.get("val_simulated_acceptance_length")
    if "evaluate" in reached:
        evaluate = results.metrics.get("evaluate", {})
        names = ("lossless_share", "wall_clock_ratio", "forward_passes_saved_share")
        figures |= {name: evaluate.get(name) for name in names}
        figures |= {f"tau_{d}": evaluate.get(f"acceptance_length_{d}") for d in DRAFTERS}
        figures |= {f"tau_trained_{d}": results.tau("trained", d) for d in results.heldout_sets}
        row = results.row("trained", ALL) or {}
        shares = enumerate(row.get("acceptance_by_position", ()), start=1)
        figures |= {f"accepted_share_draft{k}": share for k, share in shares}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _data_headlines(results: Results) -> dict[str, float | int | None]:
    """Return what the data cost, what went wrong, and what was dropped, over all data sets."""
    sums: dict[str, float | int | None] = {
        "data_responses": results.total("generate", "responses"),
        "data_prompt_tokens": results.total("generate", "prompt_tokens"),
        "data_completion_tokens": results.total("generate", "completion_tokens"),
        "data_cost_usd": results.total("generate", "cost_usd"),
        "data_accepted_share": share_kept(results),
        "data_mixture_tokens": results.metrics.get("merge", {}).get("tokens"),
    }
    for stage in ("generate", "reconstruct", "validate"):
        for dataset in results.datasets:
            for name, count in results.metrics.get(f"{stage}-{dataset}", {}).items():
                if name.startswith(("failures_", "rejects_")) and count:
                    sums[f"data_{name}"] = (sums.get(f"data_{name}") or 0) + count
    return sums
