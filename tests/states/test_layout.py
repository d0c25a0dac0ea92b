from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.packing import number_replies, predictions
from eyas.errors import EyasError
from eyas.states.layout import (
    expected_tensors,
    final_positions,
    make_layout,
    num_final_rows,
    scatter_rows,
    teacher_positions,
)

ALL = make_layout("bf16", "bf16", "all")
SOME = make_layout("int4", "fp8", "supervised")
TOP = make_layout("fp8", "bf16", "supervised", 5, 3)


@pytest.mark.parametrize(
    ("length", "spans", "expected"),
    [
        (6, ((2, 5),), [2, 3]),  # the example of the module
        (6, ((0, 3), (3, 6)), [1, 3, 4]),  # replies that touch; no row stands before position 0
        (6, ((4, 5), (5, 6)), []),  # one token predicts nothing of its own reply
        (6, ((5, 5),), []),
        (6, (), []),
    ],
)
def test_supervised_rows_by_hand(
    length: int, spans: tuple[tuple[int, int], ...], expected: list[int]
) -> None:
    assert final_positions(SOME, length, spans).tolist() == expected
    assert num_final_rows(SOME, length, spans) == len(expected)
    assert final_positions(ALL, length, spans).tolist() == list(range(length))
    assert num_final_rows(ALL, length, spans) == length
    assert teacher_positions(TOP, spans).tolist() == expected
    assert teacher_positions(SOME, spans).tolist() == []
    assert final_positions(TOP, length, spans).tolist() == [p for p in expected if p % 3 == 0]
    assert num_final_rows(TOP, length, spans) == sum(p % 3 == 0 for p in expected)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=8), st.booleans())
def test_every_row_that_the_loss_reads_is_kept(cuts: list[int], truncated: bool) -> None:
    ends = sorted(cuts)
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    kept = set(final_positions(SOME, 41, spans).tolist())
    whole = set(predictions(number_replies(41, spans, truncated=False)).tolist())
    assert kept == whole
    assert kept >= set(predictions(number_replies(41, spans, truncated=truncated)).tolist())


def test_rows_that_are_not_kept_come_back_as_nan() -> None:
    final_TD = scatter_rows(torch.ones(2, 3), torch.tensor([1, 4]), 6)
    assert final_TD.isnan().all(1).tolist() == [True, False, True, True, False, True]
    assert torch.equal(final_TD[[1, 4]], torch.ones(2, 3))
    assert scatter_rows(torch.ones(0, 3), torch.zeros(0, dtype=torch.int64), 2).isnan().all()
    top_T2K = scatter_rows(torch.ones(1, 2, 5), torch.tensor([1]), 3)
    assert top_T2K.isnan().all(-1).all(-1).tolist() == [True, False, True]


def test_tensors_of_a_shard_by_hand() -> None:
    assert expected_tensors(SOME, tokens=9, final_rows=2, num_layers=3, hidden_size=130) == {
        "input_ids": (torch.int32, [9]),
        "aux.codes": (torch.uint8, [9, 3, 3, 32]),
        "aux.steps": (torch.bfloat16, [9, 3, 3]),
        "aux.outliers": (torch.bfloat16, [9, 3, 1]),
        "aux.places": (torch.int16, [9, 3, 1]),
        "final.values": (torch.float8_e4m3fn, [2, 130]),
        "final.scales": (torch.float32, [2]),
    }


def test_a_teacher_adds_ids_and_log_probabilities_of_the_rows_that_the_loss_reads() -> None:
    expected = expected_tensors(
        TOP, tokens=9, final_rows=2, teacher_rows=4, num_layers=3, hidden_size=130
    )
    assert {name: expected[name] for name in expected if not name.startswith("aux")} == {
        "input_ids": (torch.int32, [9]),
        "final.values": (torch.bfloat16, [2, 130]),
        "teacher.top": (torch.float32, [4, 2, 5]),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("zip", "bf16", "all"), r"extract.codec: expected fp32 \| bf16 \| fp8 \| int4, got 'zip'"),
        (("fp8", "int4", "all"), r"extract.final_codec: expected fp32 \| bf16 \| fp8, got 'int4'"),
        (("fp8", "fp8", "some"), r"extract.final_rows: expected all \| supervised, got 'some'"),
        (("fp8", "fp8", "all", 0), "extract.teacher_k: expected 1 or more, or null, got 0"),
        (("fp8", "fp8", "all", 4, 0), "extract.final_every: expected 1, .* got 0"),
        (
            ("fp8", "fp8", "all", None, 2),
            r"final_every: expected 1, or more with extract.teacher_k, got 2\n  hint: without",
        ),
    ],
)
def test_options_that_do_not_exist_are_named(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(EyasError, match=message):
        make_layout(*options)
