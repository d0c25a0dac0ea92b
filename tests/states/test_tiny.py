import dataclasses
from pathlib import Path

import pytest
import torch

from eyas.files import read_json, write_jsonl
from eyas.states import tiny
from eyas.states.target import load_model

PLAN = tiny.Plan(steps=3, seed=0, dtype=torch.float32, hidden_size=32, max_length=256)
ROWS = [list(range(3, 40)), [1, 5, 6, 2] * 30]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_equal_plans_give_equal_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny.train(ROWS, PLAN, tmp_path / name, vocab_size=64)
    other = dataclasses.replace(PLAN, seed=1)
    tiny.train(ROWS, other, tmp_path / "c", vocab_size=64)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")
    model = load_model(tmp_path / "a")
    assert model.config.num_hidden_layers == 8
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


def test_the_loss_falls(tmp_path: Path) -> None:
    longer = dataclasses.replace(PLAN, steps=30)
    loss = tiny.train([[5, 6, 7, 8] * 50], longer, tmp_path, vocab_size=64)
    assert loss < 3.0  # log 64 = 4.2 at the start
    assert read_json(tmp_path / tiny.DONE)["loss_nats"] == pytest.approx(loss)


def test_a_very_short_text_still_trains(tmp_path: Path) -> None:
    tiny.train([[3, 4, 5]], PLAN, tmp_path, vocab_size=64)
    assert (tmp_path / tiny.DONE).is_file()


def test_the_text_is_conversations_and_paragraphs_in_a_fixed_order(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    write_jsonl(tmp_path / "data/sources/b.jsonl", [{"messages": messages}, {"other": 1}])
    (tmp_path / "README.md").write_text("# Title\n\n" + "A hawk is trained by hand. " * 3)
    texts = tiny.project_texts(tmp_path)
    assert texts[0] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    assert texts[1].startswith("<|im_start|>user\nA hawk is trained<|im_end|>\n")
    assert len(texts) == 2


def test_the_cache_is_named_by_plan_and_text() -> None:
    base = tiny.cache_folder(PLAN, ["a"])
    assert base == tiny.cache_folder(PLAN, ["a"])
    assert base != tiny.cache_folder(PLAN, ["b"])
    assert base != tiny.cache_folder(dataclasses.replace(PLAN, steps=4), ["a"])
