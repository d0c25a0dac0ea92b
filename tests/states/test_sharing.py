"""Sharing the shards: what is copied, what is refused, what a broken-off run leaves."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyas.errors import EyasError
from eyas.records import Sample
from eyas.states import shards, sharing
from eyas.states.capture_hf import Captured
from eyas.states.layout import make_layout
from eyas.states.store import (
    Manifest,
    StoredSample,
    StoreMeta,
    read_manifest,
    verify,
    write_manifest,
)

LENGTHS = (3, 5, 4)
META = StoreMeta(
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


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, Path]:
    """Return the manifest and the folder of a store of three shards, a sample each."""
    folder, done, samples = tmp_path / "here", list[shards.Shard](), list[StoredSample]()
    (folder / "key").mkdir(parents=True)
    for number, length in enumerate(LENGTHS):
        row = Sample(
            id=f"s{number}",
            dataset="chat",
            input_ids=tuple(range(length)),
            spans=((1, length),),
            temperature=0.7,
            provider="local",
            flags=(),
            completion_tokens_billed=None,
        )
        aux_TLD = torch.full((length, 3, 6), number + 0.5)
        states = Captured(aux_TLD=aux_TLD, final_TD=aux_TLD[:, 0])
        path = shards.shard_path(folder / "key", number)
        done.append(shards.write_shard(path, [row], [states], make_layout("bf16", "bf16", "all")))
        samples.append(
            StoredSample(
                id=row.id, split="train", shard=number, offset=0, length=length, spans=row.spans
            )
        )
    manifest = tmp_path / "manifest.json"
    write_manifest(manifest, Manifest(meta=META, shards=tuple(done), samples=tuple(samples)))
    return manifest, folder


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return an address of each kind: a folder, and a store that is no file system."""
    if request.param == "folder":
        yield str(tmp_path / "there" / "states")
        return
    from fsspec.implementations.memory import MemoryFileSystem

    yield "memory://team/states"
    MemoryFileSystem.store.clear()


def test_what_was_pushed_is_pulled_whole_and_only_once(
    store: tuple[Path, Path], url: str, tmp_path: Path
) -> None:
    manifest, folder = store
    pushed, again = sharing.push(manifest, folder, url, {}), sharing.push(manifest, folder, url, {})
    assert (pushed.shards, pushed.there_already) == (3, 0)
    assert (again.shards, again.there_already) == (0, 3)
    elsewhere = tmp_path / "elsewhere"
    pulled, again = (sharing.pull(manifest, elsewhere, url, {}) for _ in range(2))
    assert (pulled.shards, pulled.size_bytes) == (3, pushed.size_bytes)
    assert (again.shards, again.there_already) == (0, 3)
    assert verify(manifest, elsewhere) == []
    for path in folder.rglob("shard-*"):  # sidecars too: extract keeps what is pulled
        assert (elsewhere / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_a_shard_that_is_altered_here_is_not_pushed(store: tuple[Path, Path], url: str) -> None:
    manifest, folder = store
    path = next(folder.rglob("shard-00001.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(EyasError, match=r"shard-00001.*expected sha256"):
        sharing.push(manifest, folder, url, {})


def test_a_shard_that_is_altered_there_does_not_count_and_the_others_stay(
    store: tuple[Path, Path], tmp_path: Path
) -> None:
    manifest, folder = store
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    sharing.push(manifest, folder, str(there), {})
    first, second, _ = read_manifest(manifest).shards
    spoiled = there / f"{second.sha256}.safetensors"
    whole = spoiled.read_bytes()
    spoiled.write_bytes(whole[:-1] + b"!")
    with pytest.raises(EyasError, match=r"shard-00001\.safetensors \(expected sha256"):
        sharing.pull(manifest, elsewhere, str(there), {})
    assert [path.name for path in elsewhere.rglob("*.safetensors")] == [first.name]
    spoiled.write_bytes(whole)
    assert sharing.pull(manifest, elsewhere, str(there), {}).shards == 2


def test_a_copy_that_broke_off_there_is_written_anew(
    store: tuple[Path, Path], tmp_path: Path
) -> None:
    manifest, folder = store
    there = tmp_path / "there"
    sharing.push(manifest, folder, str(there), {})
    cut = there / f"{read_manifest(manifest).shards[0].sha256}.safetensors"
    cut.write_bytes(cut.read_bytes()[:9])
    assert sharing.push(manifest, folder, str(there), {}).shards == 1
    shutil.rmtree(folder / "key")
    assert sharing.pull(manifest, folder, str(there), {}).shards == 3
    assert verify(manifest, folder) == []


def test_a_place_out_of_reach_is_one_line_that_names_it(
    store: tuple[Path, Path], tmp_path: Path
) -> None:
    manifest, folder = store
    with pytest.raises(EyasError, match=r"nowhere.*FileNotFoundError.*\n.*goes on"):
        sharing.pull(manifest, tmp_path / "elsewhere", str(tmp_path / "nowhere"), {})
    with pytest.raises(EyasError, match="strange://x"):
        sharing.push(manifest, folder, "strange://x", {})
