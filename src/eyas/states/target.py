"""Load the target: the whole model, or only the tensors around its layers.

Reads: a Hugging Face folder (models/target).
Source: layer ids are outputs, the first is 1, as SGLang and SpecForge take them: [1, N/2-1, N-4]
(sglang python/sglang/srt/models/llama.py, set_eagle3_layers_to_capture).

Legend: V vocabulary, D hidden size.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.states.folder import REBUILD, SIDECAR, head_keys, read_tensor, weight_map


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHead:
    """What stands before and behind the target's layers."""

    embed_VD: torch.Tensor
    norm_weight_D: torch.Tensor
    lm_head_VD: torch.Tensor  # the embedding itself where the two are tied
    norm_eps: float
    config: dict[str, Any]  # config.json


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the three layers whose outputs EAGLE-3 reads: (1, N//2 - 1, N - 4).

    N = 61 (Kimi-K2.5): 1, 29, 57.   N = 30 (SmolLM2): 1, 14, 26.   N = 8: 1, 3, 4.

    Raises: EyasError if the target is too shallow for three different layers.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 1 < layers[1] < layers[2]:
        raise EyasError(
            f"target of {num_layers} layers: expected at least 7, so that layers {layers} ascend",
            hint="set extract.layers",
        )
    return layers


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Refuse layer ids that an engine would read differently.

    Raises: EyasError unless ids ascend, the first is 1 (sglang's deepseek_v2.py shifts explicit ids
    only then) and the last lies before the last layer (engines capture what enters a layer).
    """
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or layers[0] != 1 or not ascending or layers[-1] > num_layers - 2:
        raise EyasError(
            f"extract.layers: expected ascending ids, first 1, last <= {num_layers - 2}, "
            f"got {list(layers)}",
            hint="null takes [1, N/2-1, N-4]",
        )


def fast_dtype() -> torch.dtype:
    """Return the dtype the CPU samples in fastest: bfloat16 where it multiplies in tiles (AMX).

    Measured twice, 64 prompts of 82 tokens, a shared AMX machine: bfloat16 reads 575 and writes
    180-220 tokens a CPU-second, float32 250-280 and 100-140.
    """
    return torch.bfloat16 if torch.cpu.get_capabilities().get("amx_bf16") else torch.float32


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return the target as a transformers causal LM in eval mode, with sdpa attention.

    Raises: EyasError if the folder is no model that transformers can read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    read_json(folder / "config.json", hint=REBUILD)
    if (folder / SIDECAR).is_file() and "weights" in read_json(folder / SIDECAR).get("source", {}):
        raise EyasError(
            f"{folder}: expected the whole model, got its head alone",
            hint="set target.source.weights: all, or extract.backend: sglang",
        )
    hf_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, SafetensorError) as error:
        raise EyasError(f"{folder}: not a loadable model ({error})", hint=REBUILD) from None
    return model.eval().requires_grad_(False)


def load_head(folder: Path, *, dtype: torch.dtype = torch.float32) -> TargetHead:
    """Read embedding, final norm and lm_head by key, without the layers between them.

    Raises: EyasError if a tensor is missing or its shape is not that of the config.
    """
    config = read_json(folder / "config.json", hint=REBUILD)
    text = config.get("text_config", config)
    keys, where = head_keys(folder, config), weight_map(folder)
    embed_VD, norm_weight_D = (read_tensor(where, key).to(dtype) for key in keys[:2])
    lm_head_VD = read_tensor(where, keys[2]).to(dtype) if keys[2:] else embed_VD
    expected = (text["vocab_size"], text["hidden_size"])
    for name, got in (("embed_tokens", embed_VD), ("lm_head", lm_head_VD)):
        if tuple(got.shape) != expected:
            raise EyasError(
                f"{folder}: {name} expected {expected}, got {tuple(got.shape)}", hint=REBUILD
            )
    return TargetHead(
        embed_VD=embed_VD,
        norm_weight_D=norm_weight_D,
        lm_head_VD=lm_head_VD,
        norm_eps=float(text["rms_norm_eps"]),
        config=config,
    )
