"""Draft-verify decoding against plain decoding and its replay."""

from typing import Any

import pytest
import torch

from eyas.drafter import acceptance as ac
from eyas.drafter.inference import DraftRunner
from eyas.drafter.lookup import Lookup
from eyas.drafter.trees import Tree, chain
from eyas.drafter.verifier import Target

PROMPTS = ([5, 7, 11, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [90])
AUX = (1, 3, 4)
MAX_NEW = 24


def plain_ids(llama: Any, prompt: list[int]) -> list[int]:
    out = llama.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_NEW, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("kind", ["eagle", "lookup"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_drafted_ids_are_those_of_plain_decoding_and_the_replay_verifies_as_often(
    llama: Any, verifier: Target, runner: DraftRunner, num_drafts: int, kind: str, batch: int
) -> None:
    lookup, prompts = Lookup(max_ngram=3), PROMPTS[-batch:]

    def proposing() -> ac.Propose:
        return ac.drafting(runner) if kind == "eagle" else ac.looking_up(lookup)

    plain = ac.decode_plain(verifier, prompts, max_new_tokens=MAX_NEW, stop_ids=())
    drafted = ac.decode_drafted(
        verifier, proposing, prompts, num_drafts=num_drafts, max_new_tokens=MAX_NEW, stop_ids=()
    )
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        assert list(one.ids) == plain_ids(llama, prompt)
        assert other.ids == one.ids
        path = [*prompt, *one.ids]
        assert one.aux_TLD is not None
        chains_TJ = runner.draft_everywhere(path, one.aux_TLD, num_drafts)

        def drafted_at(
            committed: int, path: list[int] = path, chains_TJ: torch.Tensor = chains_TJ
        ) -> list[int]:
            if kind == "lookup":
                return lookup.propose(path[:committed], num_drafts)
            return chains_TJ[committed - 2].tolist()

        assert ac.replay(path, len(prompt), drafted_at, num_drafts) == other.verified
        assert sum(other.verified.gains) == MAX_NEW - 1
        assert other.forward_passes == 1 + len(other.verified.gains)
        assert one.forward_passes == len(one.gaps) == MAX_NEW


@pytest.mark.parametrize(("right", "gain"), [(0, 1), (1, 2), (3, 4)])
def test_drafts_that_are_right_are_gained_with_the_bonus_token(
    verifier: Target, right: int, gain: int
) -> None:
    plain = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=())
    paths = [[*prompt, *one.ids] for prompt, one in zip(PROMPTS, plain, strict=True)]

    def oracle(committed: list[int], _aux: torch.Tensor, num_drafts: int) -> Tree:
        path = next(p for p in paths if p[: len(committed)] == committed)
        ahead = path[len(committed) : len(committed) + num_drafts]
        return chain([t if k < right else (t + 1) % 97 for k, t in enumerate(ahead)])

    drafted = ac.decode_drafted(
        verifier,
        lambda: oracle,
        PROMPTS,
        num_drafts=3,
        max_new_tokens=MAX_NEW,
        stop_ids=(),
    )
    for one, other in zip(plain, drafted, strict=True):
        assert other.ids == one.ids
        assert set(other.verified.gains[:-1]) == {gain}


def test_rows_that_gain_differently_stay_apart(verifier: Target) -> None:
    plain = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=())
    rights = iter((0, 3, 1))

    def proposing() -> ac.Propose:
        right = next(rights)
        row = (0, 3, 1).index(right)
        path = [*PROMPTS[row], *plain[row].ids]
        return lambda ids, _aux, _k: chain(
            [*path[len(ids) : len(ids) + right], *([96] * (3 - right))]
        )

    drafted = ac.decode_drafted(
        verifier, proposing, PROMPTS, num_drafts=3, max_new_tokens=MAX_NEW, stop_ids=()
    )
    assert [one.ids for one in drafted] == [one.ids for one in plain]
    passes = [one.forward_passes for one in drafted]
    assert passes[1] < passes[2] < passes[0]


def test_a_stop_id_ends_both_kinds_of_reply(verifier: Target, runner: DraftRunner) -> None:
    free = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=())
    stop = free[1].ids[7]
    cut = [one.ids[: one.ids.index(stop) + 1] if stop in one.ids else one.ids for one in free]
    plain = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=(stop,))
    drafted = ac.decode_drafted(
        verifier,
        lambda: ac.drafting(runner),
        PROMPTS,
        num_drafts=5,
        max_new_tokens=MAX_NEW,
        stop_ids=(stop,),
    )
    assert [one.ids for one in plain] == [one.ids for one in drafted] == cut
    assert len({len(ids) for ids in cut}) > 1, "replies of one batch end at different times"


def test_an_accepted_stop_id_ends_the_reply_within_the_chain(verifier: Target) -> None:
    (free,) = ac.decode_plain(verifier, PROMPTS[:1], max_new_tokens=MAX_NEW, stop_ids=())
    path, stop = [*PROMPTS[0], *free.ids], free.ids[2]
    first = free.ids.index(stop)
    (drafted,) = ac.decode_drafted(
        verifier,
        lambda: lambda ids, _aux, k: chain(path[len(ids) : len(ids) + k]),
        PROMPTS[:1],
        num_drafts=5,
        max_new_tokens=MAX_NEW,
        stop_ids=(stop,),
    )
    assert drafted.ids == free.ids[: first + 1]
    assert sum(drafted.verified.gains) == first


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_no_reply_is_longer_than_asked(
    verifier: Target, runner: DraftRunner, max_new_tokens: int
) -> None:
    drafted = ac.decode_drafted(
        verifier,
        lambda: ac.drafting(runner),
        PROMPTS,
        num_drafts=5,
        max_new_tokens=max_new_tokens,
        stop_ids=(),
    )
    assert [len(one.ids) for one in drafted] == [max_new_tokens] * len(PROMPTS)


def test_plain_decoding_keeps_the_aux_states_of_one_whole_pass(
    llama: Any, verifier: Target
) -> None:
    plain = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=())
    for prompt, one in zip(PROMPTS, plain, strict=True):
        path = [*prompt, *one.ids[:-1]]
        with torch.no_grad():
            out = llama(torch.tensor([path]), output_hidden_states=True)
        whole_TLD = torch.stack([out.hidden_states[i + 1][0] for i in AUX], dim=1)
        assert one.aux_TLD is not None
        torch.testing.assert_close(one.aux_TLD, whole_TLD, rtol=1e-4, atol=1e-4)


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
