"""DeepSeek's latent attention in the drafter's layer, as `Eagle3DeepseekV2ForCausalLM` has it.

Keys and values of a token are made of one short vector, kv_lora_rank numbers and a rotated key that
all heads share: a server caches that alone. Here they are spelt out, a key and a value for each
head, as training and drafting read every row anew. RoPE turns neighbours (2i, 2i + 1); YaRN
stretches it and, by `mscale_all_dim`, sharpens the scores.

Legend: R rows, H heads, K head dim (without position, then rotated), Q columns of the query, C of
the latent, N of them kv_lora_rank.
Source: DeepSeek-V2, arXiv 2405.04434; SGLang srt/models/kimi_k25_eagle3.py and deepseek_v2.py;
YaRN, arXiv 2309.00071, as in srt/layers/rotary_embedding/rope_variant.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from eyas.drafter.config import DrafterConfig, MlaShape, Yarn
from eyas.drafter.layers import rms_norm

Inner = Mapping[str, Tensor]
Heads = Callable[[DrafterConfig, Inner, Tensor, Tensor], tuple[Tensor, ...]]


def shape_of(config: DrafterConfig) -> MlaShape:
    """Return the attention's sizes."""
    assert config.mla is not None
    return config.mla


def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the attention's tensors; the first two read embedding and hidden state."""
    s, heads, inputs = shape_of(config), config.num_attention_heads, 2 * config.hidden_size
    queries = heads * config.head_dim
    latent = {"kv_a_proj_with_mqa": (s.kv_lora_rank + s.qk_rope_head_dim, inputs)}
    inner: dict[str, tuple[int, ...]] = {
        "kv_a_layernorm": (s.kv_lora_rank,),
        "kv_b_proj": (heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank),
    }
    out = {"o_proj": (config.hidden_size, heads * s.v_head_dim)}
    if s.q_lora_rank is None:
        return {"q_proj": (queries, inputs)} | latent | inner | out
    lora = {"q_a_layernorm": (s.q_lora_rank,), "q_b_proj": (queries, s.q_lora_rank)}
    return {"q_a_proj": (s.q_lora_rank, inputs)} | latent | lora | inner | out


def divisor(config: DrafterConfig) -> float:
    """Return what scores are divided by."""
    yarn = shape_of(config).yarn
    return math.sqrt(config.head_dim) / (_mscale(yarn, yarn.mscale_all_dim) ** 2 if yarn else 1.0)


def query(
    config: DrafterConfig, inner: Inner, mixed_RQ: Tensor, position_R: Tensor
) -> tuple[Tensor]:
    """Return the rotated query, [R, H, K]."""
    s = shape_of(config)
    if s.q_lora_rank is not None:
        normed = rms_norm(mixed_RQ, inner["q_a_layernorm"], config.rms_norm_eps)
        mixed_RQ = normed.to(mixed_RQ.dtype) @ inner["q_b_proj"].T
    plain, turning = mixed_RQ.unflatten(-1, (-1, config.head_dim)).split(
        [s.qk_nope_head_dim, s.qk_rope_head_dim], dim=-1
    )
    return (torch.cat([plain, _rotate(config, turning, position_R)], dim=-1),)


def key_value(
    config: DrafterConfig, inner: Inner, mixed_RC: Tensor, position_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rotated key, [R, H, K], and the value, [R, H, v_head_dim]."""
    s = shape_of(config)
    latent_RN, turning = mixed_RC.split([s.kv_lora_rank, s.qk_rope_head_dim], dim=-1)
    normed = rms_norm(latent_RN, inner["kv_a_layernorm"], config.rms_norm_eps)
    both = (normed.to(mixed_RC.dtype) @ inner["kv_b_proj"].T).unflatten(
        -1, (config.num_attention_heads, -1)
    )
    plain, value = both.split([s.qk_nope_head_dim, s.v_head_dim], dim=-1)
    turned = _rotate(config, turning.unsqueeze(1), position_R)
    shared = turned.expand(-1, config.num_attention_heads, -1)
    return torch.cat([plain, shared], dim=-1), value


def backward(
    heads: Heads,
    config: DrafterConfig,
    inner: Inner,
    mixed_RJ: Tensor,
    position_R: Tensor,
    grads: Sequence[Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradients of the columns, and of the inner weights that `heads` reads."""
    with torch.enable_grad():
        leaves = {name: weight.detach().requires_grad_() for name, weight in inner.items()}
        columns = mixed_RJ.detach().requires_grad_()
        made = heads(config, leaves, columns, position_R)
        found = torch.autograd.grad(made, [columns, *leaves.values()], grads, allow_unused=True)
    named = zip(leaves, found[1:], strict=True)
    return found[0], {name: grad for name, grad in named if grad is not None}


def _rotate(config: DrafterConfig, x_RHP: Tensor, position_R: Tensor) -> Tensor:
    cos, sin = (table.unsqueeze(1).to(x_RHP.dtype) for table in _tables(config, position_R))
    a, b = x_RHP.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def _tables(config: DrafterConfig, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair, in float32."""
    s = shape_of(config)
    pairs = torch.arange(0, s.qk_rope_head_dim, 2, dtype=torch.float32, device=position_R.device)
    frequencies = 1.0 / config.rope_theta ** (pairs / s.qk_rope_head_dim)
    size = 1.0
    if s.yarn:
        kept = _kept_share(s.yarn, s.qk_rope_head_dim, config.rope_theta, pairs)
        frequencies = frequencies / s.yarn.factor * (1.0 - kept) + frequencies * kept
        size = _mscale(s.yarn, s.yarn.mscale) / _mscale(s.yarn, s.yarn.mscale_all_dim)
    angles = position_R.float().unsqueeze(1) * frequencies
    return angles.cos() * size, angles.sin() * size


def _kept_share(yarn: Yarn, width: int, theta: float, pairs: Tensor) -> Tensor:
    """Return how much of each frequency is left as it was: 1 for fast turns, 0 for slow ones."""

    def pair_that_turns(times: float) -> float:
        length = yarn.original_max_position_embeddings
        return width * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    return 1.0 - ((pairs / 2 - low) / max(high - low, 0.001)).clamp(0.0, 1.0)


def _mscale(yarn: Yarn, weight: float) -> float:
    return 0.1 * weight * math.log(yarn.factor) + 1.0 if yarn.factor > 1.0 else 1.0
