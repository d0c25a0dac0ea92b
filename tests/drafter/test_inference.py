"""The drafter's decoding against a computation from scratch, and against the training code."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafter import acceptance as ac
from eyas.drafter.config import DrafterConfig
from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter
from eyas.drafter.unroll import build_layout
from eyas.drafter.verifier import Target

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
NUM_DRAFTS = 4


@pytest.fixture
def path(verifier: Target) -> tuple[list[int], Tensor]:
    """Return a prompt with its reply, and the aux states of all but the last token."""
    (plain,) = ac.decode_plain(verifier, [PROMPT], max_new_tokens=12, stop_ids=())
    assert plain.aux_TLD is not None
    return [*PROMPT, *plain.ids], plain.aux_TLD


class Naive:
    """One drafter row after another in float64, one head at a time, nothing kept or shared."""

    def __init__(self, tensors: dict[str, Tensor], config: DrafterConfig, embed_VD: Tensor) -> None:
        self.w = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self.config, self.embed_VD = config, embed_VD.double()

    def chain(self, path: Sequence[int], aux_TLD: Tensor, num_drafts: int) -> list[int]:
        """Return the drafts after `path`; the whole sequence is computed anew for each."""
        ids = list(path[1:])
        hidden = [self.w["fc.weight"] @ aux.flatten().double() for aux in aux_TLD[: len(ids)]]
        drafts: list[int] = []
        for _ in range(num_drafts):
            out = self.layer(ids, hidden)
            logits = self.w["lm_head.weight"] @ self.norm(out, "norm.weight")
            best = int(logits.argmax())
            drafts.append(best + int(self.w["d2t"][best]))
            ids.append(drafts[-1])
            hidden.append(out)
        return drafts

    def layer(self, ids: Sequence[int], hidden: Sequence[Tensor]) -> Tensor:
        """Return the un-normed output of the last row."""
        rows = [self.both(t, h) for t, h in zip(ids, hidden, strict=True)]
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        last = len(rows) - 1
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            query = self.turn(self.project("q", rows[last], head), last)
            keys = [self.turn(self.project("k", row, group), t) for t, row in enumerate(rows)]
            values = torch.stack([self.project("v", row, group) for row in rows])
            scores = torch.stack([query @ key for key in keys]) / self.config.head_dim**0.5
            mixed.append(scores.softmax(0) @ values)
        out = hidden[last] + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = self.norm(out, "midlayer.post_attention_layernorm.weight")
        gate, up, down = (self.w[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return out + down @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))

    def both(self, token: int, hidden: Tensor) -> Tensor:
        embedded = self.norm(self.embed_VD[token], "midlayer.input_layernorm.weight")
        return torch.cat([embedded, self.norm(hidden, "midlayer.hidden_norm.weight")])

    def project(self, name: str, row: Tensor, head: int) -> Tensor:
        width = self.config.head_dim
        weight = self.w[f"midlayer.self_attn.{name}_proj.weight"]
        return weight[head * width : (head + 1) * width] @ row

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.w[name] * x / (x.square().mean() + self.config.rms_norm_eps).sqrt()

    def turn(self, x: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        turned = torch.empty_like(x)
        for i in range(half):
            angle = torch.tensor(position * self.config.rope_theta ** (-i / half)).double()
            turned[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            turned[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return turned


def test_chains_from_the_cache_equal_those_computed_from_scratch(
    llama: Any,
    runner: DraftRunner,
    path: tuple[list[int], Tensor],
    llama_drafter: dict[str, Tensor],
    llama_drafter_config: DrafterConfig,
) -> None:
    ids, aux_TLD = path
    naive = Naive(llama_drafter, llama_drafter_config, llama.get_input_embeddings().weight)
    whole_TJ = runner.draft_everywhere(ids, aux_TLD, NUM_DRAFTS)
    propose = ac.drafting(runner)
    seen, distinct = 0, set()
    for committed in (9, 10, 13, 14, 18):
        expected = naive.chain(ids[:committed], aux_TLD, NUM_DRAFTS)
        drafted = propose(ids[:committed], aux_TLD[seen : committed - 1], NUM_DRAFTS)
        assert list(drafted.ids) == expected
        assert whole_TJ[committed - 2].tolist() == expected
        seen = committed - 1
        distinct |= set(expected)
    assert len(distinct) > 5, "the drafts differ enough to tell an error"


def test_a_norm_before_fc_is_that_of_each_state_by_its_own_weights(
    llama: Any,
    path: tuple[list[int], Tensor],
    llama_drafter: dict[str, Tensor],
    llama_drafter_config: DrafterConfig,
) -> None:
    ids, aux_TLD = path
    generator = torch.Generator().manual_seed(0)
    norms_LD = torch.rand(3, 48, generator=generator) + 0.5
    config = dataclasses.replace(llama_drafter_config, fc_norm=True)
    tensors = llama_drafter | {f"fc_norm.{i}.weight": norms_LD[i] for i in range(3)}
    embed_VD = llama.get_input_embeddings().weight.detach()
    normed = DraftRunner(tensors, config, embed_VD)
    plain = DraftRunner(llama_drafter, llama_drafter_config, embed_VD)
    mean_TL1 = aux_TLD.square().mean(-1, keepdim=True)
    by_hand_TLD = norms_LD * aux_TLD / (mean_TL1 + config.rms_norm_eps).sqrt()
    attended = normed.attend(ids, aux_TLD), plain.attend(ids, by_hand_TLD)
    for got, wanted in zip(*attended, strict=True):
        torch.testing.assert_close(got, wanted)
    drafts = [
        (runner.draft_everywhere(ids, aux, NUM_DRAFTS), ac.drafting(runner)(ids, aux, NUM_DRAFTS))
        for runner, aux in ((normed, aux_TLD), (plain, by_hand_TLD))
    ]
    assert torch.equal(drafts[0][0], drafts[1][0])
    assert drafts[0][1] == drafts[1][1]
    raw = plain.draft_everywhere(ids, aux_TLD, NUM_DRAFTS)
    assert not torch.equal(raw, drafts[0][0]), "without the norms they are others"


def test_decoding_and_training_code_give_the_same_logits(
    llama: Any,
    runner: DraftRunner,
    path: tuple[list[int], Tensor],
    llama_drafter: dict[str, Tensor],
    llama_drafter_config: DrafterConfig,
) -> None:
    ids, aux_TLD = path
    embed_VD = llama.get_input_embeddings().weight.detach()
    drafter = Drafter(llama_drafter_config, llama_drafter["t2d"])
    drafter.load_state_dict(llama_drafter)
    rows = len(ids) - 1
    aux_TLD = torch.cat([aux_TLD, aux_TLD[-1:]])
    layout = build_layout(torch.arange(1, rows + 1), [rows + 1], 1)
    with torch.no_grad():
        trained = drafter.logits(drafter.unroll(embed_VD[ids], aux_TLD, layout, 1)[0])
    best = (drafter.d2t + torch.arange(60))[trained.argmax(-1)]
    drafted = runner.draft_everywhere(ids, aux_TLD, 1)[:, 0]
    assert torch.equal(best[: rows - 1], drafted[: rows - 1])


def test_sequences_of_one_drafter_do_not_see_each_other(
    runner: DraftRunner, path: tuple[list[int], Tensor]
) -> None:
    ids, aux_TLD = path
    alone = ac.drafting(runner)(ids[:9], aux_TLD[:8], NUM_DRAFTS)
    first, second = ac.drafting(runner), ac.drafting(runner)
    first(ids[:5], aux_TLD[:4], NUM_DRAFTS)
    assert second(ids[:9], aux_TLD[:8], NUM_DRAFTS) == alone
    assert first(ids[:9], aux_TLD[4:8], NUM_DRAFTS) == alone


def test_drafts_are_ids_of_the_draft_vocabulary(
    runner: DraftRunner, path: tuple[list[int], Tensor], llama_drafter: dict[str, Tensor]
) -> None:
    drafts_TJ = runner.draft_everywhere(*path, NUM_DRAFTS)
    assert bool(llama_drafter["t2d"][drafts_TJ].all())
