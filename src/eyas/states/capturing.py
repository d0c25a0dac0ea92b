"""Capture a mixture's states shard by shard: what the stages extract and train have in common.

Reads: data/mixture/{train,val}.parquet, models/target. Writes: shards under runtime.store.
Source: docs/extraction.md; claims.py shares the shards out among workers.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas import parquet
from eyas.errors import EyasError
from eyas.files import read_json, sha256_of, write_json
from eyas.records import Sample
from eyas.settings import Extract, Runtime
from eyas.states import shards, store
from eyas.states.capture_hf import Transformers
from eyas.states.capture_sglang import SGLang
from eyas.states.claims import claimed, work_through
from eyas.states.folder import SIDECAR, weight_files
from eyas.states.job import Job, build_manifest, plan_windows
from eyas.states.layout import make_layout
from eyas.states.target import aux_layers, check_layers, load_head
from eyas.states.teacher import favourites

TARGET = Path("models/target")
MIXTURE = Path("data/mixture")
BACKENDS = ("transformers", "sglang")
CHECKED = "checked"  # in the store's folder: how far the teacher of shard 0 agreed
_CHECK_TOKENS = 1024
# Rounding flips near-ties only; a missing norm or a shifted layer gives far less.
_MIN_AGREEMENT = {"fp32": 0.97, "bf16": 0.97, "fp8": 0.9}  # SmolLM2: 0.998 and 0.968


def read_job(settings: Extract, store_folder: Path, key: str | None = None) -> Job:
    """Read mixture and the target's shape, and refuse what cannot work.

    `key` is the store's, where it is known: to find it, all of the target's weights are read.
    """
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
    lengths = [len(s.input_ids) for s in samples]
    end = len(samples) if settings.window_gb is None else splits.count("train")
    kept = shards.plan_shards(lengths[end:], settings.shard_tokens)
    job = Job(
        samples=samples,
        splits=splits,
        runs=shards.plan_shards(lengths[:end], settings.shard_tokens)
        + [range(run.start + end, run.stop + end) for run in kept],
        hidden_size=text["hidden_size"],
        model_type=config["model_type"],
        dtype=settings.compute_dtype or ("float32" if settings.backend == "transformers" else own),
        layers=layers,
        layout=layout,
        settings=settings,
        folder=store_folder / key,
    )
    return job if settings.window_gb is None else replace(job, windows=plan_windows(job))


def keep(job: Job, number: int) -> bool:
    """Tell whether a shard is there and unaltered, or another worker is at it.

    An altered one no longer counts afterwards.
    """
    with claimed(job.path(number)) as mine:
        if not mine or shards.kept_shard(job.path(number)):
            return mine
        job.path(number).with_suffix(".json").unlink(missing_ok=True)
        return False


def run_worker(
    settings: Extract,
    runtime: Runtime,
    key: str,
    numbers: Sequence[int],
    server: str | None,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:
    """Make shards until all of these are there; the first is checked before there are more.

    Returns the seconds by kind of work.
    """
    job = read_job(settings, Path(runtime.store), key)
    backend = make_backend(job, runtime, server)
    made: list[int] = []

    def make(place: int) -> None:
        number = numbers[place]
        shards.check_space(job.folder, job.size_bytes(number))
        samples = [job.samples[row] for row in job.runs[number]]
        backend.make_shard(job.path(number), samples, advance)
        if not made:
            check_teacher(job, backend, number)
        made.append(number)

    paths = [job.path(number) for number in numbers]
    work_through(paths, lambda place: job.is_there(numbers[place]), make)
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
