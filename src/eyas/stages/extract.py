"""Run the mixture through the target and keep its hidden states.

Reads: data/mixture/{train,val}.parquet, models/target. Writes: data/hidden_states/manifest.json and
the shards under runtime.store. Run: python -m eyas.stages.extract.
Source: docs/extraction.md; a shard that is there and whole is kept, so a killed run goes on, and
several runs over one runtime.store, on this machine or others, share the shards out.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from eyas import parquet
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.desk.token_bar import token_bar
from eyas.desk.workers import alongside
from eyas.errors import EyasError
from eyas.files import read_json, sha256_of, write_json
from eyas.records import Sample
from eyas.settings import Extract, ExtractRuntime, Runtime
from eyas.states import shards, store
from eyas.states.capture_hf import Transformers
from eyas.states.capture_sglang import SGLang
from eyas.states.claims import claimed, work_through
from eyas.states.folder import SIDECAR, weight_files
from eyas.states.job import Job, build_manifest
from eyas.states.layout import make_layout
from eyas.states.target import aux_layers, check_layers, load_head
from eyas.states.teacher import favourites

TARGET = Path("models/target")
MIXTURE = Path("data/mixture")
MANIFEST = Path("data/hidden_states/manifest.json")
BACKENDS = ("transformers", "sglang")
CHECKED = "checked"  # in the store's folder: how far the teacher of shard 0 agreed
_CHECK_TOKENS = 1024
# Rounding flips near-ties only; a missing norm or a shifted layer gives far less.
_MIN_AGREEMENT = {"fp32": 0.97, "bf16": 0.97, "fp8": 0.9}  # SmolLM2: 0.998 and 0.968


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Extract hidden states."""
    run_stage("extract", work, config)


def work(params: Params) -> Report:
    """Plan the shards, make those that are missing, check the teacher, write the manifest."""
    runtime = params.knob("runtime", Runtime)
    job = read_job(params)
    job.folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(len(job.runs)) if not keep(job, number)]
    shards.check_space(job.folder, sum(job.size_bytes(number) for number in missing))
    started, seconds = time.monotonic(), dict[str, float]()
    if missing:
        seconds = make_shards(params, job, runtime.extract, missing)
    wall_s = time.monotonic() - started
    if not (job.folder / CHECKED).is_file():
        check_teacher(job, make_backend(job, runtime, None), 0)
    manifest = build_manifest(job, about_target(), range(len(job.runs)))
    store.write_manifest(MANIFEST, manifest)
    tokens, size = (sum(getattr(s, n) for s in manifest.shards) for n in ("tokens", "size_bytes"))
    metrics = {
        "rows_in": len(job.samples),
        "rows_out": len(manifest.samples),
        "tokens": tokens,
        "size_bytes": size,
        "bytes_per_token": round(size / tokens, 1),
        "tokens_per_s": round(sum(map(job.tokens, missing)) / wall_s, 1) if missing else 0.0,
        "shards_written": len(missing),
        "shards_reused": len(job.runs) - len(missing),
        "teacher_argmax_agreement": round(read_json(job.folder / CHECKED)["agreement"], 5),
        **{f"{n}_share": round(s / (sum(seconds.values()) or 1), 3) for n, s in seconds.items()},
    }
    summary = (
        f"{len(job.samples)} samples, {tokens:,} tokens, {size / 1e6:,.0f} MB, {len(job.runs)} "
        f"shards ({len(missing)} made now, {metrics['tokens_per_s']:,.0f} tokens/s)"
    )
    return Report(summary=summary, metrics=metrics, inputs=(MIXTURE / "train.parquet",))


def read_job(params: Params, key: str | None = None) -> Job:
    """Read settings, mixture and the target's shape, and refuse what cannot work.

    `key` is the store's, where it is known: to find it, all of the target's weights are read.
    """
    settings = params.section("extract", Extract)
    if settings.backend not in BACKENDS:
        raise EyasError(
            f"extract.backend: expected {' | '.join(BACKENDS)}, got '{settings.backend}'"
        )
    choice = settings.codec, settings.final_codec, settings.final_rows
    layout = make_layout(*choice, settings.teacher_k, settings.final_every)
    samples, splits = read_mixture()
    config = read_json(TARGET / "config.json", hint="dvc repro target")
    text = config.get("text_config", config)
    layers = settings.layers or aux_layers(text["num_hidden_layers"])
    check_layers(layers, text["num_hidden_layers"])
    check_lengths(samples, text["max_position_embeddings"])
    own = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
    key = key or shards.store_key(samples, weights_digest(), layers, settings)
    return Job(
        samples=samples,
        splits=splits,
        runs=shards.plan_shards([len(s.input_ids) for s in samples], settings.shard_tokens),
        hidden_size=text["hidden_size"],
        model_type=config["model_type"],
        dtype=settings.compute_dtype or ("float32" if settings.backend == "transformers" else own),
        layers=layers,
        layout=layout,
        settings=settings,
        folder=Path(params.knob("runtime", Runtime).store) / key,
    )


def keep(job: Job, number: int) -> bool:
    """Tell whether a shard is there and unaltered, or another worker is at it.

    An altered one no longer counts afterwards.
    """
    with claimed(job.path(number)) as mine:
        if not mine or shards.kept_shard(job.path(number)):
            return mine
        job.path(number).with_suffix(".json").unlink(missing_ok=True)
        return False


def make_shards(
    params: Params, job: Job, extract: ExtractRuntime, missing: Sequence[int]
) -> dict[str, float]:
    """Make the missing shards with as many workers as asked; return the seconds by kind of work."""
    servers = extract.servers if job.settings.backend == "sglang" else ()
    workers = [server for server in servers or (None,) for _ in range(extract.workers)]
    waiting = set(missing)
    with token_bar("extract", sum(map(job.tokens, missing))) as advance:
        if len(workers) == 1:
            return run_worker(params.tree(), job.folder.name, workers[0], advance)

        def tick() -> None:
            made = {number for number in waiting if job.is_there(number)}
            waiting.difference_update(made)
            advance(sum(map(job.tokens, made)))

        given = [(params.tree(), job.folder.name, server) for server in workers]
        spent = alongside(run_worker, given, tick)
        return {name: sum(seconds[name] for seconds in spent) for name in spent[0]}


def run_worker(
    tree: Mapping[str, Any],
    key: str,
    server: str | None,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:
    """Make shards until all are there; the first is checked before there are more."""
    params = Params(tree)
    runtime = params.knob("runtime", Runtime)
    job = read_job(params, key)
    backend = make_backend(job, runtime, server)
    made: list[int] = []

    def make(number: int) -> None:
        shards.check_space(job.folder, job.size_bytes(number))
        samples = [job.samples[row] for row in job.runs[number]]
        backend.make_shard(job.path(number), samples, advance)
        if not made:
            check_teacher(job, backend, number)
        made.append(number)

    work_through([job.path(number) for number in range(len(job.runs))], job.is_there, make)
    return backend.seconds


def make_backend(job: Job, runtime: Runtime, server: str | None) -> Transformers | SGLang:
    """Load the target, or reach the server that has it."""
    extract = runtime.extract
    if job.settings.backend == "sglang":
        if not extract.servers:
            raise EyasError(
                "runtime.extract.servers: expected addresses of SGLang servers, got none",
                hint="start them with the flags in docs/extraction.md",
            )
        url = server or extract.servers[0]
        return SGLang(url, TARGET, job, patience_s=extract.patience_s)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    torch.set_num_threads(runtime.threads or max(1, cores // extract.workers))
    return Transformers(TARGET, job)


def read_mixture() -> tuple[list[Sample], list[str]]:
    """Return the samples of both splits, training first, and the split of each."""
    samples: list[Sample] = []
    splits: list[str] = []
    for split in ("train", "val"):
        rows = list(parquet.read_samples(MIXTURE / f"{split}.parquet", hint="dvc repro merge"))
        samples += rows
        splits += [split] * len(rows)
    if not samples:
        raise EyasError(f"{MIXTURE}: no samples", hint="see the rejects under data/valid")
    if len({s.id for s in samples}) != len(samples):
        raise EyasError(f"{MIXTURE}: sample ids repeat", hint="dvc repro -f merge")
    return samples, splits


def about_target() -> dict[str, Any]:
    """Return what the stage target says of its folder."""
    return read_json(TARGET / SIDECAR, hint="dvc repro target")


def check_lengths(samples: list[Sample], limit: int) -> None:
    """Refuse samples that are empty or longer than the target's context."""
    for sample in samples:
        if not 0 < len(sample.input_ids) <= limit:
            raise EyasError(
                f"{MIXTURE}: sample {sample.id} has {len(sample.input_ids)} tokens, "
                f"expected 1 to {limit}",
                hint="lower merge.max_tokens",
            )


def weights_digest() -> str:
    """Return the identity of the target's numbers: config and weights, not its tokenizer."""
    files = [TARGET / "config.json", *weight_files(TARGET)]
    about = about_target()
    # Where the head alone lies here, the weights between are known by their revision.
    rest = about["revision"] if about["source"].get("weights") == "head" else ""
    return hashlib.sha256(("".join(map(sha256_of, files)) + rest).encode()).hexdigest()


def check_teacher(job: Job, backend: Transformers | SGLang, number: int) -> None:
    """Compare a shard's teacher, or lm_head over its states, with the target's choice, 1,000 times.

    The share that agrees is noted for shard 0: 1 if it keeps no final state at all.

    Raises: EyasError if they agree on too few: the states are not those that feed lm_head.
    """
    manifest = build_manifest(job, about_target(), [number])
    reader = store.Store(manifest, job.folder.parent)
    head_VD = load_head(TARGET, dtype=getattr(torch, job.dtype)).lm_head_VD
    agreed = seen = 0
    for sample in manifest.samples:
        states = reader.read(sample.id)  # of a long one, a prefix: its logits fill a GPU
        ids = states.input_ids[:_CHECK_TOKENS].tolist()
        top_T2K = None if states.top_T2K is None else states.top_T2K[:_CHECK_TOKENS]
        ours_T = favourites(states.final_TD[:_CHECK_TOKENS], top_T2K, head_VD)
        agreed += int((ours_T == backend.favourites(ids)).sum())
        seen += int((ours_T >= 0).sum())
        if seen >= _CHECK_TOKENS:
            break
    least = _MIN_AGREEMENT["fp32" if job.layout.teacher_k else job.settings.final_codec]
    share = agreed / seen if seen else 1.0
    if share < least:
        job.path(number).with_suffix(".json").unlink()
        raise EyasError(
            f"{job.path(number)}: stored states predict the target's own next token in "
            f"{share:.1%} of {seen} places, expected {least:.0%}",
            hint="the final norm is missing, or the target has other weights than models/target",
        )
    if number == 0:
        write_json(job.folder / CHECKED, {"agreement": share, "tokens": seen})


if __name__ == "__main__":
    main()
