"""Run the mixture through the target and keep its hidden states.

Reads: data/mixture/{train,val}.parquet, models/target. Writes: data/hidden_states/manifest.json and
the shards under runtime.store. Run: python -m eyas.stages.extract.
Source: docs/contracts.md; a shard that is there and whole is kept, so a killed run goes on.
"""

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from eyas import parquet
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_json, sha256_of
from eyas.records import Sample
from eyas.settings import Extract, Runtime
from eyas.states import capture_hf, shards, store
from eyas.states.folder import SIDECAR, weight_files
from eyas.states.layout import Layout, make_layout, num_final_rows
from eyas.states.size import bytes_per_token
from eyas.states.target import aux_layers, check_layers, load_model
from eyas.status import Status

TARGET = Path("models/target")
MIXTURE = Path("data/mixture")
MANIFEST = Path("data/hidden_states/manifest.json")
_LOG_EVERY_S = 20.0
_CHECK_TOKENS = 1024
# Rounding flips near-ties only; a missing norm or a shifted layer gives far less.
_MIN_AGREEMENT = {"bf16": 0.97, "fp8": 0.9}  # SmolLM2: 0.998 and 0.968
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one run of the stage works on."""

    model: Any
    samples: list[Sample]
    splits: list[str]
    layers: tuple[int, ...]
    layout: Layout
    settings: Extract
    folder: Path  # of the shards


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Extract hidden states."""
    run_stage("extract", work, config)


def work(params: Params) -> Report:
    """Plan the shards, make those that are missing, check the teacher, write the manifest."""
    settings = params.section("extract", Extract)
    runtime = params.knob("runtime", Runtime)
    if settings.backend != "transformers":
        raise EyasError(f"extract.backend: expected transformers, got '{settings.backend}'")
    layout = make_layout(settings.codec, settings.final_codec, settings.final_rows)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    samples, splits = read_mixture()
    model = load_model(TARGET)
    config = model.config.get_text_config()
    layers = settings.layers or aux_layers(config.num_hidden_layers)
    check_layers(layers, config.num_hidden_layers)
    check_lengths(samples, config.max_position_embeddings)
    key = shards.store_key(samples, weights_digest(), layers, settings)
    folder = Path(runtime.store) / key
    job = Job(
        model=model,
        samples=samples,
        splits=splits,
        layers=layers,
        layout=layout,
        settings=settings,
        folder=folder,
    )
    return _extract(job)


def _extract(job: Job) -> Report:
    runs = shards.plan_shards([len(s.input_ids) for s in job.samples], job.settings.shard_tokens)
    kept = {n: shards.kept_shard(shards.shard_path(job.folder, n)) for n in range(len(runs))}
    missing = [n for n, shard in kept.items() if shard is None]
    tokens_missing = sum(len(job.samples[row].input_ids) for n in missing for row in runs[n])
    shards.prepare_folder(job.folder, size_of(job, [row for n in missing for row in runs[n]]))
    started = time.monotonic()
    done: list[shards.Shard] = []
    agreement = 0.0
    with _progress(tokens_missing) as advance:
        for number, run in enumerate(runs):
            done.append(kept[number] or _make_shard(job, number, run, advance))
            if number == 0:
                agreement = check_teacher(job, _manifest(job, done, runs[:1]))
    seconds = time.monotonic() - started
    manifest = _manifest(job, done, runs)
    store.write_manifest(MANIFEST, manifest)
    tokens, size = sum(s.tokens for s in done), sum(s.size_bytes for s in done)
    metrics = {
        "rows_in": len(job.samples),
        "rows_out": len(manifest.samples),
        "tokens": tokens,
        "size_bytes": size,
        "bytes_per_token": round(size / tokens, 1),
        "tokens_per_s": round(tokens_missing / seconds, 1) if missing else 0.0,
        "shards_written": len(missing),
        "shards_reused": len(runs) - len(missing),
        "teacher_argmax_agreement": round(agreement, 5),
    }
    summary = (
        f"{len(job.samples)} samples, {tokens:,} tokens, {size / 1e6:,.0f} MB, {len(runs)} shards "
        f"({len(missing)} made now, {metrics['tokens_per_s']:,.0f} tokens/s)"
    )
    return Report(summary=summary, metrics=metrics, inputs=(MIXTURE / "train.parquet",))


def size_of(job: Job, rows: list[int]) -> int:
    """Return the bytes that the states of these samples will take."""
    samples = [job.samples[row] for row in rows]
    tokens = sum(len(s.input_ids) for s in samples)
    final = sum(num_final_rows(job.layout, len(s.input_ids), s.spans) for s in samples)
    per_token = bytes_per_token(
        job.layout,
        num_layers=len(job.layers),
        hidden_size=job.model.config.get_text_config().hidden_size,
        final_share=final / max(tokens, 1),
    )
    return round(per_token * tokens)


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
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


def check_teacher(job: Job, manifest: store.Manifest) -> float:
    """Compare lm_head over stored states with the target's own choice, on about a thousand tokens.

    Returns the share that agrees; 1 if the first shard keeps no final state at all.

    Raises: EyasError if they agree on too few: the states are not those that feed lm_head.
    """
    reader = store.Store(manifest, job.folder.parent)
    agreed = seen = 0
    for sample in manifest.samples:
        states = reader.read(sample.id)
        ids = states.input_ids.tolist()
        same, of = capture_hf.argmax_agreement(job.model, ids, states.final_TD)
        agreed += same
        seen += of
        if seen >= _CHECK_TOKENS:
            break
    least = _MIN_AGREEMENT[job.settings.final_codec]
    share = agreed / seen if seen else 1.0
    if share < least:
        raise EyasError(
            f"{job.folder}: stored states predict the target's own next token in "
            f"{share:.1%} of {seen} places, expected {least:.0%}",
            hint="the final norm is missing, or the shards are of other weights: remove the folder",
        )
    return share


def _make_shard(job: Job, number: int, run: range, advance: Callable[[int], None]) -> shards.Shard:
    rows = [job.samples[row] for row in run]
    found: dict[int, capture_hf.Captured] = {}
    for group in capture_hf.batches([len(s.input_ids) for s in rows], job.settings.batch_tokens):
        ids = [rows[row].input_ids for row in group]
        found.update(zip(group, capture_hf.capture(job.model, ids, job.layers), strict=True))
        advance(sum(map(len, ids)))
    states = [found[row] for row in range(len(rows))]
    return shards.write_shard(shards.shard_path(job.folder, number), rows, states, job.layout)


def _manifest(job: Job, done: list[shards.Shard], runs: list[range]) -> store.Manifest:
    about = read_json(TARGET / SIDECAR, hint="dvc repro target")
    meta = store.StoreMeta(
        key=job.folder.name,
        target_name=about["name"],
        target_revision=about["revision"],
        template=about["codec"],
        layers=tuple(job.layers),
        layer_axis="layer outputs",
        hidden_size=job.model.config.get_text_config().hidden_size,
        codec=job.layout.aux.label,
        compute_dtype=str(job.model.dtype).removeprefix("torch."),
        final=store.POST_NORM,
        final_codec=job.layout.final.label,
        final_rows=job.layout.final_rows,
    )
    entries = []
    for number, run in enumerate(runs):
        offset = 0
        for row in run:
            sample = job.samples[row]
            entries.append(
                store.StoredSample(
                    id=sample.id,
                    split=job.splits[row],
                    shard=number,
                    offset=offset,
                    length=len(sample.input_ids),
                    spans=sample.spans,
                )
            )
            offset += len(sample.input_ids)
    return store.Manifest(meta=meta, shards=tuple(done), samples=tuple(entries))


@contextmanager
def _progress(total: int) -> Generator[Callable[[int], None], None, None]:
    """Show tokens done, rate and time left: a bar on a terminal, else a line now and then."""
    status, started = Status("extract"), time.monotonic()
    done = 0

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens
        now = time.monotonic()
        if status.due(now):
            rate = done / max(now - started, 1e-9)
            facts = {"done": done, "total": total, "unit": "tokens", "tokens_per_s": round(rate, 1)}
            status.tell("run", facts | {"eta_s": round((total - done) / rate, 1)})

    with (_bar if sys.stderr.isatty() else _lines)(total) as show:

        def advance(tokens: int) -> None:
            tell(tokens)
            show(tokens)

        yield advance


@contextmanager
def _lines(total: int) -> Generator[Callable[[int], None], None, None]:
    started = last = time.monotonic()
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done, last
        done += tokens
        now = time.monotonic()
        if now - last >= _LOG_EVERY_S:
            last, rate = now, done / (now - started)
            left_s = (total - done) / rate
            log.info("extract: %d of %d tokens, %.0f/s, %.0f s left", done, total, rate, left_s)

    yield advance


@contextmanager
def _bar(total: int) -> Generator[Callable[[int], None], None, None]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("extract"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        progress.TextColumn("{task.fields[rate]:,.0f}/s"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("extract", total=total, rate=0.0)
        started = time.monotonic()

        def advance(tokens: int) -> None:
            done = bar.tasks[task].completed + tokens
            bar.update(task, completed=done, rate=done / (time.monotonic() - started))

        yield advance


if __name__ == "__main__":
    main()
