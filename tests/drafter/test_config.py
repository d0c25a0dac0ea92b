import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eyas.drafter.config import DrafterConfig, load_config, make_config, save_config
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.settings import Drafter

TARGET = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5_000.0,
    "max_position_embeddings": 128,
    "eos_token_id": [2, 3],
}


def make(target=TARGET, *, layers=(1, 2, 4), **changes: Any) -> DrafterConfig:
    nulls = Drafter(
        family="eagle3",
        draft_vocab_size=50,
        num_attention_heads=None,
        num_key_value_heads=None,
        intermediate_size=None,
    )
    shape = dataclasses.replace(nulls, **changes)
    return make_config(shape, target, aux_layers=layers, target_name="t", target_revision="r")


def test_null_takes_the_targets_size_and_a_number_overrides_it() -> None:
    config = make(intermediate_size=32)
    assert (config.intermediate_size, config.num_attention_heads) == (32, 8)
    assert (config.num_key_value_heads, config.head_dim) == (2, 8)
    assert (config.rope_theta, config.eos_token_id, config.bos_token_id) == (5_000.0, 2, None)


def test_a_smaller_target_gives_its_whole_vocabulary() -> None:
    assert make(draft_vocab_size=101).draft_vocab_size == 100
    assert make(draft_vocab_size=100).draft_vocab_size == 100


def test_the_new_form_of_rope_and_nested_text_configs_are_read() -> None:
    nested = {"text_config": {**TARGET, "rope_theta": 1.0, "rope_parameters": {"rope_theta": 7.0}}}
    assert make(nested).rope_theta == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (1, 2)}, "expected 3 layers"),
        ({"num_key_value_heads": 3}, "divisor of 8 attention heads, got 3"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(EyasError, match=message):
        make(**changes)


def test_a_saved_config_reads_back_equal(tmp_path: Path) -> None:
    save_config(tmp_path / "config.json", make())
    assert load_config(tmp_path / "config.json") == make()


def test_a_norm_before_fc_is_written_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    save_config(path, make(fc_norm=True))
    assert load_config(path) == make(fc_norm=True)
    assert read_json(path)["fc_norm"] is True


@pytest.mark.parametrize("value", [[1], {"hidden_size": 3}])
def test_a_foreign_config_names_the_file(tmp_path: Path, value: object) -> None:
    write_json(tmp_path / "config.json", value)
    with pytest.raises(EyasError, match=r"config\.json: expected keys"):
        load_config(tmp_path / "config.json")


def test_every_key_is_written_but_those_of_another_family(tmp_path: Path) -> None:
    save_config(tmp_path / "config.json", make())
    fields = {field.name for field in dataclasses.fields(DrafterConfig)}
    assert set(read_json(tmp_path / "config.json")) == fields - {"family", "mla", "fc_norm"}
