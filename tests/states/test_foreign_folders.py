"""Folders of other trainers: written, read back, built by hand, and what is refused."""

import dataclasses
import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.parquet import read_samples
from eyas.records import Sample
from eyas.settings import Extract
from eyas.states import shards
from eyas.states.foreign import export_store, import_folder
from eyas.states.job import Job, build_manifest
from eyas.states.layout import Captured, make_layout
from eyas.states.store import SampleStates, Store, open_store, verify
from eyas.states.target import TargetHead

LENGTHS, L, D, V = (9, 12, 30, 11), 3, 16, 50
ABOUT = {"name": "tiny", "revision": "r", "codec": "chatml"}
SETTINGS = Extract(
    backend="transformers", layers=(1, 3, 4), codec="bf16", shard_tokens=24, batch_tokens=64
)


def make_head() -> TargetHead:
    generator = torch.Generator().manual_seed(3)
    embed_VD = torch.randn(V, D, generator=generator)
    return TargetHead(
        embed_VD=embed_VD,
        norm_weight_D=torch.rand(D, generator=generator) + 0.5,
        lm_head_VD=embed_VD,
        norm_eps=1e-5,
        config={"hidden_size": D, "num_hidden_layers": 8, "model_type": "llama"},
    )


HEAD = make_head()


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + HEAD.norm_eps).rsqrt() * HEAD.norm_weight_D


def captured(length: int) -> Captured:
    generator = torch.Generator().manual_seed(length)
    sizes = torch.tensor([0.1, 1.0, 30.0])[:, None]
    return Captured(
        aux_TLD=(torch.randn(length, L, D, generator=generator) * sizes).bfloat16(),
        final_TD=normed(torch.randn(length, D, generator=generator) * 7).bfloat16(),
    )


def make_store(folder: Path, rows: str = "all", codec: str = "bf16") -> Store:
    samples = [
        Sample(
            id=f"s{length}",
            dataset="chat",
            input_ids=[(7 * i + length) % V for i in range(length)],
            spans=((2, 5), (6, length)),
            temperature=0.7,
            provider="local",
            flags=(),
            completion_tokens_billed=None,
        )
        for length in LENGTHS
    ]
    job = Job(
        samples=samples,
        splits=["train", "val", "train", "train"],
        runs=shards.plan_shards(LENGTHS, 24),
        hidden_size=D,
        model_type="llama",
        dtype="bfloat16",
        layers=(1, 3, 4),
        layout=make_layout(codec, "fp8" if codec == "int4" else "bf16", rows),
        settings=SETTINGS,
        folder=folder / "key",
    )
    job.folder.mkdir(parents=True)
    for number, run in enumerate(job.runs):
        states = [captured(LENGTHS[row]) for row in run]
        shards.write_shard(job.path(number), [samples[row] for row in run], states, job.layout)
    return Store(build_manifest(job, ABOUT, range(len(job.runs))), folder)


ORDER = ("s9", "s30", "s11", "s12")  # training first


def take(form: str, folder: Path, out: Path) -> Store:
    import_folder(form, folder, out, HEAD, ABOUT, SETTINGS)
    assert verify(out / "manifest.json", out) == []
    return open_store(out / "manifest.json", out)


def pairs(ours: Store, theirs: Store) -> list[tuple[SampleStates, SampleStates]]:
    assert len(theirs.samples) == len(ORDER)
    found = [(ours.read(a), theirs.read(b)) for a, b in zip(ORDER, theirs.samples, strict=True)]
    for a, b in found:
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.mask_T, b.mask_T)
    return found


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def test_through_specforge_everything_comes_back_exactly(tmp_path: Path) -> None:
    ours = make_store(tmp_path / "ours")
    line = export_store(ours, tmp_path / "there", "specforge", HEAD, "bf16")
    assert line.endswith("there: 4 samples, 62 tokens for specforge")
    names = sorted(p.relative_to(tmp_path / "there") for p in (tmp_path / "there").rglob("*.ckpt"))
    assert list(map(str, names)) == [
        *(f"train/rows_0/data_{n}.ckpt" for n in range(3)),
        "val/rows_0/data_0.ckpt",
    ]
    theirs = take("specforge", tmp_path / "there", tmp_path / "back")
    for a, b in pairs(ours, theirs):
        assert torch.equal(a.aux_TLD, b.aux_TLD)
        assert torch.equal(a.final_TD, b.final_TD)
    assert len(theirs.ids_of("train")) == 3
    assert theirs.meta.layers == (1, 3, 4)
    assert (theirs.meta.codec, theirs.meta.target_name) == ("bf16", "tiny")


@pytest.mark.parametrize(
    ("codec", "label", "bound"), [("bf16", "bf16", 2**-8), ("fp8", "fp8/1", 0.05)]
)
def test_through_speculators_states_come_back_within_the_rounding(
    tmp_path: Path, codec: str, label: str, bound: float
) -> None:
    ours = make_store(tmp_path / "ours")
    export_store(ours, tmp_path / "there", "speculators", HEAD, codec)
    theirs = take("speculators", tmp_path / "there", tmp_path / "back")
    for a, b in pairs(ours, theirs):
        if codec == "bf16":
            assert torch.equal(a.aux_TLD, b.aux_TLD)
        assert error_of(b.aux_TLD[:, 2], a.aux_TLD[:, 2]) < bound  # one scale: the largest layer's
        assert error_of(b.final_TD, a.final_TD) < bound
    assert theirs.meta.codec == label
    assert theirs.meta.final_codec == "bf16"


@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_a_store_in_fewer_bits_is_exported_as_it_is_read(tmp_path: Path, form: str) -> None:
    ours = make_store(tmp_path / "ours", codec="int4")
    export_store(ours, tmp_path / "there", form, HEAD, "bf16")
    for a, b in pairs(ours, take(form, tmp_path / "there", tmp_path / "back")):
        assert torch.equal(a.aux_TLD.bfloat16().float(), b.aux_TLD)
        # e4m3 moved a row's length by its own rounding; their norm puts it back
        assert error_of(b.final_TD, a.final_TD) < 2**-5


def test_an_import_has_the_samples_that_training_reads(tmp_path: Path) -> None:
    export_store(make_store(tmp_path / "ours"), tmp_path / "there", "specforge", HEAD, "bf16")
    theirs = take("specforge", tmp_path / "there", tmp_path / "back")
    for split in ("train", "val"):
        rows = list(read_samples(tmp_path / "back" / f"{split}.parquet"))
        assert tuple(row.id for row in rows) == theirs.ids_of(split)
        assert len(rows) == (3 if split == "train" else 1)
        for row in rows:
            assert theirs.entries[row.id].spans == row.spans
            assert list(row.input_ids) == theirs.read(row.id).input_ids.tolist()


def test_equal_files_give_an_equal_store_and_an_old_one_is_not_overwritten(tmp_path: Path) -> None:
    export_store(make_store(tmp_path / "ours"), tmp_path / "there", "specforge", HEAD, "bf16")
    stores = [take("specforge", tmp_path / "there", tmp_path / name) for name in "ab"]
    assert stores[0].meta.key == stores[1].meta.key
    assert (tmp_path / "a/manifest.json").read_bytes() == (
        tmp_path / "b/manifest.json"
    ).read_bytes()
    with pytest.raises(EyasError, match="without a store"):
        take("specforge", tmp_path / "there", tmp_path / "a")


def by_hand(folder: Path, lengths: tuple[int, ...] = LENGTHS, *, batches: int = 2) -> list[Any]:
    """Write what speculators has on disk, without our exporter: several files, several batches."""
    torch.manual_seed(0)
    rows = []
    for number, length in enumerate(lengths):
        states, before = captured(length), torch.randn(length, D) * 5
        ids, mask = torch.randint(0, V, (length,)), torch.zeros(length, dtype=torch.int64)
        mask[3:] = 1
        wide = torch.cat([states.aux_TLD, before[:, None].bfloat16()], dim=1)
        path = folder / "hidden_states" / f"hs_{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"token_ids": ids, "hidden_states": wide}, path)
        rows.append((ids, mask, wide))
    columns = ("input_ids", "loss_mask", "seq_len")
    table = pa.table(
        [[r[0].tolist() for r in rows], [r[1].tolist() for r in rows], [len(r[0]) for r in rows]],
        names=columns,
    )
    names = [f"data-0000{n}-of-0000{batches}.arrow" for n in range(batches)]
    cut = len(rows) // batches
    for n, name in enumerate(names):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table.slice(n * cut, cut), max_chunksize=1)
    write_json(folder / "state.json", {"_data_files": [{"filename": name} for name in names]})
    return rows


def test_files_of_speculators_built_by_hand_are_read_and_normed(tmp_path: Path) -> None:
    rows = by_hand(tmp_path / "there")
    theirs = take("speculators", tmp_path / "there", tmp_path / "out")
    for (ids, mask, wide), name in zip(rows, theirs.samples, strict=True):
        got = theirs.read(name)
        assert torch.equal(got.input_ids, ids)
        assert torch.equal(got.mask_T, mask.bool())
        assert torch.equal(got.aux_TLD, wide[:, :3].float())
        assert torch.equal(got.final_TD, normed(wide[:, 3].float()).bfloat16().float())
    assert theirs.samples[0] == "hidden_states/hs_0.safetensors"


def test_a_row_without_its_file_is_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = by_hand(tmp_path / "there")
    (tmp_path / "there/hidden_states/hs_1.safetensors").unlink()
    theirs = take("speculators", tmp_path / "there", tmp_path / "out")
    assert [theirs.entries[name].length for name in theirs.samples] == [9, 30, 11]
    assert torch.equal(theirs.read(theirs.samples[1]).input_ids, rows[2][0])
    assert "hs_1.safetensors: no such file" in caplog.text


def checkpoint(length: int) -> dict[str, torch.Tensor]:
    states = captured(length)
    return {
        "input_ids": torch.arange(length),
        "loss_mask": torch.ones(length, dtype=torch.int64),
        "hidden_state": states.final_TD[None],
        "aux_hidden_state": states.aux_TLD.flatten(1)[None],
    }


def test_files_of_specforge_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number, length in ((2, 9), (10, 12), (2001, 30)):
        start = number // 2000 * 2000
        path = tmp_path / f"there/rows_{start}-{start + 2000}/data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint(length), path)
    packed = io.BytesIO()
    torch.save(checkpoint(11), packed)
    (tmp_path / "there/rows_0-2000/data_11.ckpt.gz").write_bytes(gzip.compress(packed.getvalue()))
    theirs = take("specforge", tmp_path / "there", tmp_path / "out")
    assert [theirs.entries[name].length for name in theirs.samples] == [9, 12, 11, 30]
    got, wanted = theirs.read(theirs.samples[2]), captured(11)
    assert torch.equal(got.aux_TLD, wanted.aux_TLD.float())
    assert torch.equal(got.final_TD, wanted.final_TD.float())
    assert got.mask_T.all()


class Trap:
    """Its pickle calls a function when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    sprung = tmp_path / "sprung"
    torch.save(checkpoint(9) | {"more": Trap(sprung)}, tmp_path / "there/data_0.ckpt")
    with pytest.raises(EyasError, match=r"data_0.ckpt: expected a file of tensors alone"):
        take("specforge", tmp_path / "there", tmp_path / "out")
    assert not sprung.exists()
    (tmp_path / "there/data_0.ckpt").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(EyasError, match=r"data_0.ckpt: expected"):
        take("specforge", tmp_path / "there", tmp_path / "out")
    assert not sprung.exists()


@pytest.mark.parametrize("content", [b"", b"half a file", "list"])
def test_a_file_that_holds_no_tensors_by_name_is_named(
    tmp_path: Path, content: bytes | str
) -> None:
    path = tmp_path / "there/data_0.ckpt"
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save([torch.zeros(2), torch.zeros(3)], path)
    with pytest.raises(EyasError, match=r"data_0.ckpt: (expected a file|.* got nothing)"):
        take("specforge", tmp_path / "there", tmp_path / "out")


def test_a_torn_file_of_speculators_is_named(tmp_path: Path) -> None:
    by_hand(tmp_path / "there")
    path = tmp_path / "there/hidden_states/hs_2.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(EyasError, match=r"hs_2.safetensors: expected a file of tensors"):
        take("speculators", tmp_path / "there", tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()
    path.unlink()
    assert len(take("speculators", tmp_path / "there", tmp_path / "out").samples) == 3
    assert not (tmp_path / "out/.import").exists()


@pytest.mark.parametrize("fault", ["torn", "column", "state"])
def test_a_data_set_that_is_none_is_named(tmp_path: Path, fault: str) -> None:
    there = tmp_path / "there"
    by_hand(there, batches=1)
    table = there / "data-00000-of-00001.arrow"
    if fault == "torn":
        table.write_bytes(b"no Arrow stream")
    elif fault == "column":
        rows = pa.table({"input_ids": [[1, 2]]})
        with pa.ipc.new_stream(str(table), rows.schema) as writer:
            writer.write_table(rows)
    else:
        write_json(there / "state.json", {"_split": None})
    with pytest.raises(EyasError, match="there: expected a saved data set"):
        take("speculators", there, tmp_path / "out")


def test_files_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    by_hand(tmp_path / "there")
    path = tmp_path / "there/hidden_states/hs_3.safetensors"
    parts = load_file(path)
    states = parts["hidden_states"].to(torch.float8_e4m3fn)
    scales = torch.ones(len(states), 1, 1)
    save_file(parts | {"hidden_states": states, "hidden_states_scales": scales}, path)
    with pytest.raises(EyasError, match=r"hs_3.safetensors: states: expected torch.bfloat16 as"):
        take("speculators", tmp_path / "there", tmp_path / "out")


def test_states_of_another_size_are_refused_by_file(tmp_path: Path) -> None:
    by_hand(tmp_path / "there")
    wide = dataclasses.replace(HEAD, norm_weight_D=torch.ones(D + 4))
    with pytest.raises(
        EyasError, match=r"hs_0.safetensors: hidden_states: expected \(\(9, 4, 20\)"
    ):
        import_folder("speculators", tmp_path / "there", tmp_path / "out", wide, ABOUT, SETTINGS)


@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_a_folder_without_files_is_named(tmp_path: Path, form: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(EyasError, match=r"there.*(no such file|expected files of)"):
        take(form, tmp_path / "there", tmp_path / "out")


def test_an_export_is_refused_that_could_not_be_trained_on(tmp_path: Path) -> None:
    ours, there = make_store(tmp_path / "ours"), tmp_path / "there"
    with pytest.raises(EyasError, match="expected bf16, or fp8 for speculators, got 'fp8'"):
        export_store(ours, there, "specforge", HEAD, "fp8")
    supervised = make_store(tmp_path / "less", "supervised")
    with pytest.raises(EyasError, match="all rows, got supervised"):
        export_store(supervised, there, "speculators", HEAD, "bf16")
    other = dataclasses.replace(HEAD, norm_weight_D=HEAD.norm_weight_D * 1.5)
    with pytest.raises(EyasError, match="sample s9: final states: another norm"):
        export_store(ours, tmp_path / "other", "specforge", other, "bf16")
    (there).mkdir(exist_ok=True)
    (there / "old").touch()
    with pytest.raises(EyasError, match="new or empty folder"):
        export_store(ours, there, "speculators", HEAD, "bf16")


def test_the_set_beside_the_states_counts_replies_and_names_its_table(tmp_path: Path) -> None:
    ours, there = make_store(tmp_path / "ours"), tmp_path / "there"
    export_store(ours, there, "speculators", HEAD, "bf16")
    counts = torch.load(there / "token_freq.pt", weights_only=True)
    replies = [ours.read(name) for name in ours.samples]
    assert sum(counts.values()) == sum(int(row.mask_T.sum()) for row in replies)
    one = int(replies[0].input_ids[3])
    assert counts[one] == sum(int((r.input_ids[r.mask_T] == one).sum()) for r in replies)
    [file] = read_json(there / "state.json")["_data_files"]
    table = pa.ipc.open_stream(str(there / file["filename"])).read_all()
    assert table["seq_len"].to_pylist() == [9, 30, 11, 12]
