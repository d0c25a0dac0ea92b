import dataclasses
from pathlib import Path

import pytest
import torch

from eyas.errors import EyasError
from eyas.records import Sample
from eyas.settings import Extract
from eyas.states import shards
from eyas.states.capture_hf import Captured
from eyas.states.codecs import state_codec
from eyas.states.size import bytes_per_token, hours
from eyas.states.store import (
    Manifest,
    StoredSample,
    StoreMeta,
    open_store,
    read_manifest,
    verify,
    write_manifest,
)

SETTINGS = Extract(
    backend="transformers", layers=None, codec="bf16", shard_tokens=8, batch_tokens=8
)
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


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """Write a store of three shards; return its manifest and the folder of stores."""
    folder = tmp_path / "key"
    shards.prepare_folder(folder, 0)
    runs = shards.plan_shards(LENGTHS, 8)
    done, entries = [], []
    for number, run in enumerate(runs):
        rows = [SAMPLES[row] for row in run]
        captured = [states(row) for row in run]
        path = shards.shard_path(folder, number)
        done.append(shards.write_shard(path, rows, captured, state_codec("bf16")))
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
        codec="bf16",
        compute_dtype="float32",
        final="post_norm",
    )
    manifest = tmp_path / "manifest.json"
    write_manifest(manifest, Manifest(meta=meta, shards=tuple(done), samples=tuple(entries)))
    return manifest, tmp_path


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
    assert "expected a manifest of format 1" in verify(manifest, folder)[0]
    manifest.write_text(text.replace('"hidden_size"', '"hidden"'))
    with pytest.raises(EyasError, match="not a manifest"):
        open_store(manifest, folder)
    with pytest.raises(EyasError, match="no such file"):
        open_store(folder / "none.json", folder)


def test_an_unknown_sample_is_named(made: tuple[Path, Path]) -> None:
    with pytest.raises(EyasError, match="no sample 'nobody'"):
        open_store(*made).read("nobody")


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ((3, 5, 4, 7), 8, [range(2), range(2, 3), range(3, 4)]),
        ((20, 1), 8, [range(1), range(1, 2)]),
        ((1, 1, 1), 8, [range(3)]),
        ((), 8, []),
    ],
)
def test_shards_hold_whole_samples_in_order(
    lengths: tuple[int, ...], limit: int, expected: list[range]
) -> None:
    assert shards.plan_shards(lengths, limit) == expected


def test_the_key_follows_ids_tokens_weights_and_settings() -> None:
    def key(samples: list[Sample], weights: str, settings: Extract) -> str:
        return shards.store_key(samples, weights, (1, 3, 4), settings)

    base = key(SAMPLES, "w", SETTINGS)
    again = dataclasses.replace(SAMPLES[0], input_ids=(9, 9, 9))
    others = {
        key(SAMPLES[:3], "w", SETTINGS),
        key([again, *SAMPLES[1:]], "w", SETTINGS),
        key(SAMPLES, "v", SETTINGS),
        key(SAMPLES, "w", dataclasses.replace(SETTINGS, batch_tokens=9)),
        shards.store_key(SAMPLES, "w", (1, 2, 4), SETTINGS),
    }
    assert len(others) == 5
    assert base not in others
    assert base == key(SAMPLES, "w", dataclasses.replace(SETTINGS, layers=(1, 3, 4)))


def test_a_full_disk_is_told_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"GB free, got .*\n  hint: set runtime.store"):
        shards.prepare_folder(tmp_path, 10**18)


def test_leftovers_of_a_kill_are_cleared(tmp_path: Path) -> None:
    torn = tmp_path / ".shard-00000.safetensors.abc"
    torn.write_bytes(b"x")
    shards.prepare_folder(tmp_path, 0)
    assert not torn.exists()


def test_size_by_hand_for_kimi() -> None:
    per_token = bytes_per_token("bf16", num_layers=3, hidden_size=7168)
    assert per_token == 57_348
    assert hours(138_400_000, 422.5) == pytest.approx(90.99, abs=0.01)
    with pytest.raises(EyasError, match=r"extract.codec: expected bf16, got 'fp8'"):
        bytes_per_token("fp8", num_layers=3, hidden_size=7168)
