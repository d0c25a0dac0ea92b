"""The layers that training and decoding share, as pure functions of their weights.

Shapes: B batch, T tokens, D hidden size, H heads, K head dim; a leading `...` is any batch.
Source: Llama as in transformers/models/llama/modeling_llama.py (rotate-half form of RoPE).
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis to unit RMS, then by `weight`; the mean square is taken in float32.

    Float64 input stays float64, so that tests can compare exactly.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Scale the last axis to unit RMS."""
    return rms_norm(x, x.new_ones(()), eps)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables of RoPE in float32, each [*positions.shape, K]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / theta ** (exponents / head_dim)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., K] by tables that broadcast against it, Llama's rotate-half form."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)
