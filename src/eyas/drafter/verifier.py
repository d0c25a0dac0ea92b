"""The target as it verifies drafts: a batch of sequences, each with its own places in the cache.

Every sequence has its own length, so that each can keep another number of drafts: what lies behind
the committed tokens is masked now and overwritten next. Drafts may form a tree: a token then sees
the committed ones and its own ancestors, and those that are kept move together in the cache.

Legend: B rows of one pass, T tokens, G key/value heads, K head dim, L aux layers, D hidden size,
V target vocabulary, C places of the cache.
Source: transformers/cache_utils.py; trees as in SpecInfer, https://arxiv.org/abs/2305.09781.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class _Places:
    """Keys and values of every layer, written at given places of given rows."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self._num_rows, self._capacity = num_rows, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows_B, self._places_BT, self._used = torch.empty(0), torch.empty(0), 0

    def point(self, rows_B: Tensor, places_BT: Tensor) -> None:
        """Say where the next update writes; it returns all places up to the last of these."""
        self._rows_B, self._places_BT = rows_B, places_BT
        self._used = int(places_BT.max()) + 1

    def update(
        self, keys_BGTK: Tensor, values_BGTK: Tensor, layer: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one layer; return those of these rows, [B, G, C, K]."""
        new = (keys_BGTK, values_BGTK)
        if layer not in self._layers:
            groups, width = keys_BGTK.shape[1], keys_BGTK.shape[3]
            shape = (self._num_rows, groups, max(self._capacity, self._used), width)
            self._layers[layer] = (keys_BGTK.new_zeros(shape), keys_BGTK.new_zeros(shape))
        elif (missing := self._used - self._layers[layer][0].shape[2]) > 0:
            key, value = (F.pad(kept, (0, 0, 0, missing)) for kept in self._layers[layer])
            self._layers[layer] = (key, value)
        for kept, states_BGTK in zip(self._layers[layer], new, strict=True):
            kept[self._rows_B[:, None], :, self._places_BT] = states_BGTK.transpose(1, 2)
        keys, values = (kept[:, :, : self._used] for kept in self._layers[layer])
        if len(self._rows_B) == self._num_rows:
            return keys, values
        return keys[self._rows_B], values[self._rows_B]

    def gather(self, row: int, begin: int, kept: Sequence[int]) -> None:
        """Move what lies at places `begin + kept` of a row to `begin`, in this order."""
        source = begin + torch.tensor(kept)
        for layer in self._layers.values():
            for states in layer:
                states[row, :, begin : begin + len(kept)] = states[row, :, source]


class Target:
    """The target with its cache, giving logits and the outputs of the aux layers."""

    def __init__(self, model: Any, aux_layers: Sequence[int]) -> None:
        self._model, self._aux_layers = model, tuple(aux_layers)
        self._seen: dict[int, Tensor] = {}
        self._cache, self._lengths = _Places(0, 0), [0]
        self._handles = [
            model.model.layers[layer].register_forward_hook(self._keep(layer))
            for layer in self._aux_layers
        ]

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def start(self, num_rows: int, capacity: int) -> None:
        """Forget all sequences and make room for others, `capacity` tokens at first."""
        self._cache, self._lengths = _Places(num_rows, capacity), [0] * num_rows

    def commit(self, row: int, kept: Sequence[int]) -> None:
        """Keep these tokens of the row's last pass, ascending; the others are forgotten."""
        if list(kept) != list(range(len(kept))):
            self._cache.gather(row, self._lengths[row], kept)
        self._lengths[row] += len(kept)

    def forward(
        self,
        rows: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        parents: Sequence[Sequence[int]] | None = None,
        last_only: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        """Run tokens behind the committed ones of ascending rows.

        `parents` are the index of the token before each in its row, -1: the last committed one; by
        default each follows the one before.

        Returns:
            For each row its logits [T, V] (of the last token only, if asked) and its aux states
            [T, L, D].
        """
        ids_BT = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
        begins_B = torch.tensor([self._lengths[row] for row in rows])
        places_BT = begins_B[:, None] + torch.arange(ids_BT.shape[1])
        self._cache.point(torch.tensor(rows), places_BT)
        visible_BTC = torch.arange(int(places_BT.max()) + 1) <= places_BT[:, :, None]
        positions_BT = places_BT
        if parents is not None:
            positions_BT = places_BT.clone()
            for row, (begin, above) in enumerate(zip(begins_B.tolist(), parents, strict=True)):
                seen_TT, count = _lineage(above), len(above)
                visible_BTC[row, :count, begin : begin + count] = seen_TT
                positions_BT[row, :count] = begin + seen_TT.sum(1) - 1
        out = self._model(
            ids_BT,
            attention_mask=visible_BTC[:, None],
            position_ids=positions_BT,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        aux_BTLD = torch.stack([self._seen[layer] for layer in self._aux_layers], dim=2)
        return [
            (out.logits[row, : len(tokens)], aux_BTLD[row, : len(tokens)])
            for row, tokens in enumerate(ids)
        ]

    def _keep(self, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook


def _lineage(parents: Sequence[int]) -> Tensor:
    """Return which tokens each token sees, bool [T, T]: its ancestors and itself."""
    seen_TT = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen_TT[token] |= seen_TT[parent]
    return seen_TT
