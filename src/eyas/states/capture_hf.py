"""Run token ids through the target and keep what a drafter learns from.

Kept are the outputs of chosen layers and the state after the final norm, which feeds lm_head.
Source: HF `hidden_states[i + 1]` is the output of layer i; its last entry is after the final norm.

Legend: B batch, T tokens, D hidden size, L aux layers, V vocabulary.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError
from eyas.records import Sample
from eyas.states.job import Job
from eyas.states.layout import Captured
from eyas.states.shards import write_shard
from eyas.states.target import load_model

_PAD = 0  # behind the row's end, where no real token attends


class Transformers:
    """The target in this process."""

    def __init__(self, target: Path, job: Job) -> None:
        self._model, self._job = load_model(target, dtype=getattr(torch, job.dtype)), job
        self.seconds = {"compute": 0.0, "write": 0.0}

    def make_shard(
        self, path: Path, samples: Sequence[Sample], advance: Callable[[int], None]
    ) -> None:
        """Run the samples through the target and write their shard; `advance` hears of tokens."""
        job, found = self._job, dict[int, Captured]()
        started = time.monotonic()
        for group in batches([len(s.input_ids) for s in samples], job.settings.batch_tokens):
            ids = [samples[row].input_ids for row in group]
            found.update(zip(group, capture(self._model, ids, job.layers), strict=True))
            advance(sum(map(len, ids)))
        captured = time.monotonic()
        states = [found[row] for row in range(len(samples))]
        write_shard(path, samples, states, job.layout, self._model.lm_head.weight)
        self.seconds["compute"] += captured - started
        self.seconds["write"] += time.monotonic() - captured

    @torch.inference_mode()
    def favourites(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the target's own next token at every position, [T]."""
        return self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)


def batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group row numbers by like length, longest first, each group of at most `batch_tokens` tokens.

    A row longer than that is a group of its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    used = 0
    for row in order:
        if not groups or used + lengths[row] > batch_tokens:
            groups.append([])
            used = 0
        groups[-1].append(row)
        used += lengths[row]
    return groups


@torch.inference_mode()
def capture(model: Any, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Captured]:
    """Run rows together, padded on the right, and return each one's states at its own length.

    The causal mask keeps padding out of every real position, so no attention mask is needed.

    Raises: EyasError if their number is not that of the ids. Values are checked where written.
    """
    ids_BT = torch.full((len(rows), max(map(len, rows))), _PAD)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    decoder = model.get_decoder()
    with _outputs(decoder, layers) as found:
        final_BTD = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
    aux_BTLD = torch.stack([found[layer] for layer in layers], dim=2)
    if aux_BTLD.shape[:2] != ids_BT.shape or final_BTD.shape[:2] != ids_BT.shape:
        raise EyasError(
            f"capture: expected states of {tuple(ids_BT.shape)} tokens, got "
            f"{tuple(aux_BTLD.shape[:2])} and {tuple(final_BTD.shape[:2])}"
        )
    return [
        Captured(aux_TLD=aux_BTLD[row, : len(ids)], final_TD=final_BTD[row, : len(ids)])
        for row, ids in enumerate(rows)
    ]


@contextlib.contextmanager
def _outputs(decoder: Any, layers: Sequence[int]) -> Generator[dict[int, torch.Tensor], None, None]:
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            found[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [decoder.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
