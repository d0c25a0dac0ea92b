import pytest
import torch

from eyas.errors import EyasError
from eyas.states.teacher import favourites, top_tokens


@pytest.fixture
def made() -> tuple[torch.Tensor, torch.Tensor]:
    """Return states of 300 rows, more than a part, and lm_head of 9,000 tokens, more than one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(300, 8, generator=generator), torch.randn(9000, 8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_are_those_of_a_float64_softmax(
    made: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    final_RD, head_VD = (x.to(dtype) for x in made)
    top_R2K = top_tokens(final_RD, head_VD, 16)
    assert (top_R2K.dtype, top_R2K.shape) == (torch.float32, (300, 2, 16))
    ids_RK, logprobs_RK = top_R2K.unbind(1)
    exact_RV = (final_RD.double() @ head_VD.double().T).log_softmax(-1)
    values_RK = exact_RV.topk(16).values
    # float32 sums of 8 products of size 10 at most, and a log of 9,000 addends
    torch.testing.assert_close(logprobs_RK.double(), values_RK, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact_RV.gather(1, ids_RK.long()), values_RK, rtol=0, atol=1e-5)
    assert (logprobs_RK.diff(dim=1) <= 0).all(), "the likeliest first"


def test_the_whole_vocabulary_leaves_no_tail(made: tuple[torch.Tensor, torch.Tensor]) -> None:
    ids_RK, logprobs_RK = top_tokens(made[0][:5], made[1][:40], 40).unbind(1)
    assert ids_RK.sort(1).values.tolist() == [list(range(40))] * 5
    torch.testing.assert_close(logprobs_RK.exp().sum(1), torch.ones(5))


def test_no_rows_give_none_and_more_tokens_than_there_are_is_refused() -> None:
    assert top_tokens(torch.zeros(0, 8), torch.zeros(40, 8), 4).shape == (0, 2, 4)
    with pytest.raises(EyasError, match=r"extract.teacher_k: expected at most 40 \(V\), got 41"):
        top_tokens(torch.zeros(2, 8), torch.zeros(40, 8), 41)


def test_a_favourite_is_the_stored_one_else_that_of_the_state_else_none(
    made: tuple[torch.Tensor, torch.Tensor],
) -> None:
    final_TD, head_VD = made[0][:4].clone(), made[1]
    wanted = (final_TD @ head_VD.T).argmax(-1)
    final_TD[2] = torch.nan
    assert favourites(final_TD, None, head_VD).tolist() == [*wanted[:2], -1, wanted[3]]
    ids_TK = torch.tensor([[torch.nan, torch.nan], [3, 4], [5, 6], [7, 8]])
    top_T2K = torch.stack([ids_TK, -ids_TK], dim=1)
    assert favourites(final_TD, top_T2K, head_VD).tolist() == [-1, 3, 5, 7]
