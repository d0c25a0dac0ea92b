"""A drafter made to be misread: of nearly the same function, but no tensor of it may be left out.

A trained drafter's norms lie near one, which is what a server that skips a key puts in their place,
and its attention, sharply on the newest token, hardly depends on RoPE. Serving it proves little
about either: with `hidden_norm` renamed or another `rope_theta` SGLang accepted exactly as much.

Legend: D hidden size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_LAYER = "midlayer."
_ATTENTION = f"{_LAYER}self_attn."
# What reads embedding and state, and what makes the query; below, what reads the inner norms
_LLAMA = (("q_proj", "k_proj", "v_proj"), "q_proj")
_LATENT = (("q_a_proj", "kv_a_proj_with_mqa"), "q_b_proj")
_INNER = {"q_a_layernorm": "q_b_proj", "kv_a_layernorm": "kv_b_proj"}
_INPUT, _HIDDEN, _MLP = (
    f"{_LAYER}{name}.weight"
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
)
_FINAL = "norm.weight"
# Another rope_theta then changes how often half of the prompts verify (SmolLM2, 1e5 for 1e4).
_QUERY_SCALE = 0.35


def probe_of(
    tensors: Mapping[str, Tensor], *, query_scale: float = _QUERY_SCALE
) -> dict[str, Tensor]:
    """Return the drafter with norms that are not one, and with flatter attention.

    Each weight of a norm is multiplied by a sign and a power of two, and the columns that read it
    are divided by the same: exact in every float, so with queries unscaled not one bit of a logit
    changes. Where a norm is skipped, the drafts are noise.
    """
    generator = torch.Generator().manual_seed(0)
    inner = {
        f"{_ATTENTION}{norm}.weight": f"{_ATTENTION}{reader}.weight"
        for norm, reader in _INNER.items()
        if f"{_ATTENTION}{norm}.weight" in tensors
    }
    first, query = _LATENT if inner else _LLAMA
    before_fc = sorted(name for name in tensors if name.startswith("fc_norm."))
    scale_D = {
        name: _signed_powers(len(tensors[name]), generator)
        for name in (_INPUT, _HIDDEN, _MLP, _FINAL, *inner, *before_fc)
    }
    both = torch.cat([scale_D[_INPUT], scale_D[_HIDDEN]])  # the order in which they are read
    readers = {f"{_ATTENTION}{name}.weight": both for name in first}
    readers |= {reader: scale_D[norm] for norm, reader in inner.items()}
    readers |= {f"{_LAYER}mlp.{name}_proj.weight": scale_D[_MLP] for name in ("gate", "up")}
    readers["lm_head.weight"] = scale_D[_FINAL]
    if before_fc:
        readers["fc.weight"] = torch.cat([scale_D[name] for name in before_fc])
    probe = dict(tensors)
    probe |= {name: tensors[name] * scale for name, scale in scale_D.items()}
    probe |= {name: tensors[name] / scale for name, scale in readers.items()}
    probe[f"{_ATTENTION}{query}.weight"] *= query_scale
    return probe


def _signed_powers(count: int, generator: torch.Generator) -> Tensor:
    powers = torch.randint(-2, 3, (count,), generator=generator)
    signs = 1 - 2 * torch.randint(0, 2, (count,), generator=generator)
    return torch.exp2(powers) * signs
