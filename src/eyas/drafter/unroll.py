"""The drafter's layer unrolled over training-time-test steps, with a backward written by hand.

What is not a matrix product costs as much as the products if it is left to autograd: gathered
copies, sums of seven gradients, saved intermediates. Here a step keeps its input, queries, softmax
sums, and the halves of the MLP; norms and activations are made again; gradients of weights and of
step 0's keys are summed in float32, in place. The type of the embeddings is the type of all
products; float64 stays float64.

Legend: T rows of a pack, A active rows, R rows of either kind, D hidden size, E = 3 D of the aux
states, H heads, G key/value heads, K head dim, I inner size of the MLP, J columns of what the
attention multiplies first, the query's before the rest ((H + 2 G) K of Llama's).
Source: EAGLE-3, arXiv 2503.01840; `tests/drafter/test_reference.py` has the naive form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.attention import (
    Block,
    Gradients,
    Kept,
    KeyValue,
    attend,
    attend_backward,
    build_blocks,
)
from eyas.drafter.config import DrafterConfig
from eyas.drafter.families import Backward, family_of


class Weights(NamedTuple):
    """The layer's weights; the attention's first are one matrix below the other, gate and up too.

    What a family has between these and the heads (`inner`) comes by name.
    """

    fc_DE: Tensor
    token_JD: Tensor  # the embedding half of the attention's first matrices
    hidden_JD: Tensor
    out_DJ: Tensor
    gate_up: Tensor
    down_DI: Tensor
    input_norm_D: Tensor
    hidden_norm_D: Tensor
    post_norm_D: Tensor


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


def normed(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMS-normed rows in the type of x, and the factor [R, 1] that made their RMS one."""
    wide = x if x.dtype == torch.float64 else x.float()
    norm_R1 = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    factor_R1 = norm_R1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * factor_R1).mul_(weight_D).to(x.dtype), factor_R1


def normed_backward(
    grad: Tensor, x: Tensor, factor_R1: Tensor, weight_D: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows in the type of the factor, and that of the weight."""
    unit = x * factor_R1
    weight_grad_D = torch.linalg.vecdot(grad.to(unit.dtype), unit, dim=0)
    scaled = grad * weight_D
    along_R1 = torch.linalg.vecdot(scaled, unit).unsqueeze(-1).div_(-x.shape[-1])
    return scaled.addcmul_(unit, along_R1).mul_(factor_R1), weight_grad_D


class _Kept(NamedTuple):
    """What a step keeps for its backward."""

    hidden_AD: Tensor
    mixed_AJ: Tensor  # no row where the family has no inner weights
    query_AGRK: Tensor
    softmax: Kept
    middle_AD: Tensor
    gate_up: Tensor


class _Unrolling:
    """The forward of all steps and its backward, in one type."""

    def __init__(
        self,
        weights: Weights,
        inner: Mapping[str, Tensor],
        layout: Layout,
        config: DrafterConfig,
        embed_TD: Tensor,
    ) -> None:
        self.dtype, self.config, self.layout = embed_TD.dtype, config, layout
        self.family = family_of(config)
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        matrices = [w.to(self.dtype) for w in weights[:6]]
        self.w = Weights(*matrices, *(w.to(self.wide) for w in weights[6:]))
        self.inner = {
            name: w.to(self.dtype if w.ndim > 1 else self.wide) for name, w in inner.items()
        }
        self.embed_TD = embed_TD
        self.token_TD, self.token_factor = normed(
            embed_TD, self.w.input_norm_D, config.rms_norm_eps
        )
        self.token_TJ = self.token_TD @ self.w.token_JD.T
        self.queries = next(iter(self.family.shapes(config).values()))[0]
        self.own: list[KeyValue] = []
        self.kept: list[_Kept] = []
        self.inputs: list[Tensor] = []  # of the steps that are made again

    def position(self, rows_R: Tensor, step: int) -> Tensor:
        """Return where rows stand at a step."""
        return self.layout.position_T[rows_R] + step

    def read(self, rows_R: Tensor, step: int) -> Tensor:
        """Return the token that rows t read: t+1+step.

        Past the end of its document a row reads some other token; no such row counts, and no row
        that counts sees its key.
        """
        return (rows_R + (1 + step)).clamp_(max=len(self.embed_TD) - 1)

    def project(self, normed_RD: Tensor, rows_R: Tensor, step: int, part: slice) -> Tensor:
        """Return these columns of the attention's first products."""
        token = self.token_TJ[:, part].index_select(0, self.read(rows_R, step))
        return torch.addmm(token, normed_RD, self.w.hidden_JD[part].T)

    def start(self, aux_TE: Tensor) -> Tensor:
        """Make hidden states and step 0's keys of all rows; return the active ones' states."""
        config = self.config
        self.aux_TE = aux_TE
        self.hidden_TD = aux_TE @ self.w.fc_DE.T
        normed_TD, self.hidden_factor = normed(
            self.hidden_TD, self.w.hidden_norm_D, config.rms_norm_eps
        )
        self.every_T = torch.arange(len(aux_TE), device=aux_TE.device)
        mixed = self.project(normed_TD, self.every_T, 0, slice(self.queries, None))
        both = self.family.key_value(config, self.inner, mixed, self.position(self.every_T, 0))
        self.first = KeyValue(*(x.transpose(0, 1).contiguous() for x in both))
        self.first_mixed = mixed if self.inner else mixed[:0].clone()
        return self.hidden_TD[self.layout.active_A]

    def step(self, step: int, hidden_AD: Tensor) -> Tensor:
        """Return the layer's un-normed output at a TTT step, and keep what its backward needs."""
        config, w, rows_A = self.config, self.w, self.layout.active_A
        normed_AD, _ = normed(hidden_AD, w.hidden_norm_D, config.rms_norm_eps)
        part = slice(None) if step else slice(self.queries)
        mixed = self.project(normed_AD, rows_A, step, part)
        given, position_A = (config, self.inner), self.position(rows_A, step)
        if step:
            both = self.family.key_value(*given, mixed[:, self.queries :], position_A)
            self.own.append(KeyValue(*both))
        (query_AHK,) = self.family.query(*given, mixed[:, : self.queries], position_A)
        query_AGRK = (query_AHK / self.family.divisor(config)).unflatten(
            1, (config.num_key_value_heads, -1)
        )
        softmax = attend(query_AGRK, self.first, self.own, self.layout.blocks)
        middle_AD = torch.addmm(hidden_AD, softmax.out_AGRK.flatten(1), w.out_DJ.T)
        post_AD, _ = normed(middle_AD, w.post_norm_D, config.rms_norm_eps)
        gate_up = post_AD @ w.gate_up.T
        gate, up = gate_up.chunk(2, dim=-1)
        mixed = mixed if self.inner else mixed[:0].clone()
        self.kept.append(_Kept(hidden_AD, mixed, query_AGRK, softmax, middle_AD, gate_up))
        return torch.addmm(middle_AD, F.silu(gate).mul_(up), w.down_DI.T)

    def backward(self, grads_SAD: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the gradients of the weights, given those of the steps' outputs."""
        config, rows_A = self.config, self.layout.active_A
        self.sums = Weights(*(torch.zeros_like(w, dtype=self.wide) for w in self.w))
        self.inner_sums = {
            name: torch.zeros_like(w, dtype=self.wide) for name, w in self.inner.items()
        }
        self.token_grad_TJ = torch.zeros_like(self.token_TJ, dtype=self.wide)
        new = {"dtype": self.wide, "device": self.embed_TD.device}
        groups, widths = config.num_key_value_heads, (config.head_dim, config.value_dim)
        first_GKT = [torch.zeros(groups, K, len(self.embed_TD), **new) for K in widths]
        own = (len(self.own), len(rows_A), groups)
        own_OAGK = [torch.zeros(*own, K, **new) for K in widths]
        self.key_sums = Gradients(*first_GKT, *own_OAGK)
        grad_AD = torch.zeros(len(rows_A), self.w.fc_DE.shape[0], **new)
        for step in reversed(range(len(grads_SAD))):
            arrived = grads_SAD[step]
            if arrived is not None:
                grad_AD.add_(arrived)
            if self.inputs:
                del self.own[max(step - 1, 0) :]
                self.step(step, self.inputs.pop())
            kept = self.kept.pop()
            self._mlp_backward(kept, grad_AD)
            self._attention_backward(step, kept, grad_AD)
        self._start_backward(grad_AD)
        return (*self.sums, *self.inner_sums.values())

    def _add(self, sum_MN: Tensor, grad_RM: Tensor, x_RN: Tensor) -> None:
        """Add a weight's gradient to its sum."""
        if sum_MN.dtype == x_RN.dtype:
            sum_MN.addmm_(grad_RM.T, x_RN)
        else:
            sum_MN.add_(grad_RM.T @ x_RN)

    def _mlp_backward(self, kept: _Kept, grad_AD: Tensor) -> None:
        w, sums = self.w, self.sums
        grad = grad_AD.to(self.dtype)
        gate, up = kept.gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        self._add(sums.down_DI, grad, silu * up)
        inner = grad @ w.down_DI
        both = torch.empty_like(kept.gate_up)
        gate_grad, up_grad = both.chunk(2, dim=-1)
        torch.mul(inner, silu, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=gate_grad)
        post_AD, factor_A1 = normed(kept.middle_AD, w.post_norm_D, self.config.rms_norm_eps)
        self._add(sums.gate_up, both, post_AD)
        more, norm_grad = normed_backward(
            both @ w.gate_up, kept.middle_AD, factor_A1, w.post_norm_D
        )
        grad_AD.add_(more)
        sums.post_norm_D.add_(norm_grad)

    def _attention_backward(self, step: int, kept: _Kept, grad_AD: Tensor) -> None:
        w, config, rows_A = self.w, self.config, self.layout.active_A
        grad = grad_AD.to(self.dtype)
        self._add(self.sums.out_DJ, grad, kept.softmax.out_AGRK.flatten(1))
        out_grad = (grad @ w.out_DJ).view_as(kept.softmax.out_AGRK)
        keys = (self.first, self.own)
        query_grad = attend_backward(
            out_grad, kept.softmax, kept.query_AGRK, keys, self.layout.blocks, self.key_sums
        )
        at, mixed = self.position(rows_A, step), kept.mixed_AJ
        heads = [query_grad.flatten(1, 2).div_(self.family.divisor(config))]
        parts = [
            self._heads_backward(self.family.query_backward, mixed[:, : self.queries], at, heads)
        ]
        if step:
            self.own.pop()
            sums = (self.key_sums.own_key_OAGK, self.key_sums.own_value_OAGK)
            heads = [x_OAGK[step - 1].to(self.dtype) for x_OAGK in sums]
            columns = mixed[:, self.queries :]
            parts.append(self._heads_backward(self.family.key_value_backward, columns, at, heads))
        mixed = torch.cat(parts, 1) if step else parts[0]
        self._project_backward(mixed, kept.hidden_AD, grad_AD, rows_A, step)

    def _heads_backward(
        self, function: Backward, columns: Tensor, position_R: Tensor, grads: Sequence[Tensor]
    ) -> Tensor:
        """Return what heads send back to their columns, and add up what inner weights get."""
        found, inner = function(self.config, self.inner, columns, position_R, grads)
        for name, grad in inner.items():
            self.inner_sums[name].add_(grad)
        return found

    def _project_backward(
        self, mixed: Tensor, hidden_RD: Tensor, grad_RD: Tensor, rows_R: Tensor, step: int
    ) -> None:
        """Add what columns (from either end of J) send back to their two inputs."""
        w = self.w
        whole = mixed.shape[1] == len(w.hidden_JD)
        keys = hidden_RD is self.hidden_TD
        part = slice(None) if whole else slice(self.queries, None) if keys else slice(self.queries)
        self.token_grad_TJ[:, part].index_add_(0, self.read(rows_R, step), mixed.to(self.wide))
        normed_RD, factor_R1 = normed(hidden_RD, w.hidden_norm_D, self.config.rms_norm_eps)
        self._add(self.sums.hidden_JD[part], mixed, normed_RD)
        more, norm_grad = normed_backward(
            mixed @ w.hidden_JD[part], hidden_RD, factor_R1, w.hidden_norm_D
        )
        grad_RD.add_(more)
        self.sums.hidden_norm_D.add_(norm_grad)

    def _start_backward(self, grad_AD: Tensor) -> None:
        w, sums = self.w, self.sums
        grad_TD = torch.zeros_like(self.hidden_TD, dtype=self.wide)
        grad_TD[self.layout.active_A] = grad_AD
        both = (self.key_sums.first_key_GKT, self.key_sums.first_value_GKT)
        heads = [x_GKT.permute(2, 0, 1).to(self.dtype) for x_GKT in both]
        at, back = self.position(self.every_T, 0), self.family.key_value_backward
        mixed = self._heads_backward(back, self.first_mixed, at, heads)
        self._project_backward(mixed, self.hidden_TD, grad_TD, self.every_T, 0)
        self._add(sums.fc_DE, grad_TD.to(self.dtype), self.aux_TE)
        token_grad_TJ = self.token_grad_TJ.to(self.dtype)
        self._add(sums.token_JD, token_grad_TJ, self.token_TD)
        _, norm_grad = normed_backward(
            token_grad_TJ @ w.token_JD, self.embed_TD, self.token_factor, w.input_norm_D
        )
        sums.input_norm_D.add_(norm_grad)


class Unroll(torch.autograd.Function):
    """The outputs of all steps as one function of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        given: tuple[Tensor, Tensor, Layout, DrafterConfig],
        walk: tuple[int, bool],
        inner: Sequence[str],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the layer's un-normed output of the active rows for each step, [A, D] each.

        `given` are embeddings, aux states and the shapes; `walk`: TTT steps, and whether to keep a
        step's input alone and make the rest again; `inner`: names of the last of the weights.
        """
        embed_TD, aux_TE, layout, config = given
        steps, recompute = walk
        shared = len(Weights._fields)
        named = dict(zip(inner, weights[shared:], strict=True))
        unrolling = _Unrolling(Weights(*weights[:shared]), named, layout, config, embed_TD)
        hidden_AD = unrolling.start(aux_TE)
        outputs = []
        for step in range(steps):
            if recompute:
                unrolling.inputs.append(hidden_AD)
            hidden_AD = unrolling.step(step, hidden_AD)
            if recompute:
                unrolling.kept.clear()
            outputs.append(hidden_AD)
        ctx.unrolling = unrolling
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the weights' gradients; can be called once."""
        return None, None, None, *ctx.unrolling.backward(grads)
