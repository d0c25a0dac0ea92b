"""What each way to store states costs in acceptance: one drafter trained on each, else all equal.

The states that a run's store holds in bf16 are written anew in each layout, by the project's own
shards, and read back by its own training: same samples, seeds and steps. Judged as in drafters.py,
on the run's held-out prompts. A loss is the fall of tau against bf16; its 95 % interval is a paired
bootstrap over prompts, seeds pooled.

Reads: models/target, params.yaml, data/ and the store of a finished run. Writes: var/drafters/.
Finished runs are kept, and unfinished ones go on from a checkpoint: start it again. JSON lines.

Run: python benchmarks/codecs.py [--epochs N] [--seeds 0 1 2]
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from drafter_data import KEPT, Data, finished_run
from drafter_runs import Place, Recipe
from drafters import RECIPES, Gains, compare, run, taus_of

from eyas.desk.params import Params, read_params
from eyas.errors import EyasError
from eyas.parquet import read_samples
from eyas.settings import Extract, Runtime
from eyas.stages import train
from eyas.states.capturing import about_target, read_job
from eyas.states.job import build_manifest
from eyas.states.layout import Captured
from eyas.states.shards import write_shard
from eyas.states.store import Store, open_store

BASE = "bf16"
_SUPERVISED = {"final_rows": "supervised"}
LAYOUTS: dict[str, dict[str, Any]] = {  # options of extract
    BASE: {"codec": "bf16", "final_codec": "bf16", **_SUPERVISED},
    "fp8": {"codec": "fp8", "final_codec": "fp8", **_SUPERVISED},
    "int4": {"codec": "int4", "final_codec": "fp8", **_SUPERVISED},
    "topk": {"codec": "bf16", "final_codec": "bf16", **_SUPERVISED}
    | {"teacher_k": 64, "final_every": 4},
}
BARS = {"fp8": 0.01, "int4": 0.02, "topk": 0.01}


def main() -> None:
    """Read the arguments, train what is missing, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=sorted(BARS), default=list(BARS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=read_params().value("train")["epochs"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    RECIPES["codecs"] = Recipe(trainer="eyas", settings={"epochs": given.epochs})
    place = Place(folder=KEPT, budget_cpu_s=0.0, peer_kit=KEPT, peer_python=KEPT)
    data = finished_run()
    names = [BASE, *given.layouts]
    stored = {name: stored_in(data, name) for name in names}
    gains: dict[str, list[Gains]] = {name: [] for name in names}
    for seed in given.seeds:
        for name in names:
            line, found = run(stored[name], "codecs", seed, place)
            gains[name].append(found)
            print(json.dumps(line), flush=True)
    for name in names:
        print(json.dumps(summary(data, name, gains) | bytes_of(stored[name])), flush=True)


def stored_in(data: Data, name: str) -> Data:
    """Return the run's data with its states as the layout keeps them.

    Raises: EyasError for a run whose store has less than bf16 of all rows.
    """
    tree = read_params().tree()
    source = open_store(train.MANIFEST, Path(tree["runtime"]["store"]))
    meta = source.meta
    if (meta.codec, meta.final_codec, meta.final_rows) != ("bf16", "bf16", "all"):
        raise EyasError(
            f"{train.MANIFEST}: expected bf16 states of all rows, got {meta.codec}, "
            f"{meta.final_codec}, {meta.final_rows}",
            hint="run this where extract has its default settings",
        )
    tree = tree | {"extract": tree["extract"] | LAYOUTS[name]}
    tree["runtime"] = tree["runtime"] | {"store": str(KEPT / "states")}
    store = written_anew(source, Params(tree), data.head.lm_head_VD)
    samples = list(read_samples(train.MIXTURE / "train.parquet"))
    documents = train.StoredDocuments(store, samples)
    return dataclasses.replace(data, name=name, documents=documents, digest=store.meta.key)


def written_anew(source: Store, params: Params, head_VD: torch.Tensor) -> Store:
    """Return a store of another layout, with the states of `source`; its shards are kept."""
    folder = Path(params.knob("runtime", Runtime).store)
    job = read_job(params.section("extract", Extract), folder)
    job.folder.mkdir(parents=True, exist_ok=True)
    for number, rows_of_shard in enumerate(job.runs):
        if not job.is_there(number):
            samples = [job.samples[row] for row in rows_of_shard]
            states = [source.read(sample.id) for sample in samples]
            rows = [Captured(aux_TLD=s.aux_TLD, final_TD=s.final_TD) for s in states]
            write_shard(job.path(number), samples, rows, job.layout, head_VD)
    return Store(build_manifest(job, about_target(), range(len(job.runs))), folder)


def summary(data: Data, name: str, gains: dict[str, list[Gains]]) -> dict[str, Any]:
    """Return a layout's tau, and what it loses against bf16."""
    taus = taus_of(data, gains[name])
    line: dict[str, Any] = {"what": "summary", "layout": name, "options": LAYOUTS[name]}
    line |= {"seeds": len(gains[name])} | taus
    line |= {"tau_by_seed": [taus_of(data, [one])["tau"] for one in gains[name]]}
    if name != BASE:
        base = taus_of(data, gains[BASE])["tau"]
        found = compare(data, gains[name], gains[BASE])
        loss, low, high = (
            round(-found[key] / base, 4)
            for key in ("difference", "difference_high", "difference_low")
        )
        line |= {"loss": loss, "loss_low": low, "loss_high": high}
        line |= {"bar": BARS[name], "met": loss <= BARS[name]}
    return line


def bytes_of(data: Data) -> dict[str, float]:
    """Return the bytes of a mean token, as the shards lie there."""
    files = [*(KEPT / "states" / data.digest).glob("*.json")]
    about = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    size, tokens = (sum(one[key] for one in about) for key in ("size_bytes", "tokens"))
    return {"bytes_per_token": round(size / tokens, 1)}


if __name__ == "__main__":
    main()
