"""The EAGLE-3 drafter and its unrolling over training-time-test steps.

One decoder layer over [input_layernorm(embedding), hidden_norm(hidden)]; hidden is fc(three aux
states) at step 0 and the layer's own un-normed output after it; logits = lm_head(norm(output)).
Parameter names are the keys that SGLang and vLLM load. The target's embeddings are handed in.

Legend: T rows of a pack, A active rows, D hidden size, L aux layers, H heads, G key/value heads,
K head dim, N draft vocabulary, V target vocabulary.
Source: EAGLE-3, arXiv 2503.01840; SGLang python/sglang/srt/models/llama_eagle3.py.
"""

import torch
from torch import Tensor, nn

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layers import rms_norm
from eyas.drafter.unroll import Layout, Unroll, Weights


class RmsNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections; q, k and v read the embedding (first half) and the hidden state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, K = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * width, self.num_heads * K, bias=False)
        self.k_proj = nn.Linear(2 * width, self.num_kv_heads * K, bias=False)
        self.v_proj = nn.Linear(2 * width, self.num_kv_heads * K, bias=False)
        self.o_proj = nn.Linear(self.num_heads * K, width, bias=False)


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class DecoderLayer(nn.Module):
    """EAGLE-3's one layer; `Unroll` walks through it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = Mlp(width, config.intermediate_size)


class Drafter(nn.Module):
    """All that is trained, and the two vocabulary maps."""

    def __init__(self, config: DrafterConfig, t2d_V: Tensor) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, width, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = RmsNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        used_N = t2d_V.nonzero().flatten()
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", used_N - torch.arange(len(used_N)))
        self.register_buffer("t2d", t2d_V)

    def logits(self, hidden_AD: Tensor) -> Tensor:
        """Return the logits over the draft vocabulary, [A, N]."""
        return self.lm_head(self.norm(hidden_AD))

    def unroll(
        self,
        embed_TD: Tensor,
        aux_TLD: Tensor,
        layout: Layout,
        steps: int,
        *,
        recompute: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the layer's un-normed output of the active rows for each step, [A, D] each.

        Embeddings and aux states have the type in which all is computed.
        """
        inputs, walk = (embed_TD, aux_TLD.flatten(1)), (steps, recompute)
        return Unroll.apply(inputs, layout, self.config, walk, *self._weights())

    def _weights(self) -> Weights:
        layer, width = self.midlayer, self.config.hidden_size
        attention = layer.self_attn
        mixed = torch.cat(
            [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        )
        return Weights(
            fc_DE=self.fc.weight,
            token_JD=mixed[:, :width],
            hidden_JD=mixed[:, width:],
            out_DJ=attention.o_proj.weight,
            gate_up=torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            down_DI=layer.mlp.down_proj.weight,
            input_norm_D=layer.input_layernorm.weight,
            hidden_norm_D=layer.hidden_norm.weight,
            post_norm_D=layer.post_attention_layernorm.weight,
        )


def random_start(drafter: Drafter, seed: int) -> None:
    """Fill the drafter with the usual random start: N(0, 0.02) matrices, norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            nn.init.ones_(parameter)
