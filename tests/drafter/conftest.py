"""A tiny target and documents, made of seeded noise, in float64 where tests compare exactly."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.export import expected_shapes
from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Document, number_replies
from eyas.drafter.verifier import Target
from eyas.records import Span

VOCAB, DRAFT_VOCAB, WIDTH = 40, 24, 16


@dataclass
class InMemory:
    """Documents that lie in memory."""

    documents: list[Document]

    @property
    def lengths(self) -> list[int]:
        return [len(d.input_ids_T) for d in self.documents]

    def read(self, index: int) -> Document:
        return self.documents[index]


@dataclass
class Tiny:
    """A drafter with all that its loss needs."""

    config: DrafterConfig
    drafter: Drafter
    embed_VD: Tensor
    head_VD: Tensor
    documents: InMemory

    def draft_head(self) -> Tensor:
        return self.head_VD[self.drafter.t2d]

    def favourites(self, final_PD: Tensor) -> Tensor:
        return (final_PD @ self.head_VD.T).argmax(-1)


def make_document(
    length: int, spans: list[Span], generator: torch.Generator, *, truncated: bool = False
) -> Document:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Document(
        input_ids_T=torch.randint(0, VOCAB, (length,), generator=generator),
        reply_T=number_replies(length, spans, truncated=truncated),
        aux_TLD=noise(length, 3, WIDTH),
        final_TD=noise(length, WIDTH),
    )


@pytest.fixture
def config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=WIDTH,
        target_hidden_size=WIDTH,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=64,
        aux_layers=(1, 3, 4),
        target_name="noise",
        target_revision="0",
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def tiny(config: DrafterConfig) -> Tiny:
    """Three documents: several replies, one reply to the end, a reply from position 1."""
    generator = torch.Generator().manual_seed(7)
    t2d_V = torch.zeros(VOCAB, dtype=torch.bool)
    t2d_V[torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]] = True
    drafter = Drafter(config, t2d_V)
    random_start(drafter, seed=3)
    drafter.double()
    with torch.no_grad():  # sizes at which attention and MLP matter
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(15.0)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).double())
    documents = [
        make_document(14, [(3, 6), (9, 13)], generator),
        make_document(9, [(4, 9)], generator),
        make_document(7, [(1, 5)], generator),
    ]
    shape = (VOCAB, WIDTH)
    return Tiny(
        config=config,
        drafter=drafter,
        embed_VD=torch.randn(shape, generator=generator, dtype=torch.float64),
        head_VD=torch.randn(shape, generator=generator, dtype=torch.float64),
        documents=InMemory(documents),
    )


@pytest.fixture(scope="session")
def llama_drafter(llama_drafter_config: DrafterConfig) -> dict[str, Tensor]:
    """Return such a drafter's tensors, random, at sizes where all of them matter."""
    generator = torch.Generator().manual_seed(3)
    result = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in expected_shapes(llama_drafter_config).items()
    }
    used = torch.randperm(97, generator=generator)[:60].sort().values
    t2d = torch.zeros(97, dtype=torch.bool)
    t2d[used] = True
    return result | {"d2t": used - torch.arange(60), "t2d": t2d}


@pytest.fixture
def runner(
    llama: Any, llama_drafter_config: DrafterConfig, llama_drafter: dict[str, Tensor]
) -> DraftRunner:
    """Return that drafter, ready to propose."""
    embed_VD = llama.get_input_embeddings().weight.detach()
    return DraftRunner(llama_drafter, llama_drafter_config, embed_VD)


@pytest.fixture
def verifier(llama: Any, llama_drafter_config: DrafterConfig) -> Iterator[Target]:
    """Return the random Llama as it verifies drafts."""
    result = Target(llama, llama_drafter_config.aux_layers)
    yield result
    result.close()
