"""How often ids occur in replies, against a naive count."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.records import Sample, packed
from eyas.tokens import counts

MakeSample = Callable[..., Sample]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=12), max_size=9))
def test_only_ids_inside_replies_count(
    make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch, rows: list[list[int]]
) -> None:
    monkeypatch.setattr(counts, "_BATCH_SAMPLES", 4)
    samples = [make_sample(input_ids=tuple(ids), spans=((1, len(ids)),)) for ids in rows]
    naive = Counter(i for ids in rows for i in ids[1:])
    for form in (samples, list(map(packed, samples))):
        counts_V = counts.count_reply_tokens(form)
        assert {i: int(n) for i, n in enumerate(counts_V) if n} == dict(naive)


def test_coverage_is_the_share_of_the_most_frequent(make_sample: MakeSample) -> None:
    one = make_sample(input_ids=(9, 9, 9, 9, 3, 3, 5, 7), spans=((1, 8),))
    counts_V = counts.count_reply_tokens([one])
    covered = counts.coverage_of_most_frequent(counts_V, (1, 2, 100))
    assert covered == {1: round(3 / 7, 5), 2: round(5 / 7, 5), 100: 1.0}
    assert counts.coverage_of_most_frequent(counts.count_reply_tokens([]), (4,)) == {4: 0.0}
