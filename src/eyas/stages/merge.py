"""Mix the valid samples of all sources into a training and a validation split.

Reads: data/valid/DS.parquet of merge.sources, models/target/config.json (hidden size),
metrics/extract.json if there is one and merge.extract_tokens_per_s is null.
Writes: data/mixture/{train,val}.parquet; token_counts.parquet (how often each id occurs in the
replies of train) and projection.json (bytes and hours of each data set) beside them.
Run: python -m eyas.stages.merge. Source: eyas.tokens.mixture, eyas.tokens.projection.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig

from eyas.desk import projection_table
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.parquet import read_packed, write_columns, write_samples
from eyas.records import Sample
from eyas.settings import Merge
from eyas.states.layout import ALL, SUPERVISED, Layout, make_layout, num_final_rows
from eyas.states.size import bytes_per_token, hours
from eyas.tokens.counts import count_reply_tokens, coverage_of_most_frequent
from eyas.tokens.mixture import Mixture, check_names, mix
from eyas.tokens.projection import Cost, Extent, Rate, metered, project

OUT = Path("data/mixture")
EXTRACT = Path("metrics/extract.json")
_AUX_LAYERS = 3  # EAGLE-3's
_VOCABULARIES = (4096, 8192, 16_384, 32_000)  # draft vocabularies whose coverage is told
LAYOUTS = {
    "bf16": make_layout("bf16", "bf16", ALL),
    "fp8": make_layout("fp8", "fp8", SUPERVISED),
    "int4": make_layout("int4", "fp8", SUPERVISED),
}
log = logging.getLogger("eyas")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Merge all sources."""
    run_stage("merge", work, config)


def work(params: Params) -> Report:
    """Mix, split, write, and tell what extraction will take."""
    settings = params.section("merge", Merge)
    check_names(settings)
    valid = dict.fromkeys(settings.sources, Extent())
    mixture = mix({n: metered(_read(n), valid, final_rows) for n in settings.sources}, settings)
    if not mixture.train or not mixture.val:
        raise EyasError(
            f"mixture: {len(mixture.train)} training and {len(mixture.val)} validation samples, "
            "expected at least one of each",
            hint="raise budgets, merge.max_tokens or merge.val_permille",
        )
    costs = {name: cost_of(layout, _hidden_size()) for name, layout in LAYOUTS.items()}
    mixed: dict[str, Extent] = {}
    for name, samples in (("train", mixture.train), ("val", mixture.val)):
        write_samples(OUT / f"{name}.parquet", metered(samples, mixed, final_rows))
    speed = tokens_per_s(settings)
    table = project(valid, mixed, costs, rate_at(speed))
    table |= {"tokens_per_s": speed, "vocabulary": _write_counts(mixture.train)}
    write_json(OUT / "projection.json", table)
    log.info("%s", projection_table.text_of(table))
    return _report(mixture, table, mixed, settings)


def _read(name: str) -> Iterator[Sample]:
    hint = "run `dvc repro merge`, which validates every source first"
    return read_packed(Path(f"data/valid/{name}.parquet"), hint=hint)


def final_rows(sample: Sample) -> int:
    """Return how many rows of a sample keep their final state where the loss decides."""
    return num_final_rows(LAYOUTS["fp8"], len(sample.input_ids), sample.spans)


def _hidden_size() -> int:
    config = read_json(Path("models/target/config.json"), hint="run `dvc repro target`")
    return int(config.get("text_config", config)["hidden_size"])


def cost_of(layout: Layout, hidden_size: int) -> Cost:
    """Return what the states of some samples take in a layout, in bytes."""

    def cost(extent: Extent) -> float:
        final = extent.tokens if layout.final_rows == ALL else extent.final_rows
        share = final / max(1, extent.tokens)
        return extent.tokens * bytes_per_token(
            layout, num_layers=_AUX_LAYERS, hidden_size=hidden_size, final_share=share
        )

    return cost


def tokens_per_s(settings: Merge) -> float | None:
    """Return the rate of extraction: as configured, or as the last one on this machine measured."""
    if settings.extract_tokens_per_s:
        return settings.extract_tokens_per_s
    measured = read_json(EXTRACT).get("tokens_per_s") if EXTRACT.is_file() else None
    return measured or None  # 0: all shards were there


def rate_at(speed: float | None) -> Rate:
    """Return the function from tokens to hours."""
    return lambda tokens: round(hours(tokens, speed), 3) if speed else None


def _write_counts(train: list[Sample]) -> dict[str, Any]:
    """Write the counts of the ids that occur; return how much of them the most frequent cover."""
    counts_V = count_reply_tokens(train)
    ids = np.flatnonzero(counts_V)
    columns = {"id": ids.astype(np.int32), "count": counts_V[ids]}
    write_columns(OUT / "token_counts.parquet", columns)
    covered = coverage_of_most_frequent(counts_V, _VOCABULARIES)
    return {"ids": len(ids), "coverage": {str(size): share for size, share in covered.items()}}


def _report(
    mixture: Mixture, table: dict[str, Any], mixed: dict[str, Extent], settings: Merge
) -> Report:
    everything = table["all"]["mixture"]
    per_source = {f"tokens_{n}": mixed.get(n, Extent()).tokens for n in settings.sources}
    return Report(
        summary=f"{len(mixture.train)} training and {len(mixture.val)} validation samples, "
        f"{projection_table.words_of(everything)}",
        metrics={
            "rows_in": mixture.rows_in,
            "rows_out": len(mixture.train) + len(mixture.val),
            "train_samples": len(mixture.train),
            "val_samples": len(mixture.val),
            "cut_samples": mixture.cut,
            "tokens": everything["tokens"],
            "supervised_share": everything["supervised_share"],
            **{f"states_bytes_{codec}": size for codec, size in everything["bytes"].items()},
            **per_source,
            **{f"rejects_{reason}": n for reason, n in sorted(mixture.rejects.items())},
        },
        inputs=tuple(Path(f"data/valid/{name}.parquet") for name in settings.sources),
    )


if __name__ == "__main__":
    main()
