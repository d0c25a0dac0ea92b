"""Draft-verify decoding against plain decoding, its replay, and the drafter's training code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eyas.drafter import acceptance as ac
from eyas.drafter.config import DrafterConfig
from eyas.drafter.export import expected_shapes
from eyas.drafter.inference import DraftRunner, Lookup
from eyas.drafter.model import Drafter, build_layout

PROMPTS = ([5, 7, 11, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [90])
AUX = (1, 3, 4)
MAX_NEW = 24


@pytest.fixture(scope="module")
def config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=48,
        target_hidden_size=48,
        intermediate_size=64,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        draft_vocab_size=60,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        aux_layers=AUX,
        target_name="random",
        target_revision="0",
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture(scope="module")
def tensors(config: DrafterConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    result = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in expected_shapes(config).items()
    }
    used = torch.randperm(97, generator=generator)[:60].sort().values
    t2d = torch.zeros(97, dtype=torch.bool)
    t2d[used] = True
    return result | {"d2t": used - torch.arange(60), "t2d": t2d}


@pytest.fixture
def runner(llama: Any, config: DrafterConfig, tensors: dict[str, torch.Tensor]) -> DraftRunner:
    return DraftRunner(tensors, config, llama.get_input_embeddings().weight.detach())


@pytest.fixture
def target(llama: Any) -> Iterator[ac.Target]:
    result = ac.Target(llama, AUX)
    yield result
    result.close()


def plain_ids(llama: Any, prompt: list[int]) -> list[int]:
    out = llama.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_NEW, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("kind", ["eagle", "lookup"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_drafted_ids_are_those_of_plain_decoding_and_the_replay_verifies_as_often(
    llama: Any, target: Any, runner: DraftRunner, num_drafts: int, kind: str, prompt: list[int]
) -> None:
    lookup = Lookup(max_ngram=3)
    propose = ac.drafting(runner) if kind == "eagle" else ac.looking_up(lookup)
    plain = ac.decode_plain(target, prompt, max_new_tokens=MAX_NEW, stop_ids=())
    drafted = ac.decode_drafted(
        target, propose, prompt, num_drafts=num_drafts, max_new_tokens=MAX_NEW, stop_ids=()
    )
    assert list(plain.ids) == plain_ids(llama, prompt)
    assert drafted.ids == plain.ids
    path = [*prompt, *plain.ids]
    assert plain.aux_TLD is not None
    chains_TJ = runner.draft_everywhere(path, plain.aux_TLD, num_drafts)

    def chain(committed: int) -> list[int]:
        if kind == "lookup":
            return lookup.propose(path[:committed], num_drafts)
        return chains_TJ[committed - 2].tolist()

    assert ac.replay(path, len(prompt), chain, num_drafts) == drafted.verified
    assert sum(drafted.verified.gains) == MAX_NEW - 1
    assert drafted.forward_passes == 1 + len(drafted.verified.gains)


@pytest.mark.parametrize(("right", "gain"), [(0, 1), (1, 2), (3, 4)])
def test_drafts_that_are_right_are_gained_with_the_bonus_token(
    target: Any, right: int, gain: int
) -> None:
    plain = ac.decode_plain(target, PROMPTS[0], max_new_tokens=MAX_NEW, stop_ids=())
    path = [*PROMPTS[0], *plain.ids]

    def oracle(committed: list[int], _aux: torch.Tensor, num_drafts: int) -> list[int]:
        chain = path[len(committed) : len(committed) + num_drafts]
        return [t if k < right else (t + 1) % 97 for k, t in enumerate(chain)]

    drafted = ac.decode_drafted(
        target, oracle, PROMPTS[0], num_drafts=3, max_new_tokens=MAX_NEW, stop_ids=()
    )
    assert drafted.ids == plain.ids
    assert set(drafted.verified.gains[:-1]) == {gain}


def test_cached_proposals_equal_those_computed_for_the_whole_path(
    target: Any, runner: DraftRunner
) -> None:
    plain = ac.decode_plain(target, PROMPTS[0], max_new_tokens=12, stop_ids=())
    path = [*PROMPTS[0], *plain.ids]
    assert plain.aux_TLD is not None
    whole_TJ = runner.draft_everywhere(path, plain.aux_TLD, 4)
    propose = ac.drafting(runner)
    seen = 0
    for committed in (6, 7, 9, 12):
        aux_TLD = plain.aux_TLD[seen : committed - 1]
        assert propose(path[:committed], aux_TLD, 4) == whole_TJ[committed - 2].tolist()
        seen = committed - 1


def test_decoding_and_training_code_give_the_same_logits(
    llama: Any, target: Any, config: DrafterConfig, tensors: dict[str, torch.Tensor]
) -> None:
    embed_VD = llama.get_input_embeddings().weight.detach()
    drafter = Drafter(config, tensors["t2d"])
    drafter.load_state_dict(tensors)
    plain = ac.decode_plain(target, PROMPTS[1], max_new_tokens=12, stop_ids=())
    path = [*PROMPTS[1], *plain.ids]
    assert plain.aux_TLD is not None
    rows = len(path) - 1
    aux_TLD = torch.cat([plain.aux_TLD, plain.aux_TLD[-1:]])
    layout = build_layout(torch.arange(1, rows + 1), [rows + 1], 1)
    with torch.no_grad():
        trained = drafter.logits(drafter.unroll(embed_VD[path], aux_TLD, layout, 1)[0])
    best = (drafter.d2t + torch.arange(60))[trained.argmax(-1)]
    runner = DraftRunner(tensors, config, embed_VD)
    drafted = runner.draft_everywhere(path, plain.aux_TLD, 1)[:, 0]
    assert torch.equal(best[: rows - 1], drafted[: rows - 1])


def test_a_stop_id_ends_both_kinds_of_reply(target: Any, runner: DraftRunner) -> None:
    free = ac.decode_plain(target, PROMPTS[1], max_new_tokens=MAX_NEW, stop_ids=())
    stop = free.ids[7]
    end = free.ids.index(stop) + 1
    plain = ac.decode_plain(target, PROMPTS[1], max_new_tokens=MAX_NEW, stop_ids=(stop,))
    drafted = ac.decode_drafted(
        target,
        ac.drafting(runner),
        PROMPTS[1],
        num_drafts=5,
        max_new_tokens=MAX_NEW,
        stop_ids=(stop,),
    )
    assert plain.ids == drafted.ids == free.ids[:end]


def test_the_replay_of_the_worked_example() -> None:
    path = [9, 1, 2, 3, 4]  # prompt 9, reply a b c d
    right = {2: [2, 0], 3: [3, 0], 4: [0, 0]}
    result = ac.replay(path, 1, lambda committed: right[committed], 2)
    assert result == ac.Verified(gains=(2, 1), accepted=(1, 0), judged=(2, 1))
    assert ac.tau_of([result.gains]) == 1.5
    assert ac.acceptance_by_position([result], 2) == [0.5, 0.0]


def test_drafts_past_the_end_of_a_reply_do_not_count_against_it() -> None:
    result = ac.replay([9, 1, 2], 1, lambda _: [2, 7, 7], 3)
    assert result == ac.Verified(gains=(1,), accepted=(1,), judged=(1,))
    assert ac.acceptance_by_position([result], 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("other", "place"), [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3)]
)
def test_a_reply_decoded_with_loss_is_told_with_its_place(
    other: list[int], place: int | None
) -> None:
    assert ac.first_difference([1, 2, 3], other) == place


def test_the_interval_holds_tau_and_closes_on_equal_prompts() -> None:
    gains = [(1, 2, 3), (2, 2), (4, 1, 1, 1)]
    low, high = ac.interval_of(gains)
    assert low < ac.tau_of(gains) < high
    assert ac.interval_of([(2, 2)] * 5) == (2.0, 2.0)
    assert ac.tau_of([()]) == 1.0


@pytest.mark.parametrize(
    ("ids", "loops"),
    [([1, 2, 3, 4], False), ([5, 1, 2, 1, 2, 1, 2], True), ([7, 7, 7], True), ([7, 7], False)],
)
def test_loops_are_told_by_their_end(ids: list[int], loops: bool) -> None:
    assert ac.ends_in_loop(ids) is loops


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # three tokens match
        ([5, 3, 8, 9, 1, 3], [8, 9, 1]),  # one token matches
        ([3, 1, 3, 2, 3], [2, 3]),  # the most recent match wins
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup_copies_what_followed(ids: list[int], drafts: list[int]) -> None:
    assert Lookup(max_ngram=3).propose(ids, 3) == drafts
