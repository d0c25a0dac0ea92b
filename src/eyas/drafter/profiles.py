"""What each server calls a drafter's tensors and its layers.

| profile | keys of the layer | layer ids | config.json | families |
|---|---|---|---|---|
| sglang | `midlayer.` | outputs, the first is 1: some models there add 1 only then | flat | both |
| vllm | `layers.0.` | 1 more than the outputs: 0 is the embedding | flat | eagle3 |
| speculators | `layers.0.` | as vllm | nested, every norm flag off but `fc_norm` | eagle3 |

With `fc_norm` (EAGLE-3.1: an RMS norm of each aux state before fc) the three have the flag and keys
`fc_norm.0.weight` to `fc_norm.2.weight`. A vLLM from before that stops at the unknown keys.
A flat folder with the ids of `sglang` loads in vLLM without a word and reads the layers before.
vLLM's class for latent attention takes every RoPE for YaRN, and was not tried: it is refused.

Source: llama_eagle3.py of SGLang and of vLLM, kimi_k25_eagle3.py of SGLang, deepseek_eagle3.py and
for the ids gpu_model_runner.py of vLLM; speculators 0.9.0 models/eagle3/config.py, whose own
training defaults differ in the flags.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.errors import EyasError

OWN_LAYER = "midlayer."
_SHARED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id"),
)
NESTED = "speculators_config"
_IDS = "eagle_aux_hidden_state_layer_ids"
_SGLANG = """Serve it with SGLang:

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 \\
      --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

vLLM counts layers from another end: export it again with `export.profile=vllm`."""
_VLLM = """Serve it with vLLM:

    vllm serve TARGET --speculative-config \\
      '{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}'"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How a server reads a folder."""

    layer_key: str  # before the keys of the one layer
    ids_above_outputs: int  # added to "output of layer i"
    describe: Callable[[DrafterConfig, list[int]], dict[str, Any]]  # config.json, layer ids given
    serve: str  # for the card
    families: tuple[str, ...] = ("eagle3",)  # that the server has a class for


def profile_named(name: str) -> Profile:
    """Return a profile.

    Raises: EyasError if there is none of this name.
    """
    if name not in PROFILES:
        raise EyasError(f"export.profile: expected {' | '.join(PROFILES)}, got '{name}'")
    return PROFILES[name]


def profile_of(described: Mapping[str, Any]) -> str:
    """Return the name of the profile that a config.json was written in."""
    if NESTED in described:
        return "speculators"
    return "vllm" if _IDS in described else "sglang"


def serving_config(
    config: DrafterConfig, profile: str = "sglang", verifier: str | None = None
) -> dict[str, Any]:
    """Return config.json as a profile has it; `verifier` is the target's name or path.

    Raises: EyasError if the server has no class for the drafter, or the profile names the target
    and no name is given.
    """
    rules = profile_named(profile)
    if config.family not in rules.families:
        raise EyasError(
            f"export.profile: expected sglang for drafter.family={config.family}, got '{profile}'",
            hint="set export.profile=sglang, or train drafter.family=eagle3",
        )
    if config.mla and config.mla.q_lora_rank is None:
        raise EyasError(
            "export: SGLang serves latent attention with a query of low rank only: expected a "
            "number for drafter.mla.q_lora_rank, got null",
            hint="give it and train again",
        )
    described = rules.describe(config, [i + rules.ids_above_outputs for i in config.aux_layers])
    if NESTED in described:
        if not verifier:
            raise EyasError(
                "export.verifier: expected the target's name or path for profile speculators, "
                "got null"
            )
        described[NESTED]["verifier"]["name_or_path"] = verifier
    return described


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Return tensors with another beginning of the layer's keys.

    One that begins as the new keys do already is not of the old form: it gets an unknown name.
    """
    strange = f"{new} (not {old}) "
    return {
        new + name.removeprefix(old) if name.startswith(old) else name.replace(new, strange): tensor
        for name, tensor in tensors.items()
    }


def _llama(config: DrafterConfig) -> dict[str, Any]:
    """Return what every form says of the layer, and of the target's vocabulary."""
    flags = ("attention_bias", "mlp_bias", "tie_word_embeddings")
    return (
        {name: getattr(config, name) for name in _SHARED}
        | dict.fromkeys(flags, False)
        | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }
    )


def _mla(config: DrafterConfig) -> dict[str, Any]:
    """Return what the form says of a layer with latent attention."""
    assert config.mla is not None
    sizes = dataclasses.asdict(config.mla)
    rope = _yarn(config) or {"rope_type": "default"}
    described = _llama(config) | sizes | {"model_type": "deepseek_v3", "rope_interleave": True}
    described["rope_parameters"] = rope | {"rope_theta": config.rope_theta}
    return {k: v for k, v in described.items() if k not in ("head_dim", "mlp_bias", "yarn")}


def _yarn(config: DrafterConfig) -> dict[str, Any] | None:
    if config.mla is None or config.mla.yarn is None:
        return None
    return dataclasses.asdict(config.mla.yarn) | {"rope_type": "yarn", "type": "yarn"}


_CLASSES = {
    "eagle3": ("LlamaForCausalLMEagle3", _llama),
    "eagle3_mla": ("Eagle3DeepseekV2ForCausalLM", _mla),
}


def _flat(config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any]:
    """Return the form of EAGLE, with rope in the old and the new form for servers of either age."""
    name, layer = _CLASSES[config.family]
    return layer(config) | {
        **({"fc_norm": True} if config.fc_norm else {}),
        "architectures": [name],
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": _yarn(config),
        "torch_dtype": "bfloat16",
        "eagle_config": {_IDS: layer_ids, "use_aux_hidden_state": True},
    }


def _speculators(config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any]:
    flags = ("norm_before_residual", "norm_before_fc", "norm_output")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    return dict.fromkeys((*flags, "embed_requires_grad"), False) | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "fc_norm": config.fc_norm,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _IDS: layer_ids,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        NESTED: {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"architectures": []},
        },
        "transformer_layer_config": _llama(config),
    }


PROFILES = {
    "sglang": Profile(
        layer_key=OWN_LAYER,
        ids_above_outputs=0,
        describe=_flat,
        serve=_SGLANG,
        families=tuple(_CLASSES),
    ),
    "vllm": Profile(
        layer_key="layers.0.",
        ids_above_outputs=1,
        describe=lambda c, ids: _flat(c, ids) | {_IDS: ids},
        serve=_VLLM,
    ),
    "speculators": Profile(
        layer_key="layers.0.", ids_above_outputs=1, describe=_speculators, serve=_VLLM
    ),
}
