"""Heads that look back: on sequences that repeat themselves, and against a naive regression."""

import dataclasses

import pytest
import torch
from torch import Tensor

from eyas.desk.params import read_params
from eyas.drafter import induction
from eyas.drafter.config import DrafterConfig
from eyas.drafter.induction import look_back
from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Document, number_replies
from eyas.drafter.ridge import ridge_start, sum_equations
from eyas.settings import Train

HALF, COUNT = 14, 120  # tokens said, then said again


@dataclasses.dataclass
class InMemory:
    documents: list[Document]

    @property
    def lengths(self) -> list[int]:
        return [len(d.input_ids_T) for d in self.documents]

    def read(self, index: int) -> Document:
        return self.documents[index]


@dataclasses.dataclass
class Made:
    """A drafter after the ridge start, and what it was made from."""

    drafter: Drafter
    documents: InMemory
    embed_VD: Tensor

    def look_back(self, *, induction: bool = True) -> None:
        settings = dataclasses.replace(read_params().section("train", Train), induction=induction)
        ones_D = torch.ones(self.embed_VD.shape[1])
        look_back(self.drafter, self.documents, self.embed_VD, ones_D, settings)

    def runner(self) -> DraftRunner:
        return DraftRunner(self.drafter.state_dict(), self.drafter.config, self.embed_VD)

    def foretold(self) -> float:
        """Return the share of repeated tokens that the rows before them foretell."""
        right = total = 0
        for document in self.documents.documents:
            ids = document.input_ids_T
            ((state_TD, _),) = self.runner().foresee(ids.tolist(), document.aux_TLD, 1)
            said = (state_TD @ self.embed_VD.T).argmax(-1)
            rows = torch.arange(HALF, len(ids) - 2)  # row t has read t+1 and foretells t+2
            right += int((said[rows] == ids[rows + 2]).sum())
            total += len(rows)
        return right / total


@pytest.fixture(params=[2, 4], ids=["two_queries_a_key", "one_query_a_key"])
def made(config: DrafterConfig, request: pytest.FixtureRequest) -> Made:
    """Documents whose second half is the first again; a state tells its own token and the next."""
    config = dataclasses.replace(
        config,
        hidden_size=48,
        target_hidden_size=48,
        head_dim=16,
        num_key_value_heads=request.param,
        draft_vocab_size=config.vocab_size,
    )
    g = torch.Generator().manual_seed(3)
    embed_VD = torch.randn(config.vocab_size, 48, generator=g)
    documents = []
    for _ in range(COUNT):
        once_T = torch.randperm(config.vocab_size, generator=g)[:HALF]
        ids_T = once_T.repeat(2)
        noise = 0.1 * torch.randn(2 * HALF, 3, 48, generator=g)
        documents.append(
            Document(
                input_ids_T=ids_T,
                reply_T=number_replies(2 * HALF, [(1, 2 * HALF)], truncated=False),
                aux_TLD=embed_VD[ids_T][:, None] + noise,
                final_TD=embed_VD[ids_T.roll(-1)],
            )
        )
    drafter = Drafter(config, torch.ones(config.vocab_size, dtype=torch.bool))
    found, ones_D = InMemory(documents), torch.ones(48)
    ridge_start(
        drafter,
        sum_equations(found, embed_VD, ones_D, config.rms_norm_eps),
        strength=0.01,
        norm_scale=1.0,
        norm_weight_D=ones_D,
        head_ND=embed_VD,
        seed=0,
    )
    return Made(drafter, found, embed_VD)


def test_what_was_said_before_is_foretold(made: Made) -> None:
    before = made.foretold()
    made.look_back()
    assert before < 0.2  # the order is random: only a look back can tell
    assert made.foretold() > 0.5


def test_the_output_is_the_ridge_solution_over_what_the_heads_read(made: Made) -> None:
    made.look_back()
    rows = [
        (made.runner().attend(d.input_ids_T.tolist(), d.aux_TLD), d.final_TD[2:])
        for d in made.documents.documents
    ]
    heads = torch.cat([heads[1:] for (_, heads), _ in rows]).double()
    missing = torch.cat([wanted - hidden[1:] for (hidden, _), wanted in rows]).double()
    size = heads.square().mean(0).sqrt().clamp(min=1e-12)
    strength = read_params().section("train", Train).ridge_strength
    unit = heads / size
    ridge = torch.eye(len(size)) * (strength * len(heads)) ** 0.5
    both = torch.cat([unit, ridge.double()])
    wanted = torch.cat([missing, torch.zeros(len(size), missing.shape[1])])
    want = torch.linalg.lstsq(both, wanted).solution.T / size
    got = made.drafter.midlayer.self_attn.weight("o_proj").double()
    # the sums' products are float32, and some of the value heads hold nearly nothing
    torch.testing.assert_close(got * size, want * size, rtol=1e-2, atol=1e-4)


def test_rows_whose_state_was_not_kept_and_documents_of_two_tokens_are_left_out(made: Made) -> None:
    part = [dataclasses.replace(d, final_TD=d.final_TD.clone()) for d in made.documents.documents]
    for document in part:
        document.final_TD[:HALF] = torch.nan
    short = [
        dataclasses.replace(
            part[0],
            input_ids_T=part[0].input_ids_T[:size],
            reply_T=part[0].reply_T[:size],
            aux_TLD=part[0].aux_TLD[:size],
            final_TD=part[0].final_TD[:size],
        )
        for size in (1, 2)
    ]
    made.documents = InMemory([*short, *part])
    made.look_back()
    made.documents = InMemory(part)
    assert all(torch.isfinite(p).all() for p in made.drafter.parameters())
    assert made.foretold() > 0.5


def test_a_reply_behind_the_longest_part_is_learnt_from_in_its_own_part(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a store holds them that keeps final states of replies alone."""
    own = made.documents.documents
    made.documents = InMemory([prompted(document) for document in own])
    monkeypatch.setattr(induction, "_LONGEST_TOKENS", 3 * HALF)
    made.look_back()
    made.documents = InMemory(own)
    assert made.foretold() > 0.5


def prompted(document: Document) -> Document:
    """Say a document twice more before it, as a prompt."""
    size = 2 * len(document.input_ids_T)
    lost_TD = torch.full((size, document.final_TD.shape[1]), torch.nan)
    return Document(
        input_ids_T=document.input_ids_T.repeat(3),
        reply_T=number_replies(size * 3 // 2, [(size, size * 3 // 2)], truncated=False),
        aux_TLD=document.aux_TLD.repeat(3, 1, 1),
        final_TD=torch.cat([lost_TD, document.final_TD]),
    )


def test_not_asked_for_nothing_changes(made: Made) -> None:
    before = {name: tensor.clone() for name, tensor in made.drafter.state_dict().items()}
    made.look_back(induction=False)
    for name, tensor in made.drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name
