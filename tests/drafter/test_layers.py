import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eyas.drafter.layers import apply_rotary, rms_norm, rotary_tables


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )


def test_rms_norm_equals_llamas() -> None:
    x, weight = noise(5, 32), noise(32)
    theirs = LlamaRMSNorm(32, eps=1e-5)
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), theirs(x))


def test_rms_norm_takes_the_mean_square_of_half_precision_in_float32() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square overflows float16
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 0.0), torch.ones_like(x))


def test_rotary_equals_llamas(llama: LlamaConfig) -> None:
    positions = torch.tensor([0, 1, 7, 2000])
    q, k = noise(1, 4, 4, 8), noise(1, 4, 4, 8)
    cos, sin = LlamaRotaryEmbedding(llama)(q, positions[None])
    want, _ = apply_rotary_pos_emb(q, k, cos, sin)
    tables = rotary_tables(positions, head_dim=8, theta=100_000.0)
    torch.testing.assert_close(apply_rotary(q, *tables), want, rtol=1e-5, atol=1e-5)
