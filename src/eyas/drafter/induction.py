"""The start's other heads: what followed an earlier occurrence of the token just read.

The ridge start's rows attend to themselves alone. Here a query head of each group looks for the
rows r with x[r] = x[t+1], whose values tell of x[r+1]; what all heads then say of the next state
is solved anew. The equations stand in docs/ridge.md.

Legend: T tokens, D hidden size, M directions, G key/value heads, R query heads a key head, K head
dim, J = G*R*K. Source: induction heads, arXiv 2209.11895; in closed form our own (RESULTS.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.inference import DraftRunner
from eyas.drafter.layers import rms_norm
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Documents, part_with_reply
from eyas.drafter.ridge import SELF_SCORE, NormalEquations
from eyas.settings import Train

_MATCH_SCORE = 30.0  # attention score of a row whose token is the one just read, if decoded well
_WHITENING = 0.003  # ridge of the whitening, of the mean square
_LEAST_TOKENS = 3  # a row after the sink's, and the state that it foresees
_LONGEST_TOKENS = 2048  # of a document: attention here holds all pairs of rows


@torch.inference_mode()
def look_back(
    drafter: Drafter,
    documents: Documents,
    embed_VD: Tensor,
    norm_weight_D: Tensor,
    settings: Train,
) -> None:
    """Make the heads of a ridge start, and solve o_proj on what they read.

    Nothing is done if it is not asked for, or for a family whose heads are not Llama's.

    Raises: EyasError if no document has a row to solve it on.
    """
    if not (settings.induction and can_look_back(drafter.config.family)):
        return
    _write_heads(drafter, *_directions(drafter, documents, embed_VD), settings.seed)
    runner = DraftRunner(drafter.state_dict(), drafter.config, embed_VD)
    out_DJ = drafter.midlayer.self_attn.weight("o_proj")
    equations = NormalEquations(out_DJ.shape[1], out_DJ.shape[0])
    for index in range(len(documents.lengths)):
        document = documents.read(index)
        part = part_with_reply(document.reply_T, _LONGEST_TOKENS)
        ids = document.input_ids_T[part].tolist()
        if len(ids) < _LEAST_TOKENS:
            continue
        hidden_TD, heads_TJ = runner.attend(ids, document.aux_TLD[part])
        state_TD = document.final_TD[part][2:].float() / norm_weight_D
        kept_T = ~state_TD.isnan().all(-1)
        missing_TD = state_TD - hidden_TD[1:]  # row 0 is the attention sink's
        equations.accumulate(heads_TJ[1:][kept_T], missing_TD[kept_T])
    out_DJ.copy_(equations.solve(settings.ridge_strength))


def can_look_back(family: str) -> bool:
    """Tell whether a family has heads that take a position apart from what stands there."""
    return family == "eagle3"


def _directions(
    drafter: Drafter, documents: Documents, embed_VD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return M canonical directions of fc's states and of their tokens' embeddings, both [M, D].

    And their correlations [M], highest first: by these a row's state tells which token it is of.
    """
    width = drafter.config.hidden_size
    ones_D = torch.ones(width)
    moments = [torch.zeros(width, width, dtype=torch.float64) for _ in range(3)]
    for index in range(len(documents.lengths)):
        document = documents.read(index)
        hidden_TD = F.linear(document.aux_TLD[1:].flatten(1).float(), drafter.fc.weight)
        token_TD = embed_VD[document.input_ids_T[1:].long()].float()
        state, token = (
            rms_norm(x, ones_D, drafter.config.rms_norm_eps) for x in (hidden_TD, token_TD)
        )
        for total_DD, (a, b) in zip(
            moments, ((state, state), (token, token), (state, token)), strict=True
        ):
            total_DD.add_(a.T @ b)
    states_DD, tokens_DD, both_DD = (
        m / (sum(documents.lengths) - len(documents.lengths)) for m in moments
    )
    by_state_DD, by_token_DD = _whitening(states_DD), _whitening(tokens_DD)
    left, correlation, right = torch.linalg.svd(by_state_DD @ both_DD @ by_token_DD)
    some = slice(max(width // 3, 1))  # weaker ones only make other tokens alike
    found = (left.T @ by_state_DD)[some], (right @ by_token_DD)[some], correlation[some]
    return found[0].float(), found[1].float(), found[2].float()


def _whitening(moment_DD: Tensor) -> Tensor:
    """Return the symmetric matrix that gives vectors of this second moment a unit one."""
    ridge = _WHITENING * moment_DD.diagonal().mean()
    values_D, axes_DD = torch.linalg.eigh(moment_DD + ridge * torch.eye(len(moment_DD)))
    return axes_DD @ (values_D.rsqrt().unsqueeze(1) * axes_DD.T)


def _write_heads(
    drafter: Drafter, state_MD: Tensor, token_MD: Tensor, correlation_M: Tensor, seed: int
) -> None:
    """Write q and k: of each group a query head attends to its row, one looks back, others average.

    RoPE turns the first pairs of a head's numbers fast: there a row matches itself alone. The slow
    ones hardly turn within a thousand tokens: there tokens match. One query head a group: by turns.
    """
    attention, config = drafter.midlayer.self_attn, drafter.config
    K, width = config.head_dim, config.hidden_size
    half, fast = K // 2, max(3 * K // 16, 1)
    numbers = torch.arange(K)
    near, far = numbers[numbers % half < fast], numbers[numbers % half >= fast]
    generator = torch.Generator().manual_seed(seed)
    query_HKD = torch.zeros(config.num_attention_heads, K, 2 * width)
    key_GKD = torch.zeros(config.num_key_value_heads, K, 2 * width)
    groups = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_key_value_heads):
        own = torch.randn(len(near), width, generator=generator)
        own *= (SELF_SCORE * K**0.5 / (width * len(near))) ** 0.5
        mix = torch.randn(len(far), len(state_MD), generator=generator) * correlation_M.sqrt()
        mix *= (_MATCH_SCORE * K**0.5 / (mix.square() @ correlation_M).sum()).sqrt()
        key_GKD[head, near, :width] = own
        key_GKD[head, far, width:] = mix @ state_MD
        first = head * groups
        if groups > 1 or head % 2 == 0:
            query_HKD[first, near, :width] = own
        if groups > 1 or head % 2:
            query_HKD[first + (groups > 1), far, :width] = mix @ token_MD
    attention.weight("q_proj").copy_(query_HKD.flatten(0, 1))
    attention.weight("k_proj").copy_(key_GKD.flatten(0, 1))
