"""The EAGLE-3 drafter and its unrolling over training-time-test steps.

One decoder layer over [input_layernorm(embedding), hidden_norm(hidden)]; hidden is fc(three aux
states) at step 0 and the layer's own un-normed output after it; logits = lm_head(norm(output)).
Parameter names are the keys that SGLang and vLLM load. The target's embeddings are handed in.

Legend: T rows of a pack, A active rows, D hidden size, L aux layers, H heads, G key/value heads,
K head dim, N draft vocabulary, V target vocabulary.
Source: EAGLE-3, arXiv 2503.01840; SGLang python/sglang/srt/models/llama_eagle3.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.drafter.attention import Block, KeyValue, attend, build_blocks
from eyas.drafter.config import DrafterConfig
from eyas.drafter.layers import apply_rotary, gated_mlp, rms_norm, rotary_tables


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

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP."""
        return gated_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class DecoderLayer(nn.Module):
    """EAGLE-3's one layer; `Drafter.unroll` walks through it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = Mlp(width, config.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rows of a pack are computed, where they stand, and what they may see."""

    active_A: Tensor  # ascending rows
    position_T: Tensor  # in the document
    blocks: list[Block]


def build_layout(predictions_P: Tensor, lengths: Sequence[int], steps: int) -> Layout:
    """Return the layout that computes every row some prediction needs at some step.

    Row p-1-k of each prediction p and step k, where it lies in p's document.
    """
    position_T = torch.cat([torch.arange(length) for length in lengths]).to(predictions_P.device)
    rows = [rows_at(predictions_P, position_T, step)[0] for step in range(steps)]
    active_A = torch.cat(rows).unique(sorted=True)
    return Layout(active_A=active_A, position_T=position_T, blocks=build_blocks(active_A, lengths))


def rows_at(predictions_P: Tensor, position_T: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the rows p-1-step, and which predictions (bool [P]) have one in their document."""
    exists_P = position_T[predictions_P] >= 1 + step
    return predictions_P[exists_P] - 1 - step, exists_P


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

    def unroll(self, embed_TD: Tensor, aux_TLD: Tensor, layout: Layout, steps: int) -> list[Tensor]:
        """Return the layer's un-normed output of the active rows for each step, [A, D] each.

        The embedding half of q, k and v depends on the token alone: it is computed once a token,
        and row t reads it at t+1+k. Past the end of its document a row reads some other token;
        no such row counts, and no row that counts sees its key.
        """
        projected = self._project_tokens(embed_TD)
        hidden_TD = self.fc(aux_TLD.flatten(1))
        every_T = torch.arange(len(embed_TD), device=embed_TD.device)
        first = self._keys(projected, self.midlayer.hidden_norm(hidden_TD), every_T, layout, 0)
        hidden_AD = hidden_TD[layout.active_A]
        own: list[KeyValue] = []
        outputs = []
        for step in range(steps):
            normed_AD = self.midlayer.hidden_norm(hidden_AD)
            if step:
                own.append(self._keys(projected, normed_AD, layout.active_A, layout, step))
            query_AHK = self._queries(projected, normed_AD, layout, step)
            hidden_AD = self._finish(hidden_AD, attend(query_AHK, first, own, layout.blocks))
            outputs.append(hidden_AD)
        return outputs

    def _project_tokens(self, embed_TD: Tensor) -> "_Projected":
        attention, width = self.midlayer.self_attn, self.config.hidden_size
        normed_TD = self.midlayer.input_layernorm(embed_TD)
        return _Projected(
            *(
                F.linear(normed_TD, projection.weight[:, :width])
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
        )

    def _queries(
        self, projected: "_Projected", normed_AD: Tensor, layout: Layout, step: int
    ) -> Tensor:
        attention, width = self.midlayer.self_attn, self.config.hidden_size
        rows_A = layout.active_A
        query = _read(projected.query, rows_A, step)
        query = query + F.linear(normed_AD, attention.q_proj.weight[:, width:])
        return self._rotate(query.unflatten(-1, (attention.num_heads, -1)), rows_A, layout, step)

    def _keys(
        self, projected: "_Projected", normed_RD: Tensor, rows_R: Tensor, layout: Layout, step: int
    ) -> KeyValue:
        attention, width = self.midlayer.self_attn, self.config.hidden_size
        key = _read(projected.key, rows_R, step)
        key = key + F.linear(normed_RD, attention.k_proj.weight[:, width:])
        value = _read(projected.value, rows_R, step)
        value = value + F.linear(normed_RD, attention.v_proj.weight[:, width:])
        heads = (attention.num_kv_heads, -1)
        rotated_RGK = self._rotate(key.unflatten(-1, heads), rows_R, layout, step)
        return KeyValue(rotated_RGK, value.unflatten(-1, heads))

    def _rotate(self, x: Tensor, rows_R: Tensor, layout: Layout, step: int) -> Tensor:
        """Rotate [R, heads, K] by the rows' positions t + step."""
        position_R1 = (layout.position_T[rows_R] + step).unsqueeze(1)
        cos, sin = rotary_tables(position_R1, self.config.head_dim, self.config.rope_theta)
        return apply_rotary(x, cos, sin)

    def _finish(self, hidden_AD: Tensor, attended: Tensor) -> Tensor:
        layer = self.midlayer
        hidden_AD = hidden_AD + layer.self_attn.o_proj(attended)
        return hidden_AD + layer.mlp(layer.post_attention_layernorm(hidden_AD))


@dataclass(frozen=True, slots=True)
class _Projected:
    """The embedding half of q, k and v, a row a token."""

    query: Tensor
    key: Tensor
    value: Tensor


def _read(token_T: Tensor, rows_R: Tensor, step: int) -> Tensor:
    """Return what rows t read at this step: the entry of token t+1+step."""
    return token_T[(rows_R + 1 + step).clamp(max=len(token_T) - 1)]


def random_start(drafter: Drafter, seed: int) -> None:
    """Fill the drafter with the usual random start: N(0, 0.02) matrices, norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            nn.init.ones_(parameter)
