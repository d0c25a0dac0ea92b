import hashlib
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.files import write_json
from eyas.states.folder import check_folder, copy_folder, folder_digest, weight_files
from eyas.states.sources import hub_folder, wheel_file

COMMIT = "0123456789abcdef" * 2 + "01234567"
NO_IMPORT = "raise RuntimeError('a package with weights is never imported')"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a package that must not be imported; return the sha256 of its file."""
    (tmp_path / "heavy_package").mkdir()
    (tmp_path / "heavy_package/__init__.py").write_text(NO_IMPORT)
    (tmp_path / "heavy_package/model.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    return hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        write_json(folder / name, {})
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_file_is_found_in_a_package_without_importing_it(package: str) -> None:
    assert wheel_file("heavy_package", "model.gguf", package).read_bytes() == b"weights"


def test_each_fault_of_a_package_is_one_clear_error(package: str) -> None:
    with pytest.raises(EyasError, match=r"'not_there': expected to be installed.*\n  hint: "):
        wheel_file("not_there", "model.gguf", package)
    with pytest.raises(EyasError, match="expected to be installed"):
        wheel_file("os.path", "model.gguf", package)
    with pytest.raises(EyasError, match=r"other.gguf: no such file in package 'heavy_package'"):
        wheel_file("heavy_package", "other.gguf", package)
    with pytest.raises(EyasError, match=f"model.gguf: expected sha256 00, got {package}"):
        wheel_file("heavy_package", "model.gguf", "00")


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:12], COMMIT.upper()])
def test_a_revision_that_can_move_is_refused(revision: str) -> None:
    with pytest.raises(EyasError, match="expected a commit of 40 hex digits"):
        hub_folder("owner/name", revision)


def test_a_snapshot_in_the_hubs_cache_is_taken_with_its_links_followed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cache/models--owner--name"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, path in enumerate(sorted(target.iterdir())):
        path.rename(home / f"blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    found = hub_folder("owner/name", COMMIT)
    copy_folder(found, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out/model.safetensors").read_bytes() == b"weights"
    with pytest.raises(EyasError, match=f"owner/other at {COMMIT}: neither cached"):
        hub_folder("owner/other", COMMIT)


def test_of_a_hubs_shards_only_those_of_the_head_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("language_model.model.embed_tokens", "language_model.model.norm", "x.lm_head", "x.y")
    where = {f"{name}.weight": f"part-{n // 2}.safetensors" for n, name in enumerate(names)}
    where["x.y.weight"] = "part-7.safetensors"
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": where})
    write_json(tmp_path / "config.json", {})
    asked: list[list[str]] = []

    def snapshot_download(_repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert revision == COMMIT
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub_folder("owner/name", COMMIT, head_only=True) == tmp_path
    assert not any("safetensors" in pattern for pattern in asked[0])
    assert set(asked[1]) == {"part-0.safetensors", "part-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").unlink()
    hub_folder("owner/name", COMMIT, head_only=True)
    assert asked[3] == ["*.safetensors"], "one file: there is nothing to choose"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_folder_that_lacks_a_file_is_refused(target: Path, name: str) -> None:
    check_folder(target)
    (target / name).unlink()
    with pytest.raises(EyasError, match=f"{name}: no such file"):
        check_folder(target)


def test_a_ranks_file_stands_in_for_a_tokenizer(target: Path) -> None:
    (target / "tokenizer.json").rename(target / "tiktoken.model")
    check_folder(target)
    (target / "tiktoken.model").unlink()
    with pytest.raises(EyasError, match=r"tokenizer\.json"):
        check_folder(target)


def test_a_target_without_a_chat_template_is_refused(target: Path, tmp_path: Path) -> None:
    write_json(target / "tokenizer_config.json", {})
    with pytest.raises(EyasError, match="a target without a chat template"):
        copy_folder(target, tmp_path / "out")
    (target / "chat_template.jinja").write_text("{{ messages }}")
    copy_folder(target, tmp_path / "out")
    with pytest.raises(EyasError, match="no such folder"):
        copy_folder(tmp_path / "nowhere", tmp_path / "out")


def test_weights_in_parts_must_all_be_there(target: Path) -> None:
    index: dict[str, Any] = {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    write_json(target / "model.safetensors.index.json", index)
    assert [p.name for p in weight_files(target)] == ["1.safetensors", "2.safetensors"]
    with pytest.raises(EyasError, match=r"1.safetensors: no such file"):
        check_folder(target)


def test_a_folders_digest_follows_names_and_contents_only(target: Path) -> None:
    before = folder_digest(target)
    write_json(target / "eyas_target.json", {"name": "x"})
    assert folder_digest(target) == before
    (target / "model.safetensors").write_bytes(b"other")
    assert folder_digest(target) != before
