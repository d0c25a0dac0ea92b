import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.records import Sample
from eyas.states import shards
from eyas.states.layout import (
    Captured,
    Layout,
    final_positions,
    make_layout,
    num_final_rows,
    teacher_positions,
)
from eyas.states.size import bytes_per_token
from eyas.states.store import (
    Manifest,
    StoredSample,
    StoreMeta,
    open_store,
    read_manifest,
    verify,
    write_manifest,
)
from eyas.states.teacher import top_tokens

LENGTHS = (3, 5, 4, 7)


def sample(number: int, length: int) -> Sample:
    return Sample(
        id=f"s{number}",
        dataset="chat",
        input_ids=tuple(range(number, number + length)),
        spans=((1, length),),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=length - 1,
    )


SAMPLES = [sample(n, length) for n, length in enumerate(LENGTHS)]


def states(number: int) -> Captured:
    generator = torch.Generator().manual_seed(number)
    aux_TLD = torch.randn(LENGTHS[number], 3, 6, generator=generator)
    return Captured(aux_TLD=aux_TLD, final_TD=aux_TLD[:, 0] * 2)


LAYOUTS = {
    "default": make_layout("bf16", "bf16", "all"),
    "bf16 supervised": make_layout("bf16", "bf16", "supervised"),
    "fp8": make_layout("fp8", "fp8", "supervised"),
    "int4": make_layout("int4", "fp8", "supervised"),
    "int4, all": make_layout("int4", "bf16", "all"),
    "teacher": make_layout("fp8", "bf16", "supervised", 4, 2),
    "teacher, all": make_layout("bf16", "fp8", "all", 9),
}
HEAD_VD = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))


def write_store(folder: Path, layout: Layout) -> tuple[Path, Path]:
    """Write a store of three shards; return its manifest and the folder of stores."""
    home = folder / "key"
    home.mkdir(parents=True)
    done, entries = [], []
    for number, run in enumerate(shards.plan_shards(LENGTHS, 8)):
        rows, captured = [SAMPLES[row] for row in run], [states(row) for row in run]
        path = shards.shard_path(home, number)
        done.append(shards.write_shard(path, rows, captured, layout, HEAD_VD))
        offset = 0
        for row in run:
            entries.append(
                StoredSample(
                    id=SAMPLES[row].id,
                    split="val" if row == 3 else "train",
                    shard=number,
                    offset=offset,
                    length=LENGTHS[row],
                    spans=SAMPLES[row].spans,
                )
            )
            offset += LENGTHS[row]
    meta = StoreMeta(
        key="key",
        target_name="tiny",
        target_revision="r",
        template="chatml",
        layers=(1, 3, 4),
        layer_axis="layer outputs",
        hidden_size=6,
        codec=layout.aux.label,
        compute_dtype="float32",
        final="post_norm",
        final_codec=layout.final.label,
        final_rows=layout.final_rows,
        teacher_k=layout.teacher_k,
        final_every=layout.final_every,
    )
    manifest = folder / "manifest.json"
    write_manifest(manifest, Manifest(meta=meta, shards=tuple(done), samples=tuple(entries)))
    return manifest, folder


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """Write the default store."""
    return write_store(tmp_path, LAYOUTS["default"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_sample_comes_back_as_its_codec_alone_would_give_it(
    name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    made = write_store(tmp_path, layout)
    assert verify(*made) == []
    store = open_store(*made)
    for number, sample_id in enumerate(store.samples):
        got, put = store.read(sample_id), states(number)
        aux_TLD = layout.aux.decode(layout.aux.encode(put.aux_TLD), 6)
        assert torch.equal(got.aux_TLD, aux_TLD)
        kept = final_positions(layout, LENGTHS[number], SAMPLES[number].spans)
        final_RD = layout.final.decode(layout.final.encode(put.final_TD[kept]), 6)
        assert torch.equal(got.final_TD[kept], final_RD)
        assert int(got.final_TD.isnan().all(1).sum()) == LENGTHS[number] - len(kept)
        assert got.final_TD.dtype == got.aux_TLD.dtype == torch.float32
        if layout.teacher_k is None:
            assert got.top_T2K is None
            continue
        taught = teacher_positions(layout, SAMPLES[number].spans)
        assert got.top_T2K is not None
        top_R2K = top_tokens(put.final_TD[taught], HEAD_VD, layout.teacher_k)
        assert torch.equal(got.top_T2K[taught], top_R2K)
        others = torch.ones(LENGTHS[number], dtype=torch.bool).index_fill(0, taught, False)
        assert got.top_T2K[others].isnan().all()


def test_a_default_store_has_the_bytes_of_the_first_release(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = {
        "input_ids": torch.tensor([3, 4, 5, 6], dtype=torch.int32) - 1,
        "aux.values": states(2).aux_TLD.bfloat16(),
        "final.values": states(2).final_TD.bfloat16(),
    }
    save_file(tensors, tmp_path / "plain.safetensors")
    assert (made[1] / "key/shard-00001.safetensors").read_bytes() == (
        tmp_path / "plain.safetensors"
    ).read_bytes()
    meta = read_json(made[0])["meta"]
    assert "final_codec" not in meta
    assert "final_rows" not in meta


def test_the_manifest_names_codecs_versions_and_rows(tmp_path: Path) -> None:
    meta = read_json(write_store(tmp_path, LAYOUTS["int4"])[0])["meta"]
    assert (meta["codec"], meta["final_codec"]) == ("int4/1", "fp8/1")
    assert meta["final_rows"] == "supervised"


@pytest.mark.parametrize("label", ["fp8/2", "zip/1"])
def test_another_codec_or_version_is_refused_by_reader_and_verify(
    label: str, tmp_path: Path
) -> None:
    made = write_store(tmp_path, LAYOUTS["fp8"])
    text = made[0].read_text(encoding="utf-8")
    made[0].write_text(text.replace('"codec": "fp8/1"', f'"codec": "{label}"'), encoding="utf-8")
    with pytest.raises(
        EyasError, match=rf"expected fp32 \| bf16 \| fp8/1 \| int4/1, got '{label}'"
    ):
        open_store(*made)
    assert f"got '{label}'" in verify(*made)[0]


def test_rows_of_a_kind_that_this_release_does_not_know_are_refused(tmp_path: Path) -> None:
    made = write_store(tmp_path, LAYOUTS["fp8"])
    text = made[0].read_text(encoding="utf-8")
    made[0].write_text(text.replace('"supervised"', '"few"'), encoding="utf-8")
    with pytest.raises(EyasError, match=r"final_rows: expected all \| supervised, got 'few'"):
        open_store(*made)


def test_a_shard_in_another_codec_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    made = write_store(tmp_path / "fp8", LAYOUTS["fp8"])
    other = write_store(tmp_path / "int4", LAYOUTS["int4"])
    index, strange = read_manifest(made[0]), read_manifest(other[0]).shards[1]
    write_manifest(
        made[0],
        dataclasses.replace(index, shards=(index.shards[0], strange, index.shards[2])),
    )
    name = "key/shard-00001.safetensors"
    (made[1] / name).write_bytes((other[1] / name).read_bytes())
    store = open_store(*made)
    store.read("s1")
    with pytest.raises(EyasError, match=r"shard-00001.*expected tensors .*aux.values.*got .*codes"):
        store.read("s2")
    assert len(faults := verify(*made)) == 1
    assert "shard-00001" in faults[0]


def test_a_shard_with_other_final_rows_than_the_spans_say_is_refused(tmp_path: Path) -> None:
    made = write_store(tmp_path, LAYOUTS["fp8"])
    index = read_manifest(made[0])
    shorter = dataclasses.replace(index.samples[2], spans=((1, 3),))
    samples = (*index.samples[:2], shorter, index.samples[3])
    write_manifest(made[0], dataclasses.replace(index, samples=samples))
    assert "shard-00001" in verify(*made)[0]
    with pytest.raises(EyasError, match=r"'final.values'.*\[1, 6\].*got.*\[2, 6\]"):
        open_store(*made).read("s2")


def test_a_teacher_of_other_rows_or_another_k_than_the_manifest_says_is_refused(
    tmp_path: Path,
) -> None:
    made = write_store(tmp_path, LAYOUTS["teacher"])
    index = read_manifest(made[0])
    assert (index.meta.teacher_k, index.meta.final_every) == (4, 2)
    shorter = dataclasses.replace(index.samples[2], spans=((1, 3),))
    samples = (*index.samples[:2], shorter, index.samples[3])
    meta = dataclasses.replace(index.meta, teacher_k=3)
    for changed, shape in (
        (dataclasses.replace(index, samples=samples), r"\[1, 2, 4\]"),
        (dataclasses.replace(index, meta=meta), r"\[2, 2, 3\]"),
    ):
        write_manifest(made[0], changed)
        assert "shard-00001" in " ".join(verify(*made))
        with pytest.raises(EyasError, match=rf"'teacher.top'.*{shape}.*got.*\[2, 2, 4\]"):
            open_store(*made).read("s2")


def test_a_sample_comes_back_exactly_as_bf16(made: tuple[Path, Path]) -> None:
    store = open_store(*made)
    assert store.samples == ("s0", "s1", "s2", "s3")
    assert store.ids_of("val") == ("s3",)
    for number, name in enumerate(store.samples):
        got, put = store.read(name), states(number)
        assert got.input_ids.tolist() == list(SAMPLES[number].input_ids)
        assert got.mask_T.tolist() == [False] + [True] * (LENGTHS[number] - 1)
        assert torch.equal(got.aux_TLD, put.aux_TLD.bfloat16().float())
        assert torch.equal(got.final_TD, put.final_TD.bfloat16().float())


def test_the_manifest_survives_a_round_trip(made: tuple[Path, Path], tmp_path: Path) -> None:
    manifest = read_manifest(made[0])
    write_manifest(tmp_path / "again.json", manifest)
    assert (tmp_path / "again.json").read_bytes() == made[0].read_bytes()
    assert manifest.meta.layers == (1, 3, 4)


def test_a_whole_store_has_no_faults(made: tuple[Path, Path]) -> None:
    assert verify(*made) == []


def test_an_altered_shard_is_named_by_reader_and_verify(made: tuple[Path, Path]) -> None:
    path = made[1] / "key/shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(faults := verify(*made)) == 1
    assert "shard-00001.safetensors: expected sha256" in faults[0]
    store = open_store(*made)
    store.read("s0")
    with pytest.raises(EyasError, match=r"expected sha256 .* got .*\n  hint: .*-f -s extract"):
        store.read("s2")
    assert shards.kept_shard(path) is None


def test_a_cut_a_missing_and_a_wrongly_described_shard_are_not_kept(
    made: tuple[Path, Path],
) -> None:
    path = made[1] / "key/shard-00000.safetensors"
    whole, sidecar = path.read_bytes(), path.with_suffix(".json")
    assert shards.kept_shard(path) is not None
    path.write_bytes(whole[:-1])
    assert shards.kept_shard(path) is None
    assert "bytes, got" in verify(*made)[0]
    path.write_bytes(whole)
    sidecar.write_text("{}")
    assert shards.kept_shard(path) is None
    path.unlink()
    assert shards.kept_shard(path) is None
    assert "no such file" in verify(*made)[0]


def test_rows_that_overlap_or_are_missing_are_faults(made: tuple[Path, Path]) -> None:
    index = read_manifest(made[0])
    moved = dataclasses.replace(index.samples[1], offset=2)
    beyond = dataclasses.replace(index.samples[3], shard=9)
    samples = (index.samples[0], moved, index.samples[2], beyond)
    write_manifest(made[0], dataclasses.replace(index, samples=samples))
    faults = verify(*made)
    assert any("sample s1" in fault for fault in faults)
    assert any("sample s3" in fault for fault in faults)
    assert any("samples fill" in fault for fault in faults)


def test_a_manifest_of_another_form_is_one_clear_error(made: tuple[Path, Path]) -> None:
    manifest, folder = made
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 99'))
    assert "expected a manifest of format 1, got 99" in verify(manifest, folder)[0]
    manifest.write_text(text.replace('"hidden_size"', '"hidden"'))
    with pytest.raises(EyasError, match="not a manifest"):
        open_store(manifest, folder)
    with pytest.raises(EyasError, match="no such file"):
        open_store(folder / "none.json", folder)


def test_an_unknown_sample_is_named(made: tuple[Path, Path]) -> None:
    with pytest.raises(EyasError, match="no sample 'nobody'"):
        open_store(*made).read("nobody")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_size_told_before_is_the_size_on_disk(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    shard = read_manifest(write_store(tmp_path, layout)[0]).shards[0]
    kept = sum(num_final_rows(layout, LENGTHS[row], SAMPLES[row].spans) for row in (0, 1))
    taught = sum(len(teacher_positions(layout, SAMPLES[row].spans)) for row in (0, 1))
    per_token = bytes_per_token(
        layout,
        num_layers=3,
        hidden_size=6,
        final_share=kept / shard.tokens,
        teacher_share=taught / shard.tokens,
    )
    header = 8 + int.from_bytes((tmp_path / "key" / shard.name).read_bytes()[:8], "little")
    assert shard.size_bytes - header == pytest.approx(per_token * shard.tokens)
