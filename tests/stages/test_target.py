from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.desk.params import Params, read_params
from eyas.errors import EyasError
from eyas.files import read_json, write_jsonl
from eyas.stages import target
from eyas.states import tiny

RUNTIME = read_params().value("runtime") | {"tracking": "off", "threads": 1}
SOURCE_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def params(source: dict[str, Any], dtype: str = "float32") -> Params:
    section = {"name": "t", "codec": "chatml", "dtype": dtype, "source": source}
    return Params({"target": section, "runtime": RUNTIME})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a little text, where tiny targets are tinier."""
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(20)]
    write_jsonl(tmp_path / "data/sources/chat.jsonl", rows)
    return tmp_path


TINY = {"kind": "train_tiny", "steps": 2, "seed": 0}


def test_a_tiny_target_is_a_whole_folder_and_trained_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = target.work(params(TINY))
    assert report.metrics["layers"] == 8
    about = read_json(home / "models/target/eyas_target.json")
    assert about["source"] == TINY
    assert len(about["revision"]) == 64
    names = {path.name for path in (home / "models/target").iterdir()}
    assert names == SOURCE_FILES | {"generation_config.json", "eyas_target.json"}
    assert read_json(home / "models/target/config.json")["vocab_size"] <= 2048

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(tiny, "train", never)
    before = (home / "models/target/model.safetensors").read_bytes()
    target.work(params(TINY))
    assert (home / "models/target/model.safetensors").read_bytes() == before


def test_a_training_killed_before_its_end_is_not_taken_for_a_target(home: Path) -> None:
    target.work(params(TINY))
    mark = next(home.glob(f"{tiny.CACHE}/*/{tiny.DONE}"))
    mark.unlink()
    target.work(params(TINY))
    assert mark.is_file()


def test_a_folder_is_copied_and_named_by_its_contents(home: Path) -> None:
    target.work(params(TINY))
    (home / "models/target").rename(home / "own")
    source = {"kind": "folder", "path": "own"}
    target.work(params(source))
    about = read_json(home / "models/target/eyas_target.json")
    assert about["source"] == {"kind": "folder"}  # a path of this machine is nobody else's affair
    target.work(params(source))
    assert read_json(home / "models/target/eyas_target.json") == about


def test_a_hub_snapshot_keeps_its_commit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.work(params(TINY))
    (home / "models/target").rename(home / "own")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(home / "own"))
    source = {"kind": "hub", "repo": "owner/name", "revision": "0" * 40}
    target.work(params(source))
    assert read_json(home / "models/target/eyas_target.json")["revision"] == "0" * 40


def test_of_a_hubs_target_the_head_alone_is_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.work(params(TINY))
    (home / "models/target").rename(home / "own")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(home / "own"))
    source = {"kind": "hub", "repo": "owner/name", "revision": "0" * 40, "weights": "head"}
    target.work(params(source))
    assert read_json(home / "models/target/eyas_target.json")["source"] == source
    assert 2 <= len(load_file(home / "models/target/model.safetensors")) <= 3
    weights = (home / "models/target/model.safetensors").stat().st_size
    assert weights < (home / "own/model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "ftp"}, "target.source.kind: expected wheel_gguf .* got 'ftp'"),
        ({"kind": "hub", "repo": "a/b"}, "kind 'hub' needs 'revision'"),
        ({"kind": "folder"}, "kind 'folder' needs 'path'"),
        ({"kind": "folder", "weights": "some"}, r"expected all \| head, got 'some'"),
        ({"kind": "train_tiny", "seed": 0}, "needs steps and seed"),
        (
            {"kind": "wheel_gguf", "package": "none_such", "file": "f", "sha256": "0"},
            "package 'none_such': expected to be installed",
        ),
    ],
)
def test_a_source_that_cannot_work_is_one_clear_error(
    home: Path, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(EyasError, match=message):
        target.work(params(source))
    assert not (home / "models/target").exists()


def test_an_unknown_dtype_is_refused(home: Path) -> None:
    with pytest.raises(EyasError, match=r"target.dtype: expected bfloat16 \| float32"):
        target.work(params(TINY, dtype="float16"))


@pytest.mark.slow
def test_the_wheels_model_speaks_and_counts_digits_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    from eyas.states.sampler import BatchedSampler
    from eyas.states.target import fast_dtype, load_model

    section = read_params(Path("conf/target/smollm2_135m.yaml")).tree()
    monkeypatch.chdir(tmp_path)
    report = target.work(Params({"target": section, "runtime": RUNTIME}))
    assert report.metrics["vocab_size"] == 49152
    tokenizer: Any = AutoTokenizer.from_pretrained(target.FOLDER)
    assert tokenizer("x=  1")["input_ids"] == [104, 45, 256, 33]
    assert tokenizer("    1) item")["input_ids"] == [289, 33, 25, 5033]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    model = load_model(target.FOLDER, dtype=fast_dtype())
    with BatchedSampler(model, slots=32) as sampler:
        asked = {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "stop_ids": (2,)}
        futures = [sampler.submit(ids["input_ids"], seed=n, **asked) for n in range(2)]
        replies = [future.result() for future in futures]
    assert tokenizer.decode(replies[0].ids) == "The capital of France is Paris.<|im_end|>"
    assert replies[0] == replies[1]
    assert torch.is_tensor(model.lm_head.weight)
