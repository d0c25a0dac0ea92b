"""The second regression: what the MLP adds, on the states that the drafter feeds back to itself.

At later steps the ridge start takes its own estimate for a target's state. Here down_proj, zero
until now, is solved for what is missing at all steps together, on the drafter's own states and the
random features of gate and up. The equations stand in docs/ridge.md.

Legend: T tokens, D hidden size, I inner size of the MLP. Source: own; measured in RESULTS.md.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Document, Documents, part_with_reply, predictions
from eyas.drafter.ridge import NormalEquations
from eyas.settings import Train

_TOKENS_A_FEATURE = 64  # of a round, at most; 8 overfit (RESULTS.md)
_LONGEST_TOKENS = 2048  # of a document: attention here holds all pairs of rows


@torch.inference_mode()
def refine(
    drafter: Drafter,
    documents: Documents,
    embed_VD: Tensor,
    norm_weight_D: Tensor,
    settings: Train,
    *,
    final_every: int = 1,
) -> None:
    """Solve down_proj so that every step's output is nearest to the target's state.

    Of the predictions the store kept one in `final_every`.

    Raises: EyasError if no document has a prediction.
    """
    down = drafter.midlayer.mlp.down_proj.weight
    lengths = [min(length, _LONGEST_TOKENS) for length in documents.lengths]
    weights = [settings.ttt_decay**step for step in range(settings.ttt_steps)]
    wanted = _TOKENS_A_FEATURE * down.shape[1] * final_every
    stride = max(sum(lengths) // wanted, 1)
    for number in range(settings.feedback_rounds):
        runner = DraftRunner(drafter.state_dict(), drafter.config, embed_VD)
        equations = NormalEquations(down.shape[1], down.shape[0])
        for index in range(number % stride, len(lengths), stride):
            rows = _rows_of(runner, documents.read(index), norm_weight_D, weights)
            for weight, (inner, missing) in zip(weights, rows, strict=False):
                equations.accumulate(inner, missing, weight)
        down.copy_(equations.solve(settings.feedback_strength))


def _rows_of(
    runner: DraftRunner, document: Document, norm_weight_D: Tensor, step_weights: Sequence[float]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Give for each step the features, and the target's state less the state after attention.

    A prediction p is foreseen by row p-1-k; row 0 stands on the attention sink and is left out.
    """
    found, part = predictions(document.reply_T), part_with_reply(document.reply_T, _LONGEST_TOKENS)
    ids, aux_TLD = document.input_ids_T[part].tolist(), document.aux_TLD[part]
    found = found[found < part.stop] - part.start
    found = found[~document.final_TD[part][found].isnan().all(-1)]  # rows that the store kept
    steps = min(len(step_weights), len(ids) - 1)
    for step, (state_TD, inner_TI) in enumerate(runner.foresee(ids, aux_TLD, steps)):
        at = found[found >= 2 + step]
        wanted = document.final_TD[part][at].float() / norm_weight_D
        yield inner_TI[at - 1 - step], wanted - state_TD[at - 1 - step]
