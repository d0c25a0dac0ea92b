"""Write a store as the folder that speculators or SpecForge trains from; read theirs as a store.

    speculators  FOLDER: a saved data set (input_ids, loss_mask, seq_len), token_freq.pt, and
                 hidden_states/hs_ROW.safetensors
    SpecForge    FOLDER/{train,val}/rows_A-B/data_N.ckpt; read from any depth, .ckpt.gz too

Writes: FOLDER; or OUT/manifest.json, OUT/KEY (shards) and OUT/{train,val}.parquet (the samples).
Source: states/foreign.py says what is in a file; a saved data set is Arrow streams that state.json
names (https://huggingface.co/docs/datasets). A .ckpt is a pickle: torch's weights_only builds
tensors of it and runs nothing.
"""

import gzip
import io
import logging
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.files import read_json, replacing, sha256_of, write_json
from eyas.parquet import write_samples
from eyas.records import Sample, packed
from eyas.settings import Extract
from eyas.states import foreign, shards
from eyas.states.codecs import Parts
from eyas.states.job import Job, build_manifest
from eyas.states.layout import ALL
from eyas.states.store import Store, write_manifest
from eyas.states.target import TargetHead, aux_layers, check_layers

SPECULATORS, SPECFORGE = "speculators", "specforge"
_CODECS = {SPECULATORS: ("bf16", "fp8"), SPECFORGE: ("bf16",)}
_ARROW, _GROUP = "data-00000-of-00001.arrow", 2000  # files in a folder of SpecForge's
_SCHEMA = [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64()))]
Row = tuple[Sample, Parts]
log = logging.getLogger("eyas")


def export_store(store: Store, folder: Path, form: str, head: TargetHead, codec: str) -> str:
    """Write every sample as a file, those for training first; return a line for the reader.

    Raises: EyasError for a folder that is not empty, a full disk, or a store that has a fault, is
        another target's or keeps the final state of some rows only.
    """
    tokens = sum(entry.length for entry in store.entries.values())
    if codec not in _CODECS[form]:
        raise EyasError(f"--codec: expected {' | '.join(_CODECS[form])} for {form}, got '{codec}'")
    if folder.is_dir() and any(folder.iterdir()):
        raise EyasError(f"{folder}: expected a new or empty folder")
    if store.meta.final_rows != ALL:
        raise EyasError(
            f"hidden-state store: expected final states of all rows, got {store.meta.final_rows}: "
            f"the loss of {form} also reads that of a reply's last token",
            hint="extract.final_rows: all",
        )
    folder.mkdir(parents=True, exist_ok=True)
    values = tokens * (len(store.meta.layers) + 1) * store.meta.hidden_size
    shards.check_space(folder, values * (1 if codec == "fp8" else 2))
    if form == SPECFORGE:
        _export_specforge(store, folder, head)
    else:
        _export_speculators(store, folder, head, codec)
    return f"{folder}: {len(store.samples)} samples, {tokens:,} tokens for {form}"


def _export_specforge(store: Store, folder: Path, head: TargetHead) -> None:
    for split in ("train", "val"):
        for number, name in enumerate(store.ids_of(split)):
            start, sample = number // _GROUP * _GROUP, store.read(name)
            foreign.check_normed(sample.final_TD, head)
            path = folder / split / f"rows_{start}-{start + _GROUP}" / f"data_{number}.ckpt"
            with replacing(path) as temporary:
                torch.save(foreign.to_specforge(sample), temporary)


def _export_speculators(store: Store, folder: Path, head: TargetHead, codec: str) -> None:
    schema, counts = pa.schema([*_SCHEMA, ("seq_len", pa.int64())]), Counter[int]()
    names = [*store.ids_of("train"), *store.ids_of("val")]  # the trainer cuts its splits by row
    with replacing(folder / _ARROW) as table, pa.ipc.new_stream(str(table), schema) as writer:
        for number, name in enumerate(names):
            sample = store.read(name)
            foreign.check_normed(sample.final_TD, head)
            with replacing(folder / "hidden_states" / f"hs_{number}.safetensors") as temporary:
                save_file(foreign.to_speculators(sample, head, codec), temporary)
            ids, mask = sample.input_ids.tolist(), sample.mask_T.int().tolist()
            row = {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}
            writer.write_batch(pa.RecordBatch.from_pylist([row], schema))
            counts.update(sample.input_ids[sample.mask_T].tolist())
    with replacing(folder / "token_freq.pt") as temporary:
        torch.save(dict(counts), temporary)
    write_json(folder / "dataset_info.json", {})
    state = {"_data_files": [{"filename": _ARROW}], "_fingerprint": store.meta.key, "_split": None}
    state |= {"_format_type": "torch", "_format_kwargs": {}, "_format_columns": None}
    write_json(folder / "state.json", state | {"_output_all_columns": False})


def import_folder(
    form: str,
    folder: Path,
    out: Path,
    head: TargetHead,
    about: Mapping[str, Any],
    settings: Extract,
    train_ratio: float,
) -> str:
    """Make a store of a folder's files; return a line for the reader.

    `about` is of the target; of `settings`, layers and shard_tokens count. The first rows,
    `train_ratio` of them, are for training.

    Raises: EyasError naming a file that is not what target and layers lead to expect.
    """
    if (out / "manifest.json").exists():
        raise EyasError(f"{out}: expected a folder without a store")
    config, home = head.config.get("text_config", head.config), out / ".import"
    layers = settings.layers or aux_layers(config["num_hidden_layers"])
    check_layers(layers, config["num_hidden_layers"])
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    shards.check_space(home, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    samples, runs, codec = list[Sample](), list[range](), "bf16"
    for group in _groups(_encoded(form, folder, head, len(layers)), settings.shard_tokens):
        ids, parts = [row.input_ids for row, _ in group], [parts for _, parts in group]
        codec = foreign.CODECS[parts[0]["aux.values"].dtype]
        shards.write_rows(shards.shard_path(home, len(runs)), ids, parts)
        runs.append(range(len(samples), len(samples) + len(group)))
        samples += [row for row, _ in group]
    if not samples:
        raise EyasError(f"{folder}: expected files of {form}, got none")
    made_of = "".join(map(sha256_of, sorted(home.glob("*.safetensors"))))
    layout, cut = foreign.layout_of(codec), int(len(samples) * train_ratio)
    job = Job(
        samples=samples,
        splits=["train"] * cut + ["val"] * (len(samples) - cut),
        runs=runs,
        hidden_size=config["hidden_size"],
        model_type=config["model_type"],
        dtype="float32" if codec == "fp32" else "bfloat16",
        layers=tuple(layers),
        layout=layout,
        settings=settings,
        folder=out / shards.store_key(samples, made_of, layers, settings),
    )
    shutil.rmtree(job.folder, ignore_errors=True)
    home.rename(job.folder)
    write_samples(out / "train.parquet", samples[:cut])
    write_samples(out / "val.parquet", samples[cut:])
    write_manifest(out / "manifest.json", build_manifest(job, about, range(len(runs))))
    tokens = sum(len(sample.input_ids) for sample in samples)
    return f"{out}: {len(samples)} samples, {tokens:,} tokens of {form}"


def _encoded(form: str, folder: Path, head: TargetHead, num_layers: int) -> Iterator[Row]:
    """Yield each file as a sample and what a shard has of it; all are of one dtype."""
    first = None
    for path, found in (_prepared if form == SPECULATORS else _checkpoints)(folder):
        name = path.relative_to(folder).as_posix()
        try:
            convert = foreign.from_specforge if form == SPECFORGE else foreign.from_speculators
            row = convert({**_load(path), **found}, num_layers, len(head.norm_weight_D))
            foreign.check_values(row, len(head.embed_VD))
            first = first or row.aux_TLD.dtype
            if row.aux_TLD.dtype != first:
                raise EyasError(f"states: expected {first} as before, got {row.aux_TLD.dtype}")
            parts = foreign.encode_foreign(name, row, head, normed=form == SPECFORGE)
        except EyasError as error:
            raise EyasError(f"{path}: {error}") from None
        sample = Sample(
            id=name,
            dataset=form,
            input_ids=row.input_ids_T.tolist(),
            spans=foreign.spans_of(row.mask_T),
            temperature=0.0,
            provider=form,
            flags=(),
            completion_tokens_billed=None,
        )
        yield packed(sample), parts


def _groups(rows: Iterator[Row], shard_tokens: int) -> Iterator[list[Row]]:
    """Cut rows into runs of at most so many tokens; a longer one is alone."""
    group, tokens = list[Row](), 0
    for row in rows:
        if group and tokens + len(row[0].input_ids) > shard_tokens:
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += len(row[0].input_ids)
    if group:
        yield group


def _prepared(folder: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Yield the file of each row of a saved data set, and the row."""
    number, hint = 0, "FOLDER is what prepare-data wrote, with hidden_states/ in it"
    for part in read_json(folder / "state.json", hint=hint)["_data_files"]:
        with pa.ipc.open_stream(pa.memory_map(str(folder / part["filename"]))) as stream:
            for row in (row for batch in stream for row in batch.to_pylist()):
                path = folder / "hidden_states" / f"hs_{number}.safetensors"
                number += 1
                if path.is_file():
                    yield path, {k: torch.tensor(row[k]) for k in ("input_ids", "loss_mask")}
                else:
                    log.warning("%s: no such file; its row is left out", path)


def _checkpoints(folder: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Yield SpecForge's files in the order of their numbers."""

    def by_number(path: Path) -> list[str | int]:
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.as_posix())]

    for path in sorted([*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")], key=by_number):
        yield path, {}


def _load(path: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors; EyasError if it is torn, or would build more than tensors."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".gz":
            return dict(
                torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=True)
            )
        return dict(torch.load(path, weights_only=True, mmap=True))
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise EyasError(f"expected a file of tensors alone, got: {reason}") from None
    except (TypeError, ValueError):
        raise EyasError("expected a dictionary") from None
