import pytest
import torch

from eyas.drafter import ranks
from eyas.errors import EyasError


def pretend(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(ranks, "size", lambda: size)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: rank)


def test_every_document_is_of_one_rank_and_tokens_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [90, 10, 30, 50, 40, 20]
    shares = []
    for rank in range(3):
        pretend(monkeypatch, rank, 3)
        shares.append(ranks.share([5, 0, 4, 3, 2, 1], lengths))
    assert shares == [[0], [5, 3, 1], [4, 2]]  # 90, 80 and 70 tokens, in the order of the step
    pretend(monkeypatch, 2, 3)
    assert ranks.share([1, 4], lengths) == []


def test_a_lost_rank_and_ranks_at_two_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, 2)
    monkeypatch.setattr(
        ranks.dist, "all_reduce", lambda values: values.copy_(torch.tensor([7, 25]))
    )
    with pytest.raises(EyasError, match=r"at one step, got 3 and others"):
        ranks.agree([], 3)  # the other is at 4

    def broken(values: torch.Tensor) -> None:
        raise RuntimeError("Connection reset by peer. More")

    monkeypatch.setattr(ranks.dist, "all_reduce", broken)
    with pytest.raises(EyasError, match=r"rank 0 has lost another of 2 ranks \(Conn.* peer\)\n"):
        ranks.all_sum(torch.zeros(1))


def test_alone_nothing_is_done() -> None:
    assert (ranks.launched(), ranks.leads(), ranks.size()) == (False, True, 1)
    documents, parameter = [3, 1], torch.ones(2, requires_grad=True)
    assert ranks.share(documents, [1, 1, 1, 1]) is documents
    ranks.sum_gradients([parameter])
    assert parameter.grad is None
    assert [ranks.leader_says(value) for value in (True, False)] == [True, False]


def test_a_rank_without_memory_does_not_blame_another() -> None:
    with pytest.raises(torch.OutOfMemoryError), ranks.together():
        raise torch.OutOfMemoryError("CUDA out of memory")
