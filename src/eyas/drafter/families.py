"""Drafter families: what their layers do differently, each a row of functions.

Shared by all: three aux states through fc, an embedding and a state that are normed and read by the
attention's first matrices, causal attention with a row's own later keys, a gated MLP, norm, head.
A family names its attention's tensors and says how their columns become heads, and what the heads'
gradients are to the columns.

Legend: R rows, H heads, G key/value heads, K head dim, T tokens, D hidden size.
Source: SGLang srt/models/llama_eagle3.py and kimi_k25_eagle3.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter import mla
from eyas.drafter.config import DrafterConfig
from eyas.drafter.layers import apply_rotary, rotary_tables
from eyas.drafter.mla import Heads, Inner

Backward = Callable[
    [DrafterConfig, Inner, Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, dict[str, Tensor]]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Its functions; columns are those of the rows' first products, the query's before the rest."""

    shapes: Callable[[DrafterConfig], dict[str, tuple[int, ...]]]  # self_attn's tensors, in order
    num_first: int  # so many of them, the query's first, read embedding and state; the last is out
    divisor: Callable[[DrafterConfig], float]  # of the scores
    query: Heads  # columns, positions -> (query [R, H, K],)
    key_value: Heads  # columns, positions -> key [R, G, K], value [R, G, value_dim]
    query_backward: Backward  # what these return, sent back: to the columns and the inner weights
    key_value_backward: Backward
    decode: Callable[  # weights, [embedding; state], positions -> q [H, T, K], k and v [G, T, ..]
        [DrafterConfig, Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]
    ]


def family_of(config: DrafterConfig) -> Family:
    """Return the functions of a drafter's family."""
    return FAMILIES[config.family]


def _llama_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    c, inputs = config, 2 * config.hidden_size
    queries, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "q_proj": (queries, inputs),
        "k_proj": (groups, inputs),
        "v_proj": (groups, inputs),
        "o_proj": (c.hidden_size, queries),
    }


def _rotate(
    config: DrafterConfig, x_RHK: Tensor, position_R: Tensor, *, back: bool = False
) -> Tensor:
    """Return the rows rotated, Llama's rotate-half form, or rotated back."""
    cos, sin = rotary_tables(position_R.unsqueeze(1), config.head_dim, config.rope_theta)
    half = config.head_dim // 2
    cos, sin = cos[..., :half].to(x_RHK.dtype), sin[..., :half].to(x_RHK.dtype)
    a, b = x_RHK.chunk(2, dim=-1)
    out = torch.empty_like(x_RHK, memory_format=torch.contiguous_format)
    sign = -1.0 if back else 1.0
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin, value=sign)
    return out


def _llama_query(
    config: DrafterConfig, inner: Inner, mixed: Tensor, position_R: Tensor
) -> tuple[Tensor]:
    return (_rotate(config, mixed.unflatten(-1, (-1, config.head_dim)), position_R),)


def _llama_key_value(
    config: DrafterConfig, inner: Inner, mixed: Tensor, position_R: Tensor
) -> tuple[Tensor, Tensor]:
    shape = (2, config.num_key_value_heads, config.head_dim)
    key, value = mixed.unflatten(-1, shape).unbind(1)
    return _rotate(config, key, position_R), value


def _llama_backward(
    config: DrafterConfig,
    inner: Inner,
    mixed: Tensor,
    position_R: Tensor,
    grads: Sequence[Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Turn the gradient of query or key back; a value's is its columns'."""
    turned = _rotate(config, grads[0], position_R, back=True)
    return torch.cat([turned, *grads[1:]], 1).flatten(1), {}


def _llama_decode(
    config: DrafterConfig, weights: Mapping[str, Tensor], both: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotary_tables(positions_T, config.head_dim, config.rope_theta)
    q, k, v = (
        F.linear(both, weights[f"{name}_proj"]).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
        for name in "qkv"
    )
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


def _mla_decode(
    config: DrafterConfig, weights: Mapping[str, Tensor], both: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    first, latent = list(mla.shapes(config))[:2]
    (q,) = mla.query(config, weights, F.linear(both, weights[first]), positions_T)
    k, v = mla.key_value(config, weights, F.linear(both, weights[latent]), positions_T)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


FAMILIES = {
    "eagle3": Family(
        shapes=_llama_shapes,
        num_first=3,
        divisor=lambda config: math.sqrt(config.head_dim),
        query=_llama_query,
        key_value=_llama_key_value,
        query_backward=_llama_backward,
        key_value_backward=_llama_backward,
        decode=_llama_decode,
    ),
    "eagle3_mla": Family(
        shapes=mla.shapes,
        num_first=2,
        divisor=mla.divisor,
        query=mla.query,
        key_value=mla.key_value,
        query_backward=partial(mla.backward, mla.query),
        key_value_backward=partial(mla.backward, mla.key_value),
        decode=_mla_decode,
    ),
}
