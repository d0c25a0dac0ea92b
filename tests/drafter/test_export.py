from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eyas.drafter.config import DrafterConfig
from eyas.drafter.export import (
    WEIGHTS,
    check_tensors,
    expected_shapes,
    read_tensors,
    served_tensors,
    write_export,
)
from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter
from eyas.drafter.profiles import serving_config
from eyas.errors import EyasError
from eyas.files import read_json

Tensors = dict[str, torch.Tensor]
CONFIG = DrafterConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    draft_vocab_size=10,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    aux_layers=(1, 3, 4),
    target_name="t",
    target_revision="r",
    bos_token_id=1,
    eos_token_id=2,
)


def good() -> Tensors:
    torch.manual_seed(0)
    t2d = torch.zeros(40, dtype=torch.bool)
    t2d[[0, 1, 2, 5, 6, 9, 20, 21, 30, 39]] = True
    return {k: v.clone() for k, v in Drafter(CONFIG, t2d).state_dict().items()}


def test_a_drafter_has_exactly_the_keys_and_shapes_that_servers_read() -> None:
    assert {k: tuple(v.shape) for k, v in good().items()} == expected_shapes(CONFIG)


def test_an_export_comes_back_bit_for_bit_in_bfloat16(tmp_path: Path) -> None:
    tensors = good()
    write_export(tmp_path, tensors, CONFIG, "card\n")
    again = read_tensors(tmp_path / WEIGHTS)
    for name, tensor in tensors.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(again[name], expected), name
    assert read_json(tmp_path / "config.json") == serving_config(CONFIG)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "card\n"


def test_a_reloaded_drafter_gives_the_logits_of_the_bfloat16_weights_in_memory(
    tmp_path: Path,
) -> None:
    tensors = good()
    write_export(tmp_path, tensors, CONFIG, "")
    generator = torch.Generator().manual_seed(1)
    embed_VD = torch.randn(40, 16, generator=generator)
    aux_TLD = torch.randn(5, 3, 16, generator=generator)
    path = [3, 1, 4, 1, 5, 9]
    hidden_TD = torch.randn(5, 16, generator=generator)
    memory, disk = (
        DraftRunner(weights, CONFIG, embed_VD)
        for weights in (served_tensors(tensors), read_tensors(tmp_path / WEIGHTS))
    )
    assert torch.equal(memory.logits(hidden_TD), disk.logits(hidden_TD))
    assert torch.equal(
        memory.draft_everywhere(path, aux_TLD, 3), disk.draft_everywhere(path, aux_TLD, 3)
    )


def test_the_weights_name_their_target(tmp_path: Path) -> None:
    write_export(tmp_path, good(), CONFIG, "")
    with safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "target": "t", "target_revision": "r"}


def test_the_served_config_has_layer_ids_and_rope_in_both_forms() -> None:
    config = serving_config(CONFIG)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def rename(t: Tensors) -> None:
    t["layers.0.mlp.up_proj.weight"] = t.pop("midlayer.mlp.up_proj.weight")


def drop(t: Tensors) -> None:
    del t["d2t"]


def reshape(t: Tensors) -> None:
    t["fc.weight"] = t["fc.weight"][:, :-1]


def poison(t: Tensors) -> None:
    t["norm.weight"][3] = float("nan")


def retype(t: Tensors) -> None:
    t["lm_head.weight"] = t["lm_head.weight"].long()


def narrow(t: Tensors) -> None:
    t["d2t"] = t["d2t"].int()


def disorder(t: Tensors) -> None:
    t["d2t"] = t["d2t"].flip(0)


def disagree(t: Tensors) -> None:
    t["t2d"] = t["t2d"].roll(1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (rename, "unknown tensor 'layers.0"),
        (drop, "missing tensor 'd2t'"),
        (reshape, r"'fc\.weight' expected \(16, 48\), got \(16, 47\)"),
        (poison, r"'norm\.weight' holds NaN"),
        (retype, r"'lm_head\.weight' has dtype torch\.int64"),
        (narrow, "d2t must be int64"),
        (disorder, "does not give ascending ids"),
        (disagree, "name different ids"),
    ],
)
def test_what_a_server_would_misread_is_refused(
    tmp_path: Path, spoil: Callable[[Tensors], None], words: str
) -> None:
    tensors = good()
    spoil(tensors)
    with pytest.raises(EyasError, match=words):
        write_export(tmp_path, tensors, CONFIG, "")
    assert not list(tmp_path.iterdir())


def test_layer_ids_that_do_not_start_at_one_are_refused() -> None:
    with pytest.raises(EyasError, match="the first must be 1"):
        check_tensors(good(), replace(CONFIG, aux_layers=(2, 3, 4)), "drafter")


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(EyasError, match=WEIGHTS):
        read_tensors(tmp_path / WEIGHTS)
