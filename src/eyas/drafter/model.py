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
from eyas.drafter.families import family_of
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
    """The family's tensors; the first read the embedding (first half) and the hidden state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        for name, shape in family_of(config).shapes(config).items():
            matrix = len(shape) > 1
            self.add_module(
                name,
                nn.Linear(shape[1], shape[0], bias=False)
                if matrix
                else RmsNorm(shape[0], config.rms_norm_eps),
            )

    def weight(self, name: str) -> nn.Parameter:
        """Return the weight of a projection or norm."""
        return self.get_parameter(f"{name}.weight")


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
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RmsNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layers
            )
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

        Embeddings and aux states have the type in which all is computed. With `fc_norm` the aux
        states come with an RMS of one (`unit_rms`), and fc's columns take the norms' weights.
        """
        attention, family = self.midlayer.self_attn, family_of(self.config)
        names = list(family.shapes(self.config))
        inner = {name: attention.weight(name) for name in names[family.num_first : -1]}
        given = (embed_TD, aux_TLD.flatten(1), layout, self.config)
        return Unroll.apply(
            given, (steps, recompute), list(inner), *self._weights(), *inner.values()
        )

    def _fc(self) -> Tensor:
        if not self.config.fc_norm:
            return self.fc.weight
        norms_E = torch.cat(list[Tensor](self.fc_norm.parameters()))
        return self.fc.weight * norms_E

    def _weights(self) -> Weights:
        layer, width = self.midlayer, self.config.hidden_size
        attention, family = layer.self_attn, family_of(self.config)
        first = list(family.shapes(self.config))[: family.num_first]
        mixed = torch.cat([attention.weight(name) for name in first])
        return Weights(
            fc_DE=self._fc(),
            token_JD=mixed[:, :width],
            hidden_JD=mixed[:, width:],
            out_DJ=attention.weight("o_proj"),
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
