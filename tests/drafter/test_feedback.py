"""The second regression against a naive loop, and what it does to the later steps."""

import dataclasses

import pytest
import torch
from torch import Tensor

from eyas.desk.params import read_params
from eyas.drafter import feedback
from eyas.drafter.config import DrafterConfig, MlaShape
from eyas.drafter.feedback import refine
from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Document, number_replies
from eyas.drafter.unroll import build_layout
from eyas.errors import EyasError
from eyas.settings import Train

WEIGHTS = (1.0, 0.8, 0.64)
STRENGTH = 0.05


def rounds(count: int) -> Train:
    settings = read_params().section("train", Train)
    return dataclasses.replace(
        settings, feedback_rounds=count, feedback_strength=STRENGTH, ttt_steps=3, ttt_decay=0.8
    )


@dataclasses.dataclass
class InMemory:
    documents: list[Document]

    @property
    def lengths(self) -> list[int]:
        return [len(d.input_ids_T) for d in self.documents]

    def read(self, index: int) -> Document:
        return self.documents[index]


LATENT = MlaShape(
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    yarn=None,
)


@pytest.fixture(params=["eagle3", "eagle3_mla"])
def made(
    config: DrafterConfig, request: pytest.FixtureRequest
) -> tuple[Drafter, InMemory, Tensor, Tensor]:
    """A drafter, documents whose final states depend on what a drafter sees, and the target's."""
    if request.param == "eagle3_mla":
        keys = config.num_attention_heads
        config = dataclasses.replace(
            config, family=request.param, mla=LATENT, head_dim=10, num_key_value_heads=keys
        )
    g = torch.Generator().manual_seed(5)
    t2d_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d_V[: config.draft_vocab_size] = True
    drafter = Drafter(config, t2d_V)
    random_start(drafter, seed=2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)
        drafter.midlayer.mlp.down_proj.weight.zero_()
    embed_VD = torch.randn(config.vocab_size, config.hidden_size, generator=g)
    documents = []
    for number in range(40):
        ids_T = torch.randint(0, config.vocab_size, (20,), generator=g)
        final_TD = torch.tanh(embed_VD[ids_T] + 0.5 * embed_VD[ids_T.roll(1)])
        documents.append(
            Document(
                input_ids_T=ids_T,
                reply_T=number_replies(20, [(1 + number % 4, 18)], truncated=False),
                aux_TLD=final_TD[:, None]
                + 0.1 * torch.randn(20, 3, config.hidden_size, generator=g),
                final_TD=final_TD,
            )
        )
    norm_weight_D = torch.rand(config.hidden_size, generator=g) + 0.5
    return drafter, InMemory(documents), embed_VD, norm_weight_D


def naive_rows(
    drafter: Drafter, document: Document, embed_VD: Tensor, norm_weight_D: Tensor, step: int
) -> list[tuple[Tensor, Tensor]]:
    """Return output and wanted state of each prediction's row, by the training code."""
    reply, length = document.reply_T.tolist(), len(document.input_ids_T)
    with torch.no_grad():
        layout = build_layout(torch.arange(1, length - 1), [length], 3)
        outputs = drafter.unroll(embed_VD[document.input_ids_T.long()], document.aux_TLD, layout, 3)
    pairs = []
    for p in range(1, length - 1):
        row = p - 1 - step
        if row >= 1 and reply[p] and reply[p] == reply[p + 1]:
            at = layout.active_A.tolist().index(row)
            pairs.append((outputs[step][at], document.final_TD[p] / norm_weight_D))
    return pairs


def errors(made: tuple[Drafter, InMemory, Tensor, Tensor]) -> list[float]:
    drafter, documents, embed_VD, norm_weight_D = made
    return [
        sum(
            float((output - wanted).square().sum())
            for document in documents.documents
            for output, wanted in naive_rows(drafter, document, embed_VD, norm_weight_D, step)
        )
        for step in range(3)
    ]


def test_every_step_comes_nearer_to_the_targets_state_and_a_second_round_helps_again(
    made: tuple[Drafter, InMemory, Tensor, Tensor],
) -> None:
    before = errors(made)
    refine(*made, rounds(1))
    once = errors(made)
    assert all(after < 0.9 * b for after, b in zip(once, before, strict=True))
    refine(*made, rounds(2))
    assert sum(errors(made)) < sum(once)


def test_one_round_is_the_ridge_solution_of_the_drafters_own_states(
    made: tuple[Drafter, InMemory, Tensor, Tensor],
) -> None:
    drafter, documents, embed_VD, norm_weight_D = made
    mlp, norm = drafter.midlayer.mlp, drafter.midlayer.post_attention_layernorm
    features, wanted, weights = [], [], []
    for document in documents.documents:
        for step, weight in enumerate(WEIGHTS):
            for state, goal in naive_rows(drafter, document, embed_VD, norm_weight_D, step):
                with torch.no_grad():  # down_proj is 0: the output is the state after attention
                    x = norm(state)
                    inner = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
                features.append(inner.double())
                wanted.append((goal - state).double())
                weights.append(weight)
    F, W = torch.stack(features), torch.tensor(weights, dtype=torch.float64)[:, None]
    penalty = STRENGTH * (F.square() * W).sum(0).diag()
    naive_ID = torch.linalg.solve(F.T @ (W * F) + penalty, F.T @ (W * torch.stack(wanted)))
    refine(*made, rounds(1))
    torch.testing.assert_close(
        mlp.down_proj.weight.detach().double(), naive_ID.T, rtol=1e-3, atol=1e-4
    )


def test_no_round_changes_nothing(made: tuple[Drafter, InMemory, Tensor, Tensor]) -> None:
    before = {k: v.clone() for k, v in made[0].state_dict().items()}
    refine(*made, rounds(0))
    assert all(torch.equal(before[k], v) for k, v in made[0].state_dict().items())


def test_a_reply_behind_the_longest_part_is_learnt_from_in_its_own_part(
    made: tuple[Drafter, InMemory, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, documents, embed_VD, norm_weight_D = made
    late = [
        dataclasses.replace(d, reply_T=number_replies(20, [(10, 19)], truncated=False))
        for d in documents.documents
    ]
    cut = [
        Document(
            input_ids_T=d.input_ids_T[6:15],
            reply_T=d.reply_T[6:15],
            aux_TLD=d.aux_TLD[6:15],
            final_TD=d.final_TD[6:15],
        )
        for d in late
    ]
    down = drafter.midlayer.mlp.down_proj.weight
    refine(drafter, InMemory(cut), embed_VD, norm_weight_D, rounds(1))
    want = down.detach().clone()
    with torch.no_grad():
        down.zero_()
    monkeypatch.setattr(feedback, "_LONGEST_TOKENS", 8)
    refine(drafter, InMemory(late), embed_VD, norm_weight_D, rounds(1))
    assert want.abs().max() > 0
    torch.testing.assert_close(down.detach(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("most", "every"), [(1, 1), (8, 1), (10_000, 1), (1, 3)])
def test_a_round_reads_as_many_tokens_as_the_features_need(
    made: tuple[Drafter, InMemory, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    every: int,
) -> None:
    """What is cut off a long document, or was not kept, does not count as read."""
    drafter, documents, embed_VD, norm_weight_D = made
    read: list[int] = []
    real = documents.read
    monkeypatch.setattr(documents, "read", lambda index: read.append(index) or real(index))
    monkeypatch.setattr(feedback, "_LONGEST_TOKENS", 8)
    monkeypatch.setattr(feedback, "_TOKENS_A_FEATURE", most)
    refine(drafter, documents, embed_VD, norm_weight_D, rounds(2), final_every=every)
    wanted = min(every * most * drafter.config.intermediate_size, 8 * len(documents.lengths))
    assert 2 * wanted <= 8 * len(read) <= 4 * wanted


def test_documents_without_a_reply_are_refused(
    made: tuple[Drafter, InMemory, Tensor, Tensor],
) -> None:
    drafter, documents, embed_VD, norm_weight_D = made
    silent = [dataclasses.replace(d, reply_T=d.reply_T * 0) for d in documents.documents]
    with pytest.raises(EyasError, match="expected documents of three tokens or more"):
        refine(drafter, InMemory(silent), embed_VD, norm_weight_D, rounds(1))


def test_the_states_before_the_mlp_are_those_of_the_chain(
    made: tuple[Drafter, InMemory, Tensor, Tensor],
) -> None:
    """Drafting a path's own tokens one by one gives the same rows."""
    drafter, documents, embed_VD, _ = made
    with torch.no_grad():
        drafter.midlayer.mlp.down_proj.weight.normal_(std=0.2)
    runner = DraftRunner(drafter.state_dict(), drafter.config, embed_VD)
    document = documents.documents[0]
    path = document.input_ids_T.tolist()
    down = drafter.midlayer.mlp.down_proj.weight.detach()
    rows = [state + inner @ down.T for state, inner in runner.foresee(path, document.aux_TLD, 3)]
    for t in (1, 7, 16):
        own = runner.fresh()
        hidden = own._commit(path[1 : t + 2], document.aux_TLD[: t + 1])
        torch.testing.assert_close(rows[0][t], hidden[0], rtol=1e-4, atol=1e-4)
        for step in (1, 2):
            hidden = own._extend(torch.tensor([path[t + 1 + step]]), hidden)
            torch.testing.assert_close(rows[step][t], hidden[0], rtol=1e-4, atol=1e-4)
