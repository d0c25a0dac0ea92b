"""What a sample is in the files of speculators and of SpecForge, and in ours: pure conversions.

    speculators  token_ids [T], hidden_states [T, L+1, D], the last from BEFORE the final norm;
                 bf16, or e4m3 with hidden_states_scales [T, 1, 1], one a token over all layers
    SpecForge    input_ids [T], loss_mask [T], aux_hidden_state [1, T, L*D], hidden_state [1, T, D]
                 from AFTER the final norm; bf16

A norm forgets its input's size, so the state before it is known up to a factor: ours is as large as
the token's largest layer value, which suits a shared scale. A state shows from which side it is:
divided by the norm's weight, what was normed has mean square 1 in each row.

Source: speculators 0.9.0 train/data.py, hs_connectors 0.9.0 fp8_utils.py, SpecForge 0.2.0
data/preprocessing.py.

Legend: T tokens, L aux layers, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eyas.errors import EyasError
from eyas.records import Span
from eyas.states.codecs import Parts
from eyas.states.layout import ALL, Captured, Layout, make_layout
from eyas.states.shards import encode_row
from eyas.states.store import SampleStates
from eyas.states.target import TargetHead

CODECS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}
_FP8_MAX, _TINY = torch.finfo(torch.float8_e4m3fn).max, 1e-12
_NEAR, _MOST = 0.05, 0.9  # bf16 moves a mean square by under 1 %
_JUDGED_ROWS = 8  # fewer may have mean square 1 by chance
_HINT = "are models/target and extract.layers those of these files?"


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """A sample as a file has it."""

    input_ids_T: torch.Tensor
    mask_T: torch.Tensor
    aux_TLD: torch.Tensor
    final_TD: torch.Tensor
    scales_T: torch.Tensor | None = None  # of aux and final, where they are e4m3


def to_speculators(sample: SampleStates, head: TargetHead, codec: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an hs_N.safetensors, in bf16 or fp8."""
    before_TD = sample.final_TD / head.norm_weight_D
    aux, own = (x.abs().flatten(1).amax(1).clamp(_TINY) for x in (sample.aux_TLD, before_TD))
    wide = torch.cat([sample.aux_TLD, (before_TD * (aux / own)[:, None])[:, None]], dim=1)
    if codec == "bf16":
        return {"token_ids": sample.input_ids, "hidden_states": wide.bfloat16()}
    scales = (wide.abs().amax((1, 2), keepdim=True) / _FP8_MAX).clamp(_TINY)
    values = (wide / scales).to(torch.float8_e4m3fn)
    return {"token_ids": sample.input_ids, "hidden_states": values, "hidden_states_scales": scales}


def to_specforge(sample: SampleStates) -> dict[str, torch.Tensor]:
    """Return the dictionary of a data_N.ckpt."""
    return {
        "input_ids": sample.input_ids,
        "loss_mask": sample.mask_T.long(),
        "hidden_state": sample.final_TD.bfloat16()[None],
        "aux_hidden_state": sample.aux_TLD.flatten(1).bfloat16()[None],
    }


def from_speculators(found: Mapping[str, object], num_layers: int, size: int) -> ForeignRow:
    """Return a file's tensors, and its row of the data set, as a sample; EyasError for others."""
    keys = ("token_ids", "input_ids", "loss_mask", "hidden_states")
    ids_T, prepared_T, mask_T, states = _tensors(found, *keys)
    _expect("hidden_states", states, (len(ids_T), num_layers + 1, size))
    if not torch.equal(ids_T, prepared_T):
        raise EyasError("token_ids: expected those of the data set's row, got others")
    if states.dtype != torch.float8_e4m3fn:
        return ForeignRow(ids_T, mask_T, states[:, :-1], states[:, -1])
    [scales] = _tensors(found, "hidden_states_scales")
    _expect("hidden_states_scales", scales, (len(ids_T), 1, 1))
    return ForeignRow(ids_T, mask_T, states[:, :-1], states[:, -1], scales.flatten().float())


def from_specforge(found: Mapping[str, object], num_layers: int, size: int) -> ForeignRow:
    """Return a file's dictionary as a sample; EyasError for another."""
    keys = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
    ids_T, mask_T, aux, final = _tensors(found, *keys)
    _expect("aux_hidden_state", aux, (1, len(ids_T), num_layers * size))
    _expect("hidden_state", final, (1, len(ids_T), size))
    return ForeignRow(ids_T, mask_T, aux[0].unflatten(1, (num_layers, size)), final[0])


def check_values(row: ForeignRow, vocab_size: int) -> None:
    """Refuse ids, masks and dtypes that no sample of the target has."""
    ids_T, dtypes = row.input_ids_T, {row.aux_TLD.dtype, row.final_TD.dtype}
    _expect("loss_mask", row.mask_T, (len(ids_T),))
    if (
        ids_T.dtype != torch.int64
        or not len(ids_T)
        or not 0 <= ids_T.min() <= ids_T.max() < vocab_size
    ):
        raise EyasError(f"token ids: expected int64, 0 to {vocab_size - 1}, got others", hint=_HINT)
    if not bool(((row.mask_T == 0) | (row.mask_T == 1)).all()):
        raise EyasError("loss_mask: expected 0 and 1, got other values")
    known = [dtype for dtype in CODECS if (CODECS[dtype] == "fp8") == (row.scales_T is not None)]
    if len(dtypes) != 1 or not dtypes <= set(known):
        raise EyasError(f"states: expected one dtype of {known}, got {dtypes}")


def encode_foreign(name: str, row: ForeignRow, head: TargetHead, *, normed: bool) -> Parts:
    """Return a row's tensors as a shard holds them; e4m3 layers keep their bits.

    `normed`: the final state must be from behind the final norm; else it shows where it is from.

    Raises: EyasError if it is not, or values are not finite.
    """
    aux_TLD, final_TD = row.aux_TLD.float(), row.final_TD.float()
    if row.scales_T is not None:
        aux_TLD = aux_TLD * row.scales_T[:, None, None]
        final_TD = final_TD * row.scales_T[:, None]
    if normed:
        check_normed(final_TD, head)
    elif len(final_TD) < _JUDGED_ROWS or normed_share(final_TD, head) < _MOST:
        mean_T1 = final_TD.square().mean(-1, keepdim=True)
        final_TD = final_TD * torch.rsqrt(mean_T1 + head.norm_eps) * head.norm_weight_D
    captured = Captured(aux_TLD=aux_TLD, final_TD=final_TD)
    layout = layout_of(CODECS[row.aux_TLD.dtype])
    parts = dict(encode_row(name, spans_of(row.mask_T), captured, layout))
    if row.scales_T is not None:  # rounded once, by whoever wrote the file
        parts["aux.values"] = row.aux_TLD.contiguous()
        parts["aux.scales"] = row.scales_T[:, None].repeat(1, aux_TLD.shape[1])
    return parts


def layout_of(codec: str) -> Layout:
    """Return how a store is written whose layers come in this codec."""
    return make_layout(codec, "fp32" if codec == "fp32" else "bf16", ALL)


def check_normed(final_TD: torch.Tensor, head: TargetHead) -> None:
    """Refuse final states that the target's final norm did not make; a few rows are not judged."""
    share = normed_share(final_TD, head)
    if share < _MOST and len(final_TD) >= _JUDGED_ROWS:
        raise EyasError(
            f"final states: expected {_MOST:.0%} of {len(final_TD)} rows to have the length that "
            f"the target's final norm gives, got {share:.0%}",
            hint=_HINT,
        )


def normed_share(final_TD: torch.Tensor, head: TargetHead) -> float:
    """Return the share of rows that have mean square 1 before the norm's weight."""
    mean_T = (final_TD / head.norm_weight_D).square().mean(-1)
    return float(((mean_T - 1).abs() < _NEAR).float().mean())


def spans_of(mask_T: torch.Tensor) -> tuple[Span, ...]:
    """Return the runs of ones: replies, which a header always parts."""
    edges = torch.diff(torch.nn.functional.pad(mask_T.int(), (1, 1)))
    starts, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(starts, ends, strict=True))


def _tensors(found: Mapping[str, object], *keys: str) -> list[torch.Tensor]:
    values = [value for key in keys if isinstance(value := found.get(key), torch.Tensor)]
    if len(values) != len(keys):
        raise EyasError(f"expected tensors {list(keys)}, got {sorted(found)}")
    return values


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise EyasError(f"{name}: expected {shape}, got {tuple(tensor.shape)}", hint=_HINT)
