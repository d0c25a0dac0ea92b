"""Every profile against a reference forward that reads the folder as its server does."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.export import WEIGHTS, read_export, served_tensors, write_export
from eyas.drafter.layers import unit_rms
from eyas.drafter.model import Drafter
from eyas.drafter.profiles import PROFILES
from eyas.drafter.unroll import build_layout
from eyas.errors import EyasError
from eyas.files import read_json, write_json

IDS = [5, 7, 11, 5, 7, 3, 60, 2, 9]
Json = dict[str, Any]


def sglang(config: Json, tensors: dict[str, Tensor]) -> tuple[list[int], Json, dict[str, Tensor]]:
    """Explicit ids are shifted where the first is 1; both spellings of the layer are known."""
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    named = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}
    return [i + (ids[0] == 1) for i in ids], config, named


def vllm(config: Json, tensors: dict[str, Tensor]) -> tuple[list[int], Json, dict[str, Tensor]]:
    """Ids are taken as they are, from the top first."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(name) or config["eagle_config"][name]
    return ids, config, {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}


def speculators(
    config: Json, tensors: dict[str, Tensor]
) -> tuple[list[int], Json, dict[str, Tensor]]:
    """The layer's shape is nested; flags that are on would change the forward."""
    assert not any(config[f"norm_{name}"] for name in ("before_residual", "before_fc", "output"))
    assert not any(name.startswith("midlayer.") for name in tensors)
    named = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}
    nested = config["transformer_layer_config"] | {"fc_norm": config["fc_norm"]}
    return config["eagle_aux_hidden_state_layer_ids"], nested, named


READERS = {"sglang": sglang, "vllm": vllm, "speculators": speculators}


def reference_logits(folder: Path, reader: Callable[..., Any], llama: Any) -> Tensor:
    """Return step 0's logits [T, N] by a forward of its own, in float64."""
    layer_ids, c, w = reader(read_json(folder / "config.json"), load_file(folder / WEIGHTS))
    w = {k: v.double() for k, v in w.items()}
    with torch.no_grad():
        states = llama(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    # entry k enters layer k: what servers capture for an id k that they do not shift
    each = [states[k][0, :-1].double() for k in layer_ids]

    def norm(x: Tensor, name: str) -> Tensor:
        return w[name] * x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt()

    if c.get("fc_norm"):
        each = [norm(x, f"fc_norm.{place}.weight") for place, x in enumerate(each)]
    aux = torch.cat(each, dim=-1)
    hidden = aux @ w["fc.weight"].T
    embedded = llama.get_input_embeddings().weight[torch.tensor(IDS[1:])].double()
    both = torch.cat(
        [
            norm(embedded, "midlayer.input_layernorm.weight"),
            norm(hidden, "midlayer.hidden_norm.weight"),
        ],
        dim=-1,
    )
    heads, groups, width = (
        c[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    turns = torch.arange(len(both)).double()[:, None] * (
        c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, width, 2).double() / width)
    )

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    mixed = []
    for head in range(heads):
        group = head // (heads // groups)
        q, k, v = (
            (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T)[:, at * width : (at + 1) * width]
            for name, at in (("q", head), ("k", group), ("v", group))
        )
        scores = turned(q) @ turned(k).T / width**0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
    hidden = hidden + torch.cat(mixed, dim=-1) @ w["midlayer.self_attn.o_proj.weight"].T
    normed = norm(hidden, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    hidden = hidden + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return norm(hidden, "norm.weight") @ w["lm_head.weight"].T


def trained_logits(llama: Any, config: DrafterConfig, tensors: dict[str, Tensor]) -> Tensor:
    """Return the same of the training code, on the outputs of our layers."""
    drafter = Drafter(config, tensors["t2d"])
    drafter.load_state_dict({k: v.double() for k, v in served_tensors(tensors).items()})
    drafter.double()
    with torch.no_grad():
        states = llama(torch.tensor([IDS]), output_hidden_states=True).hidden_states
        aux_TLD = torch.stack([states[i + 1][0].double() for i in config.aux_layers], dim=1)
        embed_TD = llama.get_input_embeddings().weight[torch.tensor(IDS)].double()
        if config.fc_norm:
            aux_TLD = unit_rms(aux_TLD, config.rms_norm_eps)
        rows = len(IDS) - 1
        layout = build_layout(torch.arange(1, rows + 1), [len(IDS)], 1)
        return drafter.logits(drafter.unroll(embed_TD, aux_TLD, layout, 1)[0])


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_server_that_reads_the_folder_computes_the_trained_logits(
    tmp_path: Path,
    profile: str,
    fc_norm: bool,
    llama: Any,
    llama_drafter_config: DrafterConfig,
    llama_drafter: dict[str, Tensor],
) -> None:
    config = dataclasses.replace(llama_drafter_config, fc_norm=fc_norm)
    norms = {f"fc_norm.{i}.weight": torch.rand(48) + 0.5 for i in range(3) if fc_norm}
    tensors = llama_drafter | norms
    write_export(tmp_path, tensors, config, "", profile, "org/target")
    assert read_export(tmp_path, config).keys() == tensors.keys()
    expected = trained_logits(llama, config, tensors)
    served = reference_logits(tmp_path, READERS[profile], llama)
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)  # rope tables are float32


def test_norms_that_the_shape_does_not_have_are_refused(
    llama_drafter_config: DrafterConfig, llama_drafter: dict[str, Tensor], tmp_path: Path
) -> None:
    norms = {f"fc_norm.{i}.weight": torch.ones(48) for i in range(3)}
    with pytest.raises(EyasError, match=r"unknown tensor 'fc_norm\.0\.weight'"):
        write_export(tmp_path, llama_drafter | norms, llama_drafter_config, "")
    config = dataclasses.replace(llama_drafter_config, fc_norm=True)
    with pytest.raises(EyasError, match=r"missing tensor 'fc_norm\.0\.weight'"):
        write_export(tmp_path, llama_drafter, config, "")


def test_the_folder_of_sglang_makes_vllm_read_other_layers(
    tmp_path: Path,
    llama: Any,
    llama_drafter_config: DrafterConfig,
    llama_drafter: dict[str, Tensor],
) -> None:
    write_export(tmp_path, llama_drafter, llama_drafter_config, "")
    expected = trained_logits(llama, llama_drafter_config, llama_drafter)
    assert (reference_logits(tmp_path, vllm, llama) - expected).abs().max() > 1.0


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_comes_back_under_our_names(
    tmp_path: Path,
    profile: str,
    llama_drafter_config: DrafterConfig,
    llama_drafter: dict[str, Tensor],
) -> None:
    write_export(tmp_path, llama_drafter, llama_drafter_config, "", profile, "org/target")
    expected, got = served_tensors(llama_drafter), read_export(tmp_path, llama_drafter_config)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def wrong_layer_id(folder: Path, profile: str) -> str:
    config = read_json(folder / "config.json")
    name = "eagle_aux_hidden_state_layer_ids"
    holder = config if name in config else config["eagle_config"]
    holder[name] = [holder[name][0] + 1, *holder[name][1:]]
    write_json(folder / "config.json", config)
    return "eagle_(config|aux_hidden_state_layer_ids): expected"


def strange_key(folder: Path, profile: str) -> str:
    tensors = load_file(folder / WEIGHTS)
    other = "layers.0." if profile == "sglang" else "midlayer."
    key = f"{PROFILES[profile].layer_key}hidden_norm.weight"
    tensors[other + "hidden_norm.weight"] = tensors.pop(key)
    save_file(tensors, folder / WEIGHTS)
    return "unknown tensor|missing tensor"


def no_d2t(folder: Path, profile: str) -> str:
    tensors = load_file(folder / WEIGHTS)
    del tensors["d2t"]
    save_file(tensors, folder / WEIGHTS)
    return "missing tensor 'd2t'"


def flag_on(folder: Path, profile: str) -> str:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"norm_output": True})
    return "norm_output: expected (None|False), got True"


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("spoil", [wrong_layer_id, strange_key, no_d2t, flag_on])
def test_a_folder_that_a_server_would_misread_is_refused(
    tmp_path: Path,
    profile: str,
    spoil: Callable[[Path, str], str],
    llama_drafter_config: DrafterConfig,
    llama_drafter: dict[str, Tensor],
) -> None:
    write_export(tmp_path, llama_drafter, llama_drafter_config, "", profile, "org/target")
    words = spoil(tmp_path, profile)
    with pytest.raises(EyasError, match=words):
        read_export(tmp_path, llama_drafter_config)


def test_speculators_want_to_know_the_target(
    tmp_path: Path, llama_drafter_config: DrafterConfig, llama_drafter: dict[str, Tensor]
) -> None:
    with pytest.raises(EyasError, match=r"export\.verifier: expected the target's name"):
        write_export(tmp_path, llama_drafter, llama_drafter_config, "", "speculators")
    write_export(tmp_path, llama_drafter, llama_drafter_config, "", "speculators", "org/target")
    config = read_json(tmp_path / "config.json")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"


def test_an_unknown_profile_is_refused(
    tmp_path: Path, llama_drafter_config: DrafterConfig, llama_drafter: dict[str, Tensor]
) -> None:
    with pytest.raises(EyasError, match=r"export\.profile: expected sglang"):
        write_export(tmp_path, llama_drafter, llama_drafter_config, "", "tensorrt")
    assert not list(tmp_path.iterdir())
