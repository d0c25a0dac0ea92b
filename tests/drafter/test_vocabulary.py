import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafter.vocabulary import choose_vocabulary, count_tokens, coverage
from eyas.errors import EyasError

VOCAB = 30
counts = st.lists(st.integers(0, 5), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


def test_only_tokens_of_replies_are_counted() -> None:
    documents = [
        (torch.tensor([5, 5, 6]), torch.tensor([0, 1, 1])),
        (torch.tensor([5, 7]), torch.tensor([1, 0])),
    ]
    assert count_tokens(documents, 8).tolist() == [0, 0, 0, 0, 0, 2, 1, 0]


@given(
    counts=counts, size=st.integers(6, VOCAB), forced=st.sets(st.integers(0, VOCAB - 1), max_size=3)
)
@settings(deadline=None, max_examples=100)
def test_forced_ids_are_in_and_no_chosen_id_is_rarer_than_one_left_out(
    counts, size, forced
) -> None:
    t2d = choose_vocabulary(counts, size, forced)
    must = {0, 1, 2} | forced
    assert int(t2d.sum()) == size
    assert all(bool(t2d[i]) for i in must)
    free = [i for i in range(VOCAB) if i not in must]
    inside = [(int(counts[i]), -i) for i in free if t2d[i]]
    outside = [(int(counts[i]), -i) for i in free if not t2d[i]]
    assert not inside or not outside or min(inside) > max(outside), "by count, then by lowest id"


@given(counts=counts, size=st.integers(3, VOCAB))
@settings(deadline=None, max_examples=50)
def test_offsets_lead_from_draft_to_target_ids(counts, size) -> None:
    t2d = choose_vocabulary(counts, size)
    used = t2d.nonzero().flatten()
    d2t = used - torch.arange(size)
    assert torch.equal(torch.arange(size) + d2t, used)
    assert bool((d2t.diff() >= 0).all())


def test_missing_ids_are_filled_from_the_lowest() -> None:
    counts_V = torch.zeros(VOCAB, dtype=torch.int64)
    counts_V[20] = 4
    assert choose_vocabulary(counts_V, 6).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 20]


@pytest.mark.parametrize("size", [VOCAB + 1, 4])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(EyasError, match=r"drafter\.draft_vocab_size: expected 5 .* got"):
        choose_vocabulary(torch.ones(VOCAB), size, {10, 11})


def test_coverage_is_a_share_of_tokens() -> None:
    t2d = torch.tensor([True, False, True])
    assert coverage(torch.tensor([1, 2, 1]), t2d) == 0.5
    assert coverage(torch.tensor([0, 0, 0]), t2d) == 0.0
