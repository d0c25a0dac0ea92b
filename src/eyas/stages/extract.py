"""Run the mixture through the target and keep its hidden states.

Reads: data/mixture/{train,val}.parquet, models/target. Writes: data/hidden_states/manifest.json and
the shards under runtime.store. Run: python -m eyas.stages.extract.
Source: docs/extraction.md; a shard that is there and whole is kept, so a killed run goes on, and
several runs over one runtime.store, on this machine or others, share the shards out. With
extract.window_gb the first window and the validation split are made, and train makes the rest.
"""

import contextlib
import dataclasses
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.desk.turns import Windows, alone, make_missing
from eyas.files import read_json
from eyas.settings import Extract, Runtime
from eyas.states import shards, store
from eyas.states.capturing import (
    CHECKED,
    MIXTURE,
    about_target,
    check_teacher,
    make_backend,
    read_job,
)
from eyas.states.job import build_manifest

MANIFEST = Path("data/hidden_states/manifest.json")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Extract hidden states."""
    run_stage("extract", work, config)


def work(params: Params) -> Report:
    """Plan the shards, make those that are missing, check the teacher, write the manifest."""
    runtime = params.knob("runtime", Runtime)
    job = read_job(params.section("extract", Extract), Path(runtime.store))
    job.folder.mkdir(parents=True, exist_ok=True)
    with alone(job) if job.windows else contextlib.nullcontext():
        if job.windows:
            made = Windows(job, runtime, "extract").bring(0)
        else:
            made = make_missing(job, runtime, job.kept, "extract")
        if not (job.folder / CHECKED).is_file():
            check_teacher(job, make_backend(job, runtime, None), 0)
    manifest = build_manifest(job, about_target(), job.kept)
    windows = shards.without_defaults(job.settings) if job.windows else None
    store.write_manifest(MANIFEST, dataclasses.replace(manifest, windows=windows))
    passing = [number for window in job.windows for number in window]
    size = sum(s.size_bytes for s in manifest.shards) + sum(map(job.size_bytes, passing))
    tokens, made_tokens = (sum(map(job.tokens, n)) for n in (range(len(job.runs)), made.shards))
    spent = made.seconds
    metrics = {
        "rows_in": len(job.samples),
        "rows_out": len(manifest.samples) + len(job.windows_of_samples()),
        "tokens": tokens,
        "size_bytes": size,
        "bytes_per_token": round(size / tokens, 1),
        "tokens_per_s": round(made_tokens / made.wall_s, 1) if made.shards else 0.0,
        "shards_written": len(made.shards),
        "shards_reused": made.reused,
        "teacher_argmax_agreement": round(read_json(job.folder / CHECKED)["agreement"], 5),
        **{f"{n}_share": round(s / (sum(spent.values()) or 1), 3) for n, s in spent.items()},
    }
    if job.windows:
        largest = max(map(job.disk_bytes, job.windows))
        metrics |= {"windows": len(job.windows), "window_bytes": largest}
        metrics["kept_bytes"] = job.disk_bytes(job.kept)
    summary = (
        f"{len(job.samples)} samples, {tokens:,} tokens, {size / 1e6:,.0f} MB, {len(job.runs)} "
        f"shards ({len(made.shards)} made now, {metrics['tokens_per_s']:,.0f} tokens/s)"
    )
    return Report(summary=summary, metrics=metrics, inputs=(MIXTURE / "train.parquet",))


if __name__ == "__main__":
    main()
