"""The second regression: what the MLP adds, on the states that the drafter feeds back to itself.

The ridge start estimates the target's next state once; at later steps it takes its own estimate for
a target's state, which it is not. Here down_proj, zero until now, is solved for what is missing at
all steps together, on the drafter's own states; its features are those of the random gate and up
projections. As the solution changes the states, it is repeated. The equations stand in
docs/ridge.md.

Legend: T tokens, D hidden size, I inner size of the MLP, S TTT steps.
Source: own; measured in RESULTS.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Document, Documents, predictions
from eyas.errors import EyasError

_LONGEST_TOKENS = 2048  # of a document: attention here holds all pairs of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """How the regression is done."""

    rounds: int
    strength: float  # relative to unit features
    step_weights: tuple[float, ...]


@torch.inference_mode()
def refine(
    drafter: Drafter,
    documents: Documents,
    embed_VD: Tensor,
    norm_weight_D: Tensor,
    feedback: Feedback,
) -> None:
    """Solve down_proj so that every step's output is nearest to the target's state.

    Raises: EyasError if no document has a prediction.
    """
    down = drafter.midlayer.mlp.down_proj.weight
    for _ in range(feedback.rounds):
        runner = DraftRunner(drafter.state_dict(), drafter.config, embed_VD)
        gram_II = torch.zeros(down.shape[1], down.shape[1], dtype=torch.float64)
        cross_ID = torch.zeros(down.shape[1], down.shape[0], dtype=torch.float64)
        rows = 0.0
        for index in range(len(documents.lengths)):
            equations = _rows_of(runner, documents.read(index), norm_weight_D, feedback)
            for weight, inner, missing in equations:
                gram_II += weight * (inner.T @ inner).double()
                cross_ID += weight * (inner.T @ missing).double()
                rows += weight * len(inner)
        if not rows:
            raise EyasError(
                "train.feedback_rounds: expected documents with predictions, got none",
                hint="train on more data, or set train.feedback_rounds to 0",
            )
        down.copy_(_solve(gram_II, cross_ID, feedback.strength * rows, rows))


def _rows_of(
    runner: DraftRunner, document: Document, norm_weight_D: Tensor, feedback: Feedback
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Give for each step its weight, the features, and the target's state less the estimate.

    A prediction p is foreseen by row p-1-k; row 0 stands on the attention sink and is left out.
    """
    ids = document.input_ids_T[:_LONGEST_TOKENS].tolist()
    found = predictions(document.reply_T)
    found = found[found < len(ids)]
    steps = min(len(feedback.step_weights), len(ids) - 1)
    for step, (state_TD, inner_TI) in enumerate(runner.foresee(ids, document.aux_TLD, steps)):
        at = found[found >= 2 + step]
        rows = at - 1 - step
        wanted = document.final_TD[at].float() / norm_weight_D
        yield feedback.step_weights[step], inner_TI[rows], wanted - state_TD[rows]


def _solve(gram_II: Tensor, cross_ID: Tensor, penalty: float, rows: float) -> Tensor:
    """Return the map [D, I]; features are scaled to unit size, the penalty is relative to it."""
    scale_I = (gram_II.diagonal() / rows).sqrt().clamp(min=1e-12)
    unit_II = gram_II / scale_I / scale_I.unsqueeze(1)
    unit_II.diagonal().add_(penalty)
    return (torch.linalg.solve(unit_II, cross_ID / scale_I.unsqueeze(1)) / scale_I.unsqueeze(1)).T
