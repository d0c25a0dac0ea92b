"""The ridge start: a drafter in closed form, by regressing the target's next state.

The equations stand in docs/ridge.md: one streamed pass over the samples, one linear solve.

Legend: T tokens, D hidden size, L aux layers, F = L*D + D features, G key/value heads, R query
heads a key head, K head dim, J = G*K.
Source: own; measured against copied and random starts in RESULTS.md.
"""

import torch
from torch import Tensor, nn

from eyas.drafter.config import AUX_STATES
from eyas.drafter.layers import rms_norm
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Document, Documents
from eyas.errors import EyasError

SELF_SCORE = 12.0  # attention score of a row on itself; on a row of another token about 0 +- 1.5


class NormalEquations:
    """Sums over rows in float64: features by features, features by regressed state."""

    def __init__(self, num_features: int, width: int) -> None:
        self.gram_FF = torch.zeros(num_features, num_features, dtype=torch.float64)
        self.cross_FD = torch.zeros(num_features, width, dtype=torch.float64)
        self.rows = 0.0

    def add(self, document: Document, embed_TD: Tensor, norm_weight_D: Tensor, eps: float) -> None:
        """Add a document's rows t >= 1; position 0 is the attention sink and like no other.

        A row whose final state is NaN was not kept by the store, and is left out.
        `embed_TD` are the target's embeddings of its tokens, `norm_weight_D` its final norm's.
        """
        token_TD = rms_norm(embed_TD[2:], torch.ones_like(norm_weight_D), eps)
        features_TF = torch.cat([document.aux_TLD[1:-1].flatten(1), token_TD], dim=1).double()
        state_TD = document.final_TD[2:].double() / norm_weight_D.double()
        kept_T = ~state_TD.isnan().all(-1)
        if not kept_T.all():
            features_TF, state_TD = features_TF[kept_T], state_TD[kept_T]
        self.accumulate(features_TF, state_TD)

    def accumulate(self, features_TF: Tensor, state_TD: Tensor, weight: float = 1.0) -> None:
        """Add rows; their products are taken in the type that they have.

        In float64 without a second F x F: 6.6 GB at a hidden size of 7168.
        """
        for total, other in ((self.gram_FF, features_TF), (self.cross_FD, state_TD)):
            if features_TF.dtype == total.dtype:
                total.addmm_(features_TF.T, other, alpha=weight)
            else:
                total.add_(features_TF.T @ other, alpha=weight)
        self.rows += weight * len(features_TF)

    def solve(self, strength: float) -> Tensor:
        """Return the map [D, F] from features to state; `strength` is relative to unit features.

        Raises: EyasError if there are no rows, or the sums are not finite, or `strength` too small.
        """
        if not self.rows:
            raise EyasError(
                "train.start=ridge: expected documents of three tokens or more, got none",
                hint="train on more data, or set train.start=random",
            )
        if not torch.isfinite(self.gram_FF.diagonal()).all():
            raise EyasError(
                "train.start=ridge: the hidden states hold inf or NaN", hint="re-run extract"
            )
        scale_F = (self.gram_FF.diagonal() / self.rows).sqrt().clamp(min=1e-12)
        unit_FF = self.gram_FF / scale_F / scale_F.unsqueeze(1)
        unit_FF.diagonal().add_(strength * self.rows)
        try:
            weights_FD = torch.linalg.solve(unit_FF, self.cross_FD / scale_F.unsqueeze(1))
        except torch.linalg.LinAlgError:
            raise EyasError(
                f"train.start=ridge: no one solution over {self.rows:.0f} rows at strength "
                f"{strength:g}",
                hint="raise train.ridge_strength or train.feedback_strength (default: 0.01, 0.1)",
            ) from None
        return (weights_FD / scale_F.unsqueeze(1)).T


def sum_equations(
    documents: Documents, embed_VD: Tensor, norm_weight_D: Tensor, eps: float
) -> NormalEquations:
    """Return the normal equations of all documents, in one pass."""
    width = embed_VD.shape[1]
    equations = NormalEquations((AUX_STATES + 1) * width, width)
    for index in range(len(documents.lengths)):
        document = documents.read(index)
        equations.add(document, embed_VD[document.input_ids_T.long()], norm_weight_D, eps)
    return equations


def ridge_start(
    drafter: Drafter,
    equations: NormalEquations,
    *,
    strength: float,
    norm_scale: float,
    norm_weight_D: Tensor,
    head_ND: Tensor,
    seed: int,
) -> None:
    """Fill the drafter so that its first output is the ridge estimate of the target's next state.

    fc takes the aux part. The part of the next token's embedding, cut to the rank that the value
    heads can carry, goes through v_proj and o_proj; q and k share a random projection of the
    embedding, so that a row attends to itself. Final norm and head are the target's; the norm's
    weight is scaled by `norm_scale` (softer logits, same argmax). down_proj is 0.
    """
    weights_DF = equations.solve(strength)
    aux = equations.gram_FF.shape[0] - drafter.config.hidden_size
    cov_DD = equations.gram_FF[aux:, aux:] / equations.rows
    generator = torch.Generator().manual_seed(seed)
    layer, width = drafter.midlayer, drafter.config.hidden_size
    with torch.no_grad():
        _zero_projections(drafter)
        drafter.fc.weight.copy_(weights_DF[:, :aux])
        value_JD, basis_DJ = _low_rank(
            weights_DF[:, aux:], cov_DD, layer.self_attn.v_proj.out_features
        )
        layer.self_attn.v_proj.weight[:, :width] = value_JD.to(layer.self_attn.v_proj.weight.dtype)
        _spread_output(drafter, basis_DJ)
        _attend_to_self(drafter, generator)
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            nn.init.normal_(projection.weight, std=width**-0.5, generator=generator)
        drafter.norm.weight.copy_(norm_weight_D * norm_scale)
        drafter.lm_head.weight.copy_(head_ND)


def _zero_projections(drafter: Drafter) -> None:
    layer = drafter.midlayer
    attention = layer.self_attn
    for module in (attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.down_proj):
        module.weight.zero_()
    for norm in (layer.hidden_norm, layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.fill_(1.0)


def _low_rank(map_DD: Tensor, cov_DD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return (value [J, D], basis [D, J]) whose product is the best map of this rank.

    Best for inputs of this covariance: the map's outputs are projected on their first principal
    axes. A rank above D is filled with zeros.
    """
    _, axes_DD = torch.linalg.eigh(map_DD @ cov_DD @ map_DD.T)  # ascending
    used = min(rank, len(axes_DD))
    basis_DJ = map_DD.new_zeros(len(map_DD), rank)
    basis_DJ[:, :used] = axes_DD[:, -used:]
    return basis_DJ.T @ map_DD, basis_DJ


def _spread_output(drafter: Drafter, basis_DJ: Tensor) -> None:
    """Let o_proj read each value head from its R query heads, an R-th from each."""
    attention = drafter.midlayer.self_attn
    groups = attention.num_heads // attention.num_kv_heads
    basis_DGK = basis_DJ.unflatten(1, (attention.num_kv_heads, -1)) / groups
    attention.o_proj.weight.copy_(basis_DGK.repeat_interleave(groups, dim=1).flatten(1))


def _attend_to_self(drafter: Drafter, generator: torch.Generator) -> None:
    """Give q and k one random projection a key head, scaled for `SELF_SCORE` on unit inputs."""
    attention, config = drafter.midlayer.self_attn, drafter.config
    K, width = config.head_dim, config.hidden_size
    shared_GKD = torch.empty(attention.num_kv_heads, K, width)
    std = (SELF_SCORE / (width * K**0.5)) ** 0.5  # score = K * width * std^2 / sqrt(K)
    nn.init.normal_(shared_GKD, std=std, generator=generator)
    groups = attention.num_heads // attention.num_kv_heads
    attention.k_proj.weight[:, :width] = shared_GKD.flatten(0, 1)
    attention.q_proj.weight[:, :width] = shared_GKD.repeat_interleave(groups, 0).flatten(0, 1)
