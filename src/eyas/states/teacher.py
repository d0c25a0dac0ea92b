"""The teacher as the K likeliest tokens of the whole vocabulary, in the final state's place.

Whoever has lm_head at hand keeps, of each row that the loss reads, K ids and log-probabilities, the
likeliest first, in float32, which holds ids below 2^24: 8 K bytes, at K = 64 a twenty-eighth of a
bf16 state of Kimi's. All other tokens, the tail, have 1 minus the sum of those kept. The vocabulary
is the whole one, since whoever trains chooses the draft vocabulary later (drafter/losses.py).

Legend: T tokens, R rows, D hidden size, V target vocabulary, K kept of a row.
"""

import torch

from eyas.errors import EyasError

_ROWS, _PART = 256, 8192  # logits at a time; rows of lm_head widened at a time


def top_tokens(final_RD: torch.Tensor, head_VD: torch.Tensor, k: int) -> torch.Tensor:
    """Return ids and log-probabilities, float32 [R, 2, K], by products in float32.

    Raises: EyasError if the vocabulary has not so many tokens.
    """
    if k > len(head_VD):
        raise EyasError(f"extract.teacher_k: expected at most {len(head_VD)} (V), got {k}")
    found = [torch.zeros(0, 2, k)]
    for rows in final_RD.split(_ROWS):
        wide = rows.to(head_VD.device).float()
        logits = torch.cat([wide @ part.float().T for part in head_VD.split(_PART)], dim=1)
        values, ids = logits.topk(k)
        shares = values - logits.logsumexp(1, keepdim=True)
        found.append(torch.stack([ids.float(), shares], dim=1).cpu())
    return torch.cat(found)


def favourites(
    final_TD: torch.Tensor, top_T2K: torch.Tensor | None, head_VD: torch.Tensor
) -> torch.Tensor:
    """Return the likeliest next token of each row, [T], by what is stored; -1 where nothing is."""
    if top_T2K is not None:
        return top_T2K[:, 0, 0].nan_to_num(-1).long()
    kept_T = ~final_TD.isnan().all(-1)
    found_T = torch.full((len(final_TD),), -1)
    found_T[kept_T] = (final_TD[kept_T].to(head_VD.dtype) @ head_VD.T).argmax(-1)
    return found_T
