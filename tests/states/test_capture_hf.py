from typing import Any

import pytest
import torch

from eyas.states.capture_hf import batches, capture

LAYERS = (1, 3, 4)
ROWS = [[5, 6, 7, 8, 9], [10, 11], list(range(20, 37))]


def test_one_row_alone_is_bit_for_bit_what_transformers_reports(llama: Any) -> None:
    (states,) = capture(llama, [ROWS[2]], LAYERS)
    reported = llama(torch.tensor([ROWS[2]]), output_hidden_states=True).hidden_states
    for axis, layer in enumerate(LAYERS):
        assert torch.equal(states.aux_TLD[:, axis], reported[layer + 1][0])
    assert torch.equal(states.final_TD, reported[-1][0])


def test_rows_run_together_give_what_each_gives_alone(llama: Any) -> None:
    for ids, together in zip(ROWS, capture(llama, ROWS, LAYERS), strict=True):
        (alone,) = capture(llama, [ids], LAYERS)
        assert together.aux_TLD.shape == (len(ids), 3, 48)
        # another number of rows a product: float32 rounding only
        torch.testing.assert_close(together.aux_TLD, alone.aux_TLD, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.final_TD, alone.final_TD, rtol=1e-4, atol=1e-5)


def test_no_hook_stays_behind(llama: Any) -> None:
    before = [len(layer._forward_hooks) for layer in llama.model.layers]
    capture(llama, ROWS, LAYERS)
    assert [len(layer._forward_hooks) for layer in llama.model.layers] == before


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ([5, 5, 5], 10, [[0, 1], [2]]),
        ([1, 9, 4, 5], 10, [[1], [3, 2, 0]]),
        ([30, 2], 10, [[0], [1]]),
        ([], 10, []),
    ],
)
def test_batches_hold_like_lengths_up_to_a_number_of_tokens(
    lengths: list[int], limit: int, expected: list[list[int]]
) -> None:
    assert batches(lengths, limit) == expected
