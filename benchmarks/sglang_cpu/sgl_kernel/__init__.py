"""What SGLang 0.5.23 asks of `sgl_kernel` on a CPU, in torch, for greedy chains of drafts.

The package of that name is built for CUDA. Here stands only what a server with `topk = 1` calls: a
chain needs no tree, so links and masks are those of a line, and trees are refused. SGLang's modules
import these names, look up both attentions under `torch.ops.sgl_kernel`, and without a
`convert_weight_packed` in here take every other layer's torch path. Read by the server alone, whose
PYTHONPATH names the folder above; names and order of arguments are SGLang's.

Legend: B requests, T new tokens of a request, S tokens it can see, H heads, G key/value heads,
K head dim, P places of the cache, J drafts and the token before them.
Source: sglang/srt/layers/attention/intel_amx_backend.py, sglang/kernels/ops/speculative/.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__version__ = "0.5.23"
_NOT_FOR_CHAINS = "sgl_kernel stand-in: {} is called for trees of drafts only; serve with topk = 1"


class _Decode(NamedTuple):
    """The arguments of decode_attention_cpu, in order."""

    query_BHK: Tensor
    keys_PGK: Tensor
    values_PGK: Tensor
    key_scale: float
    value_scale: float
    out_BHK: Tensor
    new_keys_BGK: Tensor | None
    new_values_BGK: Tensor | None
    new_places_B: Tensor
    scratch: Tensor
    places_RS: Tensor  # the cache places of every request slot
    slots_B: Tensor
    lengths_B: Tensor
    scale: float
    soft_cap: float
    cross: bool
    window: int
    encoder_lengths: Tensor | None
    sinks: Tensor | None


class _Extend(NamedTuple):
    """The arguments of extend_attention_cpu, in order."""

    query_THK: Tensor  # the new tokens of all requests, end to end
    new_keys_TGK: Tensor  # in the cache already, as are the values
    new_values_TGK: Tensor
    out_THK: Tensor
    keys_PGK: Tensor
    values_PGK: Tensor
    key_scale: float
    value_scale: float
    places_RS: Tensor
    slots_B: Tensor
    lengths_B: Tensor  # new tokens included
    new_B: Tensor
    starts_B: Tensor
    longest_new: int
    scale: float
    soft_cap: float
    cross: bool
    window: int
    encoder_lengths: Tensor | None
    sinks: Tensor | None
    tree_mask: Tensor | None
    causal: bool


class _Tree(NamedTuple):
    """The arguments of build_tree_kernel_efficient_cpu, in order."""

    parents: Tensor
    chosen: Tensor
    lengths_B: Tensor
    mask: Tensor  # not read by the attention where topk is 1
    positions: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor
    topk: int
    depth: int
    num_tokens: int
    mask_mode: int


def decode_attention_cpu(*arguments: Any) -> None:
    """Attend with one token a request, whose key and value are put into the cache first."""
    call = _Decode(*arguments)
    _refuse_variants(call)
    if call.new_keys_BGK is not None and call.new_values_BGK is not None:
        call.keys_PGK[call.new_places_B] = call.new_keys_BGK.view(-1, *call.keys_PGK.shape[1:])
        call.values_PGK[call.new_places_B] = call.new_values_BGK.view(
            -1, *call.values_PGK.shape[1:]
        )
    for row, places_S in enumerate(_seen_places(call)):
        kept = (call.keys_PGK[places_S], call.values_PGK[places_S])
        call.out_BHK[row] = _attend(call, call.query_BHK[row : row + 1], *kept)[0]


def extend_attention_cpu(*arguments: Any) -> None:
    """Attend with several new tokens a request, each to itself and all before it.

    Latent attention spells keys and values of a prompt out, while the cache holds the latent.
    """
    call = _Extend(*arguments)
    _refuse_variants(call)
    if call.tree_mask is not None or not call.causal:
        raise NotImplementedError(_NOT_FOR_CHAINS.format("attention that is not causal"))
    starts, counts = call.starts_B.tolist(), call.new_B.tolist()
    for start, count, places_S in zip(starts, counts, _seen_places(call), strict=True):
        rows = slice(start, start + count)
        kept = (call.keys_PGK[places_S], call.values_PGK[places_S])
        if call.new_keys_TGK is not None and call.new_values_TGK is not None:
            new = (call.new_keys_TGK[rows], call.new_values_TGK[rows])
            if new[0].shape[-1] != kept[0].shape[-1]:
                if count != len(places_S):
                    raise NotImplementedError(_NOT_FOR_CHAINS.format("latent attention, a prefix"))
                kept = new
        if count:
            call.out_THK[rows] = _attend(call, call.query_THK[rows], *kept)


def _refuse_variants(call: _Decode | _Extend) -> None:
    variants = {
        "logit soft-capping": call.soft_cap > 0,
        "cross attention": call.cross,
        "a sliding window": call.window > 0,
        "attention sinks": call.sinks is not None,
    }
    if asked := [name for name, wanted in variants.items() if wanted]:
        raise NotImplementedError(f"sgl_kernel stand-in: the model wants {', '.join(asked)}")


def _seen_places(call: _Decode | _Extend) -> Iterator[Tensor]:
    for slot, length in zip(call.slots_B.tolist(), call.lengths_B.tolist(), strict=True):
        yield call.places_RS[slot, :length].long()


def _attend(
    call: _Decode | _Extend, query_THK: Tensor, keys_SGK: Tensor, values_SGK: Tensor
) -> Tensor:
    """Return [T, H, K]; the new tokens are the last T of the S that are seen."""
    num_new, num_seen = len(query_THK), len(keys_SGK)
    seen_TS = torch.ones(num_new, num_seen, dtype=torch.bool).tril(num_seen - num_new)
    keys_GSK, values_GSK = keys_SGK.transpose(0, 1), values_SGK.transpose(0, 1)
    out_HTK = F.scaled_dot_product_attention(
        query_THK.transpose(0, 1)[None],
        keys_GSK[None],
        values_GSK[None],
        attn_mask=seen_TS,
        scale=call.scale,
        enable_gqa=True,
    )[0]
    return out_HTK.transpose(0, 1)


def build_tree_kernel_efficient_cpu(*arguments: Any) -> None:
    """Lay each request's tokens out as a chain: one after another, each the next one's parent."""
    call = _Tree(*arguments)
    if call.topk != 1:
        raise NotImplementedError(_NOT_FOR_CHAINS.format("build_tree_kernel_efficient_cpu"))
    offsets_J = torch.arange(call.num_tokens)
    for row, length in enumerate(call.lengths_B.tolist()):
        begin = row * call.num_tokens
        call.positions.view(-1)[begin : begin + call.num_tokens] = length + offsets_J
        call.index[row] = begin + offsets_J
        call.child[row, :-1] = offsets_J[1:]
        call.child[row, -1] = -1
        call.sibling[row] = -1


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    **_links: Tensor,
) -> None:
    """Accept the drafts that are the target's own choices, and its choice after the last of them.

    `candidates` [B, J] begins with the last committed token. Worked example, J = 4:

        candidates 5 7 8 9, target's choices 7 8 1 2  ->  accepted 2 drafts (7 8), then 1
        accept_index 0 1 2 -1, predicts 7 8 1 _
    """
    num_tokens = candidates.shape[1]
    choices_BJ = target_predict.view(-1, num_tokens)
    agree_BJ = candidates[:, 1:] == choices_BJ[:, :-1]
    accepted_B = agree_BJ.long().cumprod(1).sum(1)
    for row, count in enumerate(accepted_B.tolist()):
        places = torch.arange(row * num_tokens, row * num_tokens + count + 1)
        accept_index[row, : count + 1] = places.to(accept_index.dtype)
        accept_token_num[row] = count
        predicts[places] = choices_BJ[row, : count + 1].to(predicts.dtype)


def assign_req_to_token_pool_cpu(
    slots_B: Tensor,
    places_RS: Tensor,
    begins_B: Tensor,
    ends_B: Tensor,
    new_places: Tensor,
    _width: int,
) -> None:
    """Note the cache places of tokens begin..end of each request, given end to end."""
    used = 0
    for slot, begin, end in _rows(slots_B, begins_B, ends_B):
        places_RS[slot, begin:end] = new_places[used : used + end - begin].to(places_RS.dtype)
        used += end - begin


def assign_extend_cache_locs_cpu(
    slots_B: Tensor,
    places_RS: Tensor,
    begins_B: Tensor,
    ends_B: Tensor,
    out: Tensor,
    _width: int,
) -> None:
    """Collect the cache places of tokens begin..end of each request, end to end."""
    used = 0
    for slot, begin, end in _rows(slots_B, begins_B, ends_B):
        out[used : used + end - begin] = places_RS[slot, begin:end]
        used += end - begin


def assign_draft_cache_locs_contiguous_cpu(
    slots_B: Tensor,
    places_RS: Tensor,
    lengths_B: Tensor,
    out: Tensor,
    _width: int,
    topk: int,
    num_steps: int,
) -> None:
    """Collect the cache places that follow each request's tokens, for its drafts."""
    ends_B = lengths_B + topk * num_steps
    assign_extend_cache_locs_cpu(slots_B, places_RS, lengths_B, ends_B, out, _width)


def build_draft_decode_metadata_cpu(
    places_RS: Tensor, slots_B: Tensor, _lengths_B: Tensor, topk: int, _num_steps: int, _width: int
) -> Tensor:
    """Return the cache places a draft sees: of a chain, its request's own, drafts behind tokens."""
    if topk != 1:
        raise NotImplementedError(_NOT_FOR_CHAINS.format("build_draft_decode_metadata_cpu"))
    return places_RS[slots_B.long()]


def fill_bonus_tokens_cpu(tokens: Tensor, counts_B: Tensor, out_B: Tensor, stride: int) -> None:
    """Take each request's last accepted token."""
    rows_B = torch.arange(len(counts_B)) * stride
    out_B.copy_(tokens.view(-1)[rows_B + counts_B.long() - 1])


def _rows(*columns_B: Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns_B), strict=True)


def copy_all_layer_kv_cache_cpu(
    _buffers: Tensor, _widths: Tensor, targets: Tensor, sources: Tensor
) -> None:
    """Refuse to move keys and values, but for a place onto itself (SGLang does so at its start)."""
    if not torch.equal(targets, sources):
        raise NotImplementedError(_NOT_FOR_CHAINS.format("copy_all_layer_kv_cache_cpu"))


def fill_accept_out_cache_loc_cpu(*_arguments: Any) -> None:
    """Refuse: accepted drafts of a chain lie where they belong."""
    raise NotImplementedError(_NOT_FOR_CHAINS.format("fill_accept_out_cache_loc_cpu"))


def rotate_input_ids_cpu(*_arguments: Any) -> None:
    """Refuse: drafters of several layers' own weights call it, EAGLE-3 does not."""
    raise NotImplementedError("sgl_kernel stand-in: multi-layer drafters are not served")


_ops: Any = torch.ops.sgl_kernel
_ops.decode_attention_cpu = decode_attention_cpu
_ops.extend_attention_cpu = extend_attention_cpu

if (
    not torch.cuda.is_available()
):  # the drafter with latent attention waits for a GPU at its loading
    _cuda: Any = torch.cuda
    _cuda.synchronize = lambda _device=None: None
