"""The ridge start: a drafter in closed form, by regressing the target's next state.

The equations stand in docs/ridge.md: one streamed pass over the samples, one linear solve.

Legend: T tokens, D hidden size, L aux layers, F = L*D + D features, G key/value heads, R query
heads a key head, K head dim, J = G*K.
Source: own; measured against copied and random starts in RESULTS.md.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.drafter import ranks
from eyas.drafter.checkpoint import load_tensors, save_tensors
from eyas.drafter.config import AUX_STATES
from eyas.drafter.layers import rms_norm
from eyas.drafter.mla import divisor, shape_of
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

    def save(self, path: Path, begin: int) -> None:
        """Write the sums, and the document with which they go on."""
        sums = {"gram_FF": self.gram_FF, "cross_FD": self.cross_FD}
        save_tensors(path, sums, {"begin": str(begin), "rows": str(self.rows)})

    def load(self, path: Path) -> int:
        """Take over saved sums; return the document with which they go on."""
        sums, about = load_tensors(path)
        self.gram_FF, self.cross_FD = sums["gram_FF"], sums["cross_FD"]
        self.rows = float(about["rows"])
        return int(about["begin"])

    def solve(self, strength: float) -> Tensor:
        """Return the map [D, F] from features to state; `strength` is relative to unit features.

        Raises: EyasError if there are no rows, or the sums are not finite, or `strength` too small.
        """
        if not self.rows:
            raise EyasError(
                "train.start=ridge: expected documents of three tokens or more, got none",
                hint="train on more data, lower extract.final_every, or set train.start=random",
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
    documents: Documents,
    embed_VD: Tensor,
    norm_weight_D: Tensor,
    eps: float,
    *,
    windows: Sequence[int] = (),
    path: Path | None = None,
) -> NormalEquations:
    """Return the normal equations of all documents, in one pass.

    With the `windows` of the documents (`plan_epoch`) the sums are saved at `path` before one is
    left, and the pass goes on from there.
    """
    width = embed_VD.shape[1]
    equations = NormalEquations((AUX_STATES + 1) * width, width)
    begin = equations.load(path) if path and path.is_file() else 0
    for index in range(begin, len(documents.lengths)):
        if path and index > begin and windows[index] != windows[index - 1] and ranks.leads():
            equations.save(path, index)
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
    heads can carry, goes through the attention, whose rows attend to themselves. Final norm and
    head are the target's; the norm's weight is scaled by `norm_scale` (softer logits, same argmax).
    down_proj is 0.
    """
    weights_DF = equations.solve(strength)
    aux = equations.gram_FF.shape[0] - drafter.config.hidden_size
    cov_DD = equations.gram_FF[aux:, aux:] / equations.rows
    generator = torch.Generator().manual_seed(seed)
    width, layer = drafter.config.hidden_size, drafter.midlayer
    with torch.no_grad():
        _zero_projections(drafter)
        drafter.fc.weight.copy_(weights_DF[:, :aux])
        _LAY_IN[drafter.config.family](drafter, weights_DF[:, aux:], cov_DD, generator)
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            nn.init.normal_(projection.weight, std=width**-0.5, generator=generator)
        drafter.norm.weight.copy_(norm_weight_D * norm_scale)
        drafter.lm_head.weight.copy_(head_ND)


def _zero_projections(drafter: Drafter) -> None:
    """Give the layer zero matrices, but for gate and up, and norms of one."""
    for parameter in drafter.midlayer.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.zero_()


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


def _lay_in_llama(
    drafter: Drafter, map_DD: Tensor, cov_DD: Tensor, generator: torch.Generator
) -> None:
    """Let v_proj and o_proj carry the map, q and k share a random projection of the embedding.

    o_proj reads each value head from its R query heads, an R-th from each.
    """
    attention, config = drafter.midlayer.self_attn, drafter.config
    groups = config.num_attention_heads // config.num_key_value_heads
    K, width = config.head_dim, config.hidden_size
    value_JD, basis_DJ = _low_rank(map_DD, cov_DD, config.num_key_value_heads * K)
    attention.weight("v_proj")[:, :width] = value_JD.to(attention.weight("v_proj").dtype)
    basis_DGK = basis_DJ.unflatten(1, (config.num_key_value_heads, -1)) / groups
    attention.weight("o_proj").copy_(basis_DGK.repeat_interleave(groups, dim=1).flatten(1))
    std = (SELF_SCORE / (width * K**0.5)) ** 0.5  # score = K * width * std^2 / sqrt(K)
    shared_GKD = torch.empty(config.num_key_value_heads, K, width)
    nn.init.normal_(shared_GKD, std=std, generator=generator)
    attention.weight("k_proj")[:, :width] = shared_GKD.flatten(0, 1)
    attention.weight("q_proj")[:, :width] = shared_GKD.repeat_interleave(groups, 0).flatten(0, 1)


def _lay_in_mla(
    drafter: Drafter, map_DD: Tensor, cov_DD: Tensor, generator: torch.Generator
) -> None:
    """Let the latent carry the map's first principal axes, each at unit variance.

    The latent is normed on its way, which no linear map survives; but at unit variance its RMS is
    near one for every token. Values are slices of it, as often as they fit into the heads, and
    o_proj puts axes and sizes back. The rotated part of query and key is 0.
    """
    config, s = drafter.config, shape_of(drafter.config)
    weight, width = drafter.midlayer.self_attn.weight, config.hidden_size
    heads, values = config.num_attention_heads, config.num_attention_heads * s.v_head_dim
    rank = min(s.kv_lora_rank, values, width)
    value_JD, basis_DJ = _low_rank(map_DD, cov_DD, rank)
    size_J = ((value_JD @ cov_DD) * value_JD).sum(1).clamp(min=1e-24).sqrt()
    latent_JD = (value_JD / size_J.unsqueeze(1)).to(weight("kv_a_proj_with_mqa").dtype)
    weight("kv_a_proj_with_mqa")[:rank, :width] = latent_JD
    weight("kv_a_layernorm").fill_((rank / s.kv_lora_rank) ** 0.5)
    copies = values // rank
    value_HVJ = torch.eye(rank).repeat(copies, 1)
    both = weight("kv_b_proj").unflatten(0, (heads, -1))
    carried = torch.zeros(values, rank)
    carried[: copies * rank] = value_HVJ
    both[:, s.qk_nope_head_dim :, :rank] = carried.unflatten(0, (heads, -1))
    weight("o_proj")[:, : copies * rank] = (basis_DJ * size_J / copies).repeat(1, copies)
    compared = min(rank, s.q_lora_rank or rank)  # the axes of most variance are the last
    score_HPC = torch.empty(heads, s.qk_nope_head_dim, compared)
    std = (SELF_SCORE * divisor(config) / (compared * s.qk_nope_head_dim)) ** 0.5
    nn.init.normal_(score_HPC, std=std, generator=generator)
    both[:, : s.qk_nope_head_dim, rank - compared : rank] = score_HPC
    if s.q_lora_rank is None:
        asked = weight("q_proj").unflatten(0, (heads, -1))[..., :width]
        asked[:, : s.qk_nope_head_dim] = score_HPC @ latent_JD
        return
    weight("q_a_proj")[:compared, :width] = latent_JD[-compared:]
    weight("q_a_layernorm").fill_((compared / s.q_lora_rank) ** 0.5)
    asked = weight("q_b_proj").unflatten(0, (heads, -1))[..., :compared]
    asked[:, : s.qk_nope_head_dim] = score_HPC


_LAY_IN = {"eagle3": _lay_in_llama, "eagle3_mla": _lay_in_mla}
