"""A Llama forward pass by hand, over the weights of a transformers model and a cache of our own.

Two passes: `prefill` of one prompt alone, `decode` of one token for every row. A row gets the same
numbers whatever the others hold: matrix products always have the same number of rows, and each
row's attention reads its own keys only, without padding.
Source: transformers/models/llama/modeling_llama.py (compared with it in tests/states).

Legend: S slots (rows), T tokens, D hidden size, V vocabulary, H heads, G key-value heads, K head
dim, R query heads that share a key-value head.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from eyas.errors import EyasError

_GROW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; q, k and v in one matrix, gate and up in one."""

    input_norm_D: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    post_norm_D: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The weights in the dtype of the matrix products; norms and residual stream are float32."""

    embed_VD: torch.Tensor
    layers: tuple[Layer, ...]
    norm_D: torch.Tensor
    lm_head_VD: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    inverse_frequencies: torch.Tensor
    max_length: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the matrix products."""
        return self.lm_head_VD.dtype


class Cache:
    """Keys and values [layers, 2, S, G, length, K]; grows by blocks when a longer row comes."""

    def __init__(self, llama: Llama, slots: int) -> None:
        shape = (len(llama.layers), 2, slots, llama.num_kv_heads, 0, llama.head_dim)
        self.states = torch.zeros(shape, dtype=llama.dtype)

    def ensure(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        have = self.states.shape[4]
        if length > have:
            room = -(-length // _GROW_TOKENS) * _GROW_TOKENS
            self.states = F.pad(self.states, (0, 0, 0, room - have))


def from_model(model: Any) -> Llama:
    """Take the weights of a transformers Llama, in its dtype.

    Raises: EyasError for another architecture, biases, scaled positions or another activation.
    """
    config = model.config
    rope = config.rope_parameters
    plain = rope["rope_type"] == "default" and not config.attention_bias and not config.mlp_bias
    if config.model_type != "llama" or not plain or config.hidden_act != "silu":
        raise EyasError(
            f"local sampling: expected a plain Llama, got '{config.model_type}' with {rope}",
            hint="serve this target with SGLang and set endpoint to it",
        )
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return Llama(
        embed_VD=model.model.embed_tokens.weight.detach(),
        layers=tuple(_layer(layer) for layer in model.model.layers),
        norm_D=model.model.norm.weight.detach().float(),
        lm_head_VD=model.lm_head.weight.detach(),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        inverse_frequencies=1.0 / rope["rope_theta"] ** exponents,
        max_length=config.max_position_embeddings,
    )


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return Layer(
        layer.input_layernorm.weight.detach().float(),
        torch.cat(qkv).detach(),
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach().float(),
        torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
        mlp.down_proj.weight.detach(),
    )


def prefill(llama: Llama, cache: Cache, slot: int, ids: list[int]) -> torch.Tensor:
    """Run one prompt alone, fill its slot of the cache, return the logits [V] after its end."""
    length = len(ids)
    cache.ensure(length)
    cos, sin = _rotary(llama, torch.arange(length))
    hidden_TD = F.embedding(torch.tensor(ids), llama.embed_VD).float()
    for index, layer in enumerate(llama.layers):
        q, k, v = _project(llama, layer, hidden_TD, cos, sin)
        cache.states[index, 0, slot, :, :length] = k.transpose(0, 1)
        cache.states[index, 1, slot, :, :length] = v.transpose(0, 1)
        q_HTK, k_GTK, v_GTK = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q_HTK, k_GTK, v_GTK, is_causal=True, enable_gqa=True)
        hidden_TD = _finish(llama, layer, hidden_TD, mixed[0].transpose(0, 1))
    return _logits(llama, hidden_TD[-1:])[0]


def decode(llama: Llama, cache: Cache, last_S: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Add one token to every row and return the logits [S, V]; a length of 0 marks an idle row.

    Args:
        llama: The weights.
        cache: Holds `lengths[s]` tokens of row s; gets one more.
        last_S: The newest token of each row, not in the cache yet.
        lengths: Tokens of each row that are in the cache.
    """
    cache.ensure(max(lengths) + 1)
    lengths_S = torch.tensor(lengths)
    rows_S = torch.arange(len(lengths))
    busy = [slot for slot, length in enumerate(lengths) if length]
    cos, sin = _rotary(llama, lengths_S)
    hidden_SD = F.embedding(last_S, llama.embed_VD).float()
    mixed = torch.zeros(len(lengths), llama.num_heads, llama.head_dim, dtype=llama.dtype)
    for index, layer in enumerate(llama.layers):
        q, k, v = _project(llama, layer, hidden_SD, cos, sin)
        keys, values = cache.states[index]
        keys[rows_S, :, lengths_S] = k
        values[rows_S, :, lengths_S] = v
        q_SGRK = q.unflatten(1, (llama.num_kv_heads, -1))
        mixed_SGRK = mixed.view_as(q_SGRK)
        for slot in busy:
            own = slice(0, lengths[slot] + 1)
            mixed_SGRK[slot] = F.scaled_dot_product_attention(
                q_SGRK[None, slot], keys[None, slot, :, own], values[None, slot, :, own]
            )[0]
        hidden_SD = _finish(llama, layer, hidden_SD, mixed)
    return _logits(llama, hidden_SD)


def _project(
    llama: Llama, layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rotated q [T, H, K], rotated k [T, G, K] and v [T, G, K]."""
    normed = _norm(hidden, layer.input_norm_D, llama.eps).to(llama.dtype)
    heads = F.linear(normed, layer.qkv).unflatten(1, (-1, llama.head_dim))
    turning = heads[:, : llama.num_heads + llama.num_kv_heads].float()
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([-second, first], dim=-1) * sin
    q, k = turned.to(llama.dtype).split([llama.num_heads, llama.num_kv_heads], dim=1)
    return q, k, heads[:, llama.num_heads + llama.num_kv_heads :]


def _finish(llama: Llama, layer: Layer, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """Add the attention's output and the MLP to the residual stream."""
    hidden = hidden + F.linear(mixed.flatten(1), layer.output)
    normed = _norm(hidden, layer.post_norm_D, llama.eps).to(llama.dtype)
    gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer.down)


def _logits(llama: Llama, hidden: torch.Tensor) -> torch.Tensor:
    normed = _norm(hidden, llama.norm_D, llama.eps).to(llama.dtype)
    return F.linear(normed, llama.lm_head_VD).float()


def _norm(hidden: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps) * weight_D


def _rotary(llama: Llama, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, 1, K] of rotate-half positions."""
    angles = torch.outer(positions.float(), llama.inverse_frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()
