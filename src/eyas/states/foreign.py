"""A store as the folder that speculators or SpecForge trains from, and theirs as a store.

    speculators  a saved data set (input_ids, loss_mask, seq_len), token_freq.pt, and
                 hidden_states/hs_ROW.safetensors: token_ids [T], hidden_states [T, L+1, D], the
                 last from BEFORE the final norm; bf16, or e4m3 with a scale a token [T, 1, 1]
    SpecForge    {train,val}/rows_N/data_N.ckpt (read: at any depth, .ckpt.gz too): input_ids,
                 loss_mask [T], aux_hidden_state [1, T, L*D], hidden_state [1, T, D] AFTER the norm

A norm forgets its input's size, so the state before it is known up to a factor: ours is as large as
the token's largest layer value, which suits a shared scale. A state shows from which side it is:
divided by the norm's weight, what was normed has mean square 1 in each row.

Source: speculators 0.9.0 train/data.py, hs_connectors 0.9.0 fp8_utils.py, SpecForge 0.2.0
data/preprocessing.py; a saved data set is Arrow streams named by a state.json. A .ckpt is a pickle:
torch's weights_only builds tensors of it and runs nothing.

Legend: T tokens, L aux layers, D hidden size.
"""

import gzip
import io
import itertools
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
from eyas.records import Sample, Span, packed
from eyas.settings import Extract
from eyas.states import shards
from eyas.states.codecs import Parts
from eyas.states.job import Job, build_manifest
from eyas.states.layout import ALL, Captured, make_layout
from eyas.states.store import SampleStates, Store, write_manifest
from eyas.states.target import TargetHead, aux_layers, check_layers

Found = dict[str, torch.Tensor]
Row = tuple[Sample, Parts]
SPECULATORS, SPECFORGE = "speculators", "specforge"
_CODECS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
_LISTS = dict.fromkeys(("input_ids", "loss_mask"), pa.list_(pa.int64()))
_FP8_MAX, _TINY = torch.finfo(torch.float8_e4m3fn).max, 1e-12
_NEAR, _MOST = 0.05, 0.9  # bf16 moves a mean square by under 1 %
_TRAIN_SHARE = 0.9  # of rows, from the first
_ARROW, _GROUP = "data-00000-of-00001.arrow", 2000  # files in a folder of SpecForge's
log = logging.getLogger("eyas")
_WHOSE = "are models/target and extract.layers those of these states?"


def to_speculators(sample: SampleStates, head: TargetHead, codec: str) -> Found:
    """Return the tensors of an hs_N.safetensors, in bf16 or fp8."""
    before_TD = sample.final_TD / head.norm_weight_D
    aux, own = (x.abs().flatten(1).amax(1).clamp(_TINY) for x in (sample.aux_TLD, before_TD))
    wide = torch.cat([sample.aux_TLD, (before_TD * (aux / own)[:, None])[:, None]], dim=1)
    if codec == "bf16":
        return {"token_ids": sample.input_ids, "hidden_states": wide.bfloat16()}
    scales = (wide.abs().amax((1, 2), keepdim=True) / _FP8_MAX).clamp(_TINY)
    values = (wide / scales).to(torch.float8_e4m3fn)
    return {"token_ids": sample.input_ids, "hidden_states": values, "hidden_states_scales": scales}


def to_specforge(sample: SampleStates) -> Found:
    """Return the dictionary of a data_N.ckpt."""
    return {
        "input_ids": sample.input_ids,
        "loss_mask": sample.mask_T.long(),
        "hidden_state": sample.final_TD.bfloat16()[None],
        "aux_hidden_state": sample.aux_TLD.flatten(1).bfloat16()[None],
    }


def from_foreign(form: str, found: Mapping[str, Any], num_layers: int, head: TargetHead) -> Parts:
    """Return a file's tensors, and its row of the data set, as a shard has them.

    Raises: EyasError if they are not a sample of that target.
    """
    check_tensors(form, found, num_layers, head)
    scales = found.get("hidden_states_scales")
    if form == SPECFORGE:
        aux_TLD = found["aux_hidden_state"][0].unflatten(1, (num_layers, -1))
        wide_TLD, final_TD = aux_TLD.float(), found["hidden_state"][0].float()
    else:
        aux_TLD, states = found["hidden_states"][:, :-1], found["hidden_states"].float()
        states = states if scales is None else states * scales
        wide_TLD, final_TD = states[:, :-1], states[:, -1]
    if not is_normed(final_TD, head):
        if form == SPECFORGE:
            raise EyasError("hidden_state: expected what the final norm made", hint=_WHOSE)
        size_T1 = (final_TD.square().mean(-1, keepdim=True) + head.norm_eps).sqrt()
        final_TD = final_TD / size_T1 * head.norm_weight_D
    layout = make_layout(_CODECS[aux_TLD.dtype], "bf16", ALL)
    captured = Captured(aux_TLD=wide_TLD, final_TD=final_TD)
    parts = dict(shards.encode_row("of this file", (), captured, layout))
    if scales is not None:  # rounded once, by whoever wrote the file
        parts["aux.values"] = aux_TLD.contiguous()
        parts["aux.scales"] = scales[:, 0].repeat(1, num_layers)
    return parts


def check_tensors(form: str, found: Mapping[str, Any], num_layers: int, head: TargetHead) -> None:
    """Refuse what is missing, of another shape or dtype, or out of range."""
    length, size = found.get("input_ids", torch.zeros(0)).numel(), len(head.norm_weight_D)
    scaled, ids = "hidden_states_scales" in found, ((length,), torch.int64)
    states = torch.float8_e4m3fn if scaled else torch.bfloat16
    expected: dict[str, Any] = {"input_ids": ids, "loss_mask": ids}
    if form == SPECFORGE:
        expected["aux_hidden_state"] = (1, length, num_layers * size), states
        expected["hidden_state"] = (1, length, size), states
    else:
        expected |= {"token_ids": ids, "hidden_states": ((length, num_layers + 1, size), states)}
        expected |= {"hidden_states_scales": ((length, 1, 1), torch.float32)} if scaled else {}
    for key, wanted in expected.items():
        got = (tuple(found[key].shape), found[key].dtype) if key in found else "nothing"
        if got != wanted:
            raise EyasError(f"{key}: expected {wanted}, got {got}", hint=_WHOSE)
    ids_T, vocab_size = found["input_ids"], len(head.embed_VD)
    if not torch.equal(found.get("token_ids", ids_T), ids_T):
        raise EyasError("token_ids: expected those of the data set's row, got others")
    if not length or not 0 <= int(ids_T.min()) <= int(ids_T.max()) < vocab_size:
        raise EyasError(f"token ids: expected 0 to {vocab_size - 1}, got others", hint=_WHOSE)
    if set(found["loss_mask"].unique().tolist()) - {0, 1}:
        raise EyasError("loss_mask: expected 0 and 1, got other values")


def is_normed(final_TD: torch.Tensor, head: TargetHead) -> bool:
    """Tell whether the target's final norm made these states."""
    mean_T = (final_TD / head.norm_weight_D).square().mean(-1)
    return bool(((mean_T - 1).abs() < _NEAR).float().mean() >= _MOST)


def spans_of(mask_T: torch.Tensor) -> tuple[Span, ...]:
    """Return the runs of ones: replies, which a header always parts."""
    edges = torch.diff(torch.nn.functional.pad(mask_T.int(), (1, 1)))
    starts, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(starts, ends, strict=True))


def export_store(store: Store, folder: Path, form: str, head: TargetHead, codec: str) -> str:
    """Write every sample as a file, those for training first; return a line for the reader.

    Raises: EyasError for a folder that is not empty, a full disk, or a store that has a fault, is
        another target's or keeps the final state of some rows only.
    """
    meta, names = store.meta, [*store.ids_of("train"), *store.ids_of("val")]
    if folder.is_dir() and any(folder.iterdir()):
        raise EyasError(f"{folder}: expected a new or empty folder")
    if codec != "bf16" and (form, codec) != (SPECULATORS, "fp8"):
        raise EyasError(f"--codec: expected bf16, or fp8 for {SPECULATORS}, got '{codec}'")
    if (meta.final_rows, meta.final_every) != (ALL, 1):
        raise EyasError(
            f"hidden-state store: expected final states of all rows, got {meta.final_rows}, "
            f"every {meta.final_every}",
            hint="extract.final_rows: all, extract.final_every: 1; the losses there also read a "
            "reply's last token",
        )
    tokens = sum(entry.length for entry in store.entries.values())
    folder.mkdir(parents=True, exist_ok=True)
    values = tokens * (len(meta.layers) + 1) * meta.hidden_size
    shards.check_space(folder, values * (1 if codec == "fp8" else 2))
    if form == SPECFORGE:
        _export_specforge(store, folder, head)
    else:
        _export_speculators(store, folder, head, codec)
    return f"{folder}: {len(names)} samples, {tokens:,} tokens for {form}"


def _read(store: Store, split: str, head: TargetHead) -> Iterator[SampleStates]:
    for name in store.ids_of(split):
        sample = store.read(name)
        if not is_normed(sample.final_TD, head):
            raise EyasError(f"sample {name}: final states: another norm made them", hint=_WHOSE)
        yield sample


def _export_specforge(store: Store, folder: Path, head: TargetHead) -> None:
    for split in ("train", "val"):
        for number, sample in enumerate(_read(store, split, head)):
            path = folder / split / f"rows_{number // _GROUP}" / f"data_{number}.ckpt"
            with replacing(path) as temporary:
                torch.save(to_specforge(sample), temporary)


def _export_speculators(store: Store, folder: Path, head: TargetHead, codec: str) -> None:
    """Write training rows first: the trainer cuts its splits by row."""
    schema, counts = pa.schema(_LISTS | {"seq_len": pa.int64()}), Counter[int]()
    samples = itertools.chain.from_iterable(_read(store, s, head) for s in ("train", "val"))
    with replacing(folder / _ARROW) as table, pa.ipc.new_stream(str(table), schema) as writer:
        for number, sample in enumerate(samples):
            with replacing(folder / "hidden_states" / f"hs_{number}.safetensors") as temporary:
                save_file(to_speculators(sample, head, codec), temporary)
            ids, mask = sample.input_ids.tolist(), sample.mask_T.int().tolist()
            row = {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}
            writer.write_batch(pa.RecordBatch.from_pylist([row], schema))
            counts.update(itertools.compress(ids, mask))
    with replacing(folder / "token_freq.pt") as temporary:
        torch.save(dict(counts), temporary)
    write_json(folder / "dataset_info.json", {})
    state = {"_data_files": [{"filename": _ARROW}], "_fingerprint": store.meta.key, "_split": None}
    state |= {"_format_type": "torch", "_format_kwargs": {}, "_format_columns": None}
    write_json(folder / "state.json", state | {"_output_all_columns": False})


def import_folder(
    form: str, folder: Path, out: Path, head: TargetHead, about: Any, settings: Extract
) -> str:
    """Make a store of a folder's files, the last tenth for validation; return a line to read.

    `about` is the target's; of `settings`, `layers` and `shard_tokens` count.

    Raises: EyasError naming a file that is not a sample of that target, or of another dtype.
    """
    if (out / "manifest.json").exists():
        raise EyasError(f"{out}: expected a folder without a store")
    config, home = head.config.get("text_config", head.config), out / ".import"
    layers = tuple(settings.layers or aux_layers(config["num_hidden_layers"]))
    check_layers(layers, config["num_hidden_layers"])
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    shards.check_space(home, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    samples, runs, codec = list[Sample](), list[range](), ""
    for run in _runs(_rows(form, folder, len(layers), head), settings.shard_tokens):
        ids, parts = [sample.input_ids for sample, _ in run], [parts for _, parts in run]
        shards.write_rows(shards.shard_path(home, len(runs)), ids, parts)
        runs.append(range(len(samples), len(samples) + len(run)))
        samples += [sample for sample, _ in run]
        codec = _CODECS[parts[0]["aux.values"].dtype]
    if not samples:
        raise EyasError(f"{folder}: expected files of {form}, got none")
    cut = int(len(samples) * _TRAIN_SHARE) or 1
    digests = "".join(map(sha256_of, sorted(home.glob("*.safetensors"))))
    made: dict[str, Any] = {name: config[name] for name in ("hidden_size", "model_type")}
    made |= {"dtype": "bfloat16", "layout": make_layout(codec, "bf16", ALL), "layers": layers}
    made["splits"] = ["train"] * cut + ["val"] * (len(samples) - cut)
    key = shards.store_key(samples, digests, layers, settings)
    job = Job(samples=samples, runs=runs, settings=settings, folder=out / key, **made)
    shutil.rmtree(job.folder, ignore_errors=True)
    home.rename(job.folder)
    write_samples(out / "train.parquet", samples[:cut])
    write_samples(out / "val.parquet", samples[cut:])
    write_manifest(out / "manifest.json", build_manifest(job, about, range(len(runs))))
    return f"{out}: {len(samples)} samples, {sum(map(job.tokens, range(len(runs)))):,} tokens"


def _rows(form: str, folder: Path, num_layers: int, head: TargetHead) -> Iterator[Row]:
    first, unknown = None, dict[str, Any](temperature=0.0, flags=(), completion_tokens_billed=None)
    for path, prepared in (_prepared if form == SPECULATORS else _checkpoints)(folder):
        try:
            found = {**_load(path), **prepared}
            parts = from_foreign(form, found, num_layers, head)
            first = first or parts["aux.values"].dtype
            if parts["aux.values"].dtype != first:
                raise EyasError(f"states: expected {first} as before, got others")
        except EyasError as error:
            raise EyasError(f"{path}: {error}") from None
        ids, spans = found["input_ids"].tolist(), spans_of(found["loss_mask"])
        name = path.relative_to(folder).as_posix()
        row = Sample(id=name, dataset=form, provider=form, input_ids=ids, spans=spans, **unknown)
        yield packed(row), parts


def _runs(rows: Iterator[Row], shard_tokens: int) -> Iterator[list[Row]]:
    """Cut rows into shards of at most so many tokens; a longer row is alone."""
    run, tokens = list[Row](), 0
    for sample, parts in rows:
        if run and tokens + len(sample.input_ids) > shard_tokens:
            yield run
            run, tokens = [], 0
        run.append((sample, parts))
        tokens += len(sample.input_ids)
    if run:
        yield run


def _prepared(folder: Path) -> Iterator[tuple[Path, Found]]:
    """Yield the file of each row of a saved data set, and the row."""
    for number, row in enumerate(_table(folder)):
        path = folder / "hidden_states" / f"hs_{number}.safetensors"
        if path.is_file():
            yield path, {key: torch.tensor(row[key]) for key in _LISTS}
        else:
            log.warning("%s: no such file; its row is left out", path)


def _table(folder: Path) -> Iterator[dict[str, list[int]]]:
    hint = "FOLDER is what prepare-data wrote, with hidden_states/ in it"
    try:
        for part in read_json(folder / "state.json", hint=hint)["_data_files"]:
            with pa.ipc.open_stream(pa.memory_map(str(folder / part["filename"]))) as stream:
                for batch in stream:
                    yield from batch.select([*_LISTS]).to_pylist()
    except (KeyError, TypeError, pa.ArrowInvalid) as error:
        raise EyasError(f"{folder}: expected a saved data set, got {error!r}", hint=hint) from None


def _checkpoints(folder: Path) -> Iterator[tuple[Path, Found]]:
    """Yield SpecForge's files in the order of their numbers."""
    paths = [path for path in folder.rglob("*.ckpt*") if path.name.endswith((".ckpt", ".ckpt.gz"))]
    parts = {path: re.split(r"(\d+)", path.as_posix()) for path in paths}
    for path in sorted(paths, key=lambda p: [int(x) if x.isdigit() else x for x in parts[p]]):
        yield path, {}


def _load(path: Path) -> Found:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        file = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path
        value = torch.load(file, weights_only=True, mmap=file is path)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        reason = str(error).partition(".")[0]
        raise EyasError(f"expected a file of tensors alone, got: {reason}") from None
    items = value.items() if isinstance(value, dict) else ()
    return {key: tensor for key, tensor in items if isinstance(tensor, torch.Tensor)}
