from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafter.packing import (
    Packer,
    aux_scale,
    number_replies,
    part_with_reply,
    plan_epoch,
    predictions,
)
from eyas.drafter.unroll import rows_at
from eyas.errors import EyasError


def test_the_windows_of_the_documented_epoch() -> None:
    seed = 1044  # whose random order is 4 0 5 2 1 3, and of windows 1 0
    assert plan_epoch([1] * 6, 2, seed, [0, 0, 0, 1, 1, 1]) == [[4, 5], [3], [0, 2], [1]]


def test_an_epoch_goes_through_one_window_after_another() -> None:
    windows = [0] * 20 + [1] * 20 + [2] * 20
    lengths = [1 + index % 4 for index in range(60)]
    plans = [plan_epoch(lengths, 10, seed, windows) for seed in range(9)]
    for plan in plans:
        assert sorted(index for step in plan for index in step) == list(range(60))
        of_steps = [{windows[index] for index in step} for step in plan]
        assert all(len(one) == 1 for one in of_steps), "a step ends with its window"
        assert len(list(groupby(of_steps))) == 3, "no window comes twice"
    assert len({windows[plan[0][0]] for plan in plans}) == 3, "their order is random"
    assert len({str(plan) for plan in plans}) == 9
    assert plan_epoch(lengths, 10, 0, [0] * 60) == plan_epoch(lengths, 10, 0)


def test_the_worked_example_of_the_module() -> None:
    # position 0 1 2 3 4 5 = U H a b E U; the reply is positions 2..4
    reply_T = number_replies(6, [(2, 5)], truncated=False)
    found = predictions(reply_T)
    position_T = torch.arange(6)
    assert found.tolist() == [2, 3]
    assert rows_at(found, position_T, 0)[0].tolist() == [1, 2]
    assert rows_at(found, position_T, 1)[0].tolist() == [0, 1]
    assert rows_at(found, position_T, 2)[0].tolist() == [0], "p = 2 would need row -1"
    assert rows_at(found, position_T, 2)[1].tolist() == [False, True]


def test_two_replies_that_touch_are_not_one() -> None:
    assert predictions(number_replies(7, [(1, 4), (4, 7)], truncated=False)).tolist() == [
        1,
        2,
        4,
        5,
    ]


def test_a_truncated_reply_loses_its_last_two_tokens_and_only_the_last_reply() -> None:
    reply_T = number_replies(9, [(1, 3), (5, 9)], truncated=True)
    assert reply_T.tolist() == [0, 1, 1, 0, 0, 2, 2, 0, 0]
    assert number_replies(5, [(3, 4)], truncated=True).tolist() == [0] * 5


@pytest.mark.parametrize("length", [1, 2])
def test_documents_too_short_for_a_prediction_have_none(length: int) -> None:
    assert predictions(torch.ones(length, dtype=torch.int32)).tolist() == []


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    tokens=st.integers(1, 60),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_each_epoch_holds_every_document_once_in_full_steps(lengths, tokens, seed) -> None:
    plan = plan_epoch(lengths, tokens, seed)
    assert sorted(i for step in plan for i in step) == list(range(len(lengths)))
    assert plan == plan_epoch(lengths, tokens, seed)
    sizes = [sum(lengths[i] for i in step) for step in plan]
    for step, size, following in zip(plan, sizes, [*plan[1:], None], strict=True):
        assert size <= tokens or len(step) == 1
        assert following is None or size + lengths[following[0]] > tokens


def test_epochs_of_other_seeds_have_another_order() -> None:
    assert plan_epoch([1] * 50, 10, 0) != plan_epoch([1] * 50, 10, 1)


def test_a_pack_lays_documents_end_to_end(tiny) -> None:
    packer = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d)
    pack = packer.pack([1, 0])
    first, second = tiny.documents.documents[1], tiny.documents.documents[0]
    assert pack.lengths == (9, 14)
    assert torch.equal(pack.input_ids_T, torch.cat([first.input_ids_T, second.input_ids_T]))
    assert pack.predictions_P.tolist() == [4, 5, 6, 7, 9 + 3, 9 + 4, 9 + 9, 9 + 10, 9 + 11]
    favourites = (pack.final_TD[pack.predictions_P] @ tiny.head_VD.T).argmax(-1)
    assert torch.equal(pack.in_vocab_P, tiny.drafter.t2d[favourites])


def test_the_targets_favourites_are_asked_once_a_document(tiny) -> None:
    asked: list[int] = []

    def favourites(final_PD):
        asked.append(len(final_PD))
        return tiny.favourites(final_PD)

    packer = Packer(tiny.documents, favourites, tiny.drafter.t2d)
    first = packer.pack([0, 1])
    again = packer.pack([0, 1])
    assert asked == [5, 4]
    assert torch.equal(first.in_vocab_P, again.in_vocab_P)


def test_the_aux_scale_is_a_power_of_two_near_the_rms(tiny) -> None:
    scale_LD = aux_scale(tiny.documents)
    rows = torch.cat([d.aux_TLD[1:] for d in tiny.documents.documents])
    ratio = rows.square().mean(0).sqrt() / scale_LD
    assert torch.equal(scale_LD.log2(), scale_LD.log2().round())
    assert ratio.min() > 0.7
    assert ratio.max() < 1.42


def test_states_that_are_not_finite_are_refused(tiny) -> None:
    tiny.documents.documents[0].aux_TLD[3] = torch.inf
    with pytest.raises(EyasError, match="finite aux states"):
        aux_scale(tiny.documents)


@pytest.mark.parametrize(("most", "part"), [(8, slice(0, 8)), (4, slice(4, 8)), (7, slice(0, 7))])
def test_the_part_that_is_read_holds_a_prediction(most: int, part: slice) -> None:
    reply_T = number_replies(10, [(6, 10)], truncated=False)
    assert int(predictions(reply_T)[0]) == 6
    assert part_with_reply(reply_T, most) == part
