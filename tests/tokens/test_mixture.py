"""The mixture: counts, cuts, order and split."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.records import Sample
from eyas.settings import Merge
from eyas.tokens.mixture import check_names, cut_at_reply, is_val, mix

MakeSample = Callable[..., Sample]
SETTINGS = Merge(
    sources=("a", "b"),
    caps={},
    token_caps={},
    weights={},
    drop=(),
    extract_tokens_per_s=None,
    max_tokens=50,
    val_permille=300,
    seed=0,
)
GIVEN = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sample_of(make_sample: MakeSample, name: str, turns: list[tuple[int, int]]) -> Sample:
    """Return a sample of (prompt tokens, reply tokens) turns."""
    spans, at = [], 0
    for prompt, reply in turns:
        spans.append((at + prompt, at + prompt + reply))
        at += prompt + reply
    return make_sample(id=name, input_ids=tuple(range(at)), spans=tuple(spans), conversation=name)


turns = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4)


@GIVEN
@given(
    rows=st.lists(turns, max_size=20),
    others=st.lists(turns, max_size=10),
    cap=st.integers(0, 12),
    seed=st.integers(0, 3),
)
def test_rows_add_up_and_no_conversation_is_on_both_sides(
    make_sample: MakeSample,
    rows: list[list[tuple[int, int]]],
    others: list[list[tuple[int, int]]],
    cap: int,
    seed: int,
) -> None:
    first = [sample_of(make_sample, f"c{i % 5}", t) for i, t in enumerate(rows)]
    second = [sample_of(make_sample, f"d{i}", t) for i, t in enumerate(others)]
    merge = replace(SETTINGS, caps={"a": cap}, seed=seed)
    mixture = mix({"a": first, "b": second}, merge)
    out = [*mixture.train, *mixture.val]
    assert mixture.rows_in == len(first) + len(second)
    assert mixture.rows_in == len(out) + sum(mixture.rejects.values())
    assert mixture.rejects.get("over_cap", 0) == max(0, len(first) - cap)
    sides = [{s.conversation for s in side} for side in (mixture.train, mixture.val)]
    assert not sides[0] & sides[1]
    assert all(len(s.input_ids) <= 50 and s.spans for s in out)
    again = mix({"a": first, "b": second}, merge)
    assert (again.train, again.val) == (mixture.train, mixture.val)


@GIVEN
@given(shape=turns, limit=st.integers(1, 130))
def test_a_cut_never_goes_through_a_reply(
    make_sample: MakeSample, shape: list[tuple[int, int]], limit: int
) -> None:
    whole = sample_of(make_sample, "c", shape)
    short = cut_at_reply(whole, limit)
    if short is None:
        assert whole.spans[0][1] > limit
        return
    assert len(short.input_ids) <= limit
    assert short.input_ids == whole.input_ids[: len(short.input_ids)]
    assert short.spans == whole.spans[: len(short.spans)]
    assert short.spans[-1][1] == len(short.input_ids)
    longer = whole.spans[len(short.spans) :]
    assert not longer or longer[0][1] > limit


def test_a_cut_takes_the_marks_of_the_lost_end_along(make_sample: MakeSample) -> None:
    whole = sample_of(make_sample, "c", [(2, 3), (2, 3)])
    whole = replace(whole, flags=("truncated", "half_character", "near"))
    assert cut_at_reply(whole, 10) is whole
    assert cut_at_reply(whole, 9) == replace(
        whole, input_ids=whole.input_ids[:5], spans=whole.spans[:1], flags=("near",)
    )


def test_a_sample_left_without_a_reply_is_rejected(make_sample: MakeSample) -> None:
    mixture = mix({"a": [sample_of(make_sample, "c", [(60, 2)])]}, SETTINGS)
    assert (mixture.rejects, mixture.cut) == ({"too_long": 1}, 0)


def test_the_seed_changes_the_choice_under_a_cap_and_the_order(make_sample: MakeSample) -> None:
    rows = [sample_of(make_sample, f"c{i}", [(2, 3)]) for i in range(40)]
    chosen = [
        [s.id for s in mix({"a": rows}, replace(SETTINGS, caps={"a": 20}, seed=seed)).train]
        for seed in (0, 1)
    ]
    assert set(chosen[0]) != set(chosen[1])
    assert chosen[0] != sorted(chosen[0])


def test_the_split_keeps_its_side_when_samples_come_and_go(make_sample: MakeSample) -> None:
    rows = [sample_of(make_sample, f"c{i}", [(2, 3)]) for i in range(200)]
    all_val = {s.id for s in mix({"a": rows}, SETTINGS).val}
    half_val = {s.id for s in mix({"a": rows[:100]}, SETTINGS).val}
    assert half_val == {name for name in all_val if int(name[1:]) < 100}
    assert len(all_val) == pytest.approx(60, abs=25)


@pytest.mark.parametrize(("permille", "share"), [(0, 0.0), (1000, 1.0)])
def test_nothing_and_everything_are_shares_too(permille: int, share: float) -> None:
    assert sum(is_val(f"c{i}", permille) for i in range(50)) / 50 == share


@GIVEN
@given(
    rows=st.lists(turns, max_size=20),
    weight=st.floats(0.01, 1.0),
    cap=st.integers(0, 20),
    token_cap=st.integers(0, 400),
)
def test_rows_add_up_under_every_rule_at_once(
    make_sample: MakeSample,
    rows: list[list[tuple[int, int]]],
    weight: float,
    cap: int,
    token_cap: int,
) -> None:
    samples = [sample_of(make_sample, f"c{i}", t) for i, t in enumerate(rows)]
    rules = replace(SETTINGS, weights={"a": weight}, caps={"a": cap}, token_caps={"a": token_cap})
    mixture = mix({"a": samples}, rules)
    out = [*mixture.train, *mixture.val]
    assert mixture.rows_in == len(samples) == len(out) + sum(mixture.rejects.values())
    assert len(out) <= min(cap, round(weight * len(samples)))
    assert sum(len(s.input_ids) for s in out) <= token_cap


def test_a_weight_takes_a_share_and_a_smaller_one_a_part_of_it(make_sample: MakeSample) -> None:
    rows = [sample_of(make_sample, f"c{i}", [(2, 3)]) for i in range(40)]
    taken = []
    for weight in (1.0, 0.5, 0.25):
        mixture = mix({"a": rows}, replace(SETTINGS, weights={"a": weight}))
        taken.append({s.id for s in (*mixture.train, *mixture.val)})
        assert mixture.rejects.get("over_weight", 0) == 40 - len(taken[-1])
    assert [len(ids) for ids in taken] == [40, 20, 10]
    assert taken[2] < taken[1] < taken[0]


def test_a_token_cap_ends_at_the_first_row_that_goes_over(make_sample: MakeSample) -> None:
    rows = [sample_of(make_sample, f"c{i}", [(2, 3)]) for i in range(10)]
    mixture = mix({"a": rows, "b": rows[:1]}, replace(SETTINGS, token_caps={"a": 24}))
    assert len(mixture.train) + len(mixture.val) == 4 + 1
    assert mixture.rejects == {"over_token_cap": 6}


def test_tokens_are_capped_after_samples_are_cut(make_sample: MakeSample) -> None:
    rows = [sample_of(make_sample, "c", [(10, 10), (40, 10)])]
    mixture = mix({"a": rows}, replace(SETTINGS, token_caps={"a": 20}))
    assert [len(s.input_ids) for s in (*mixture.train, *mixture.val)] == [20]


def test_a_dropped_set_is_counted_and_changes_no_other(make_sample: MakeSample) -> None:
    rows = [sample_of(make_sample, f"c{i}", [(2, 3)]) for i in range(10)]
    others = [sample_of(make_sample, f"d{i}", [(2, 3)]) for i in range(4)]
    mixture = mix({"a": rows, "b": others}, replace(SETTINGS, drop=("b",)))
    alone = mix({"a": rows}, SETTINGS)
    assert (mixture.train, mixture.val) == (alone.train, alone.val)
    assert (mixture.rows_in, mixture.rejects) == (14, {"dropped_set": 4})


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (replace(SETTINGS, caps={"c": 1}), "merge.caps: 'c' is not in merge.sources"),
        (replace(SETTINGS, token_caps={"c": 1}), "merge.token_caps: 'c' is not"),
        (replace(SETTINGS, weights={"c": 1.0}), "merge.weights: 'c' is not"),
        (replace(SETTINGS, drop=("c",)), "merge.drop: 'c' is not"),
        (replace(SETTINGS, weights={"a": 0.0}), r"merge.weights.a: expected a share .* got 0.0"),
        (replace(SETTINGS, weights={"a": 2.0}), "rows are never repeated"),
    ],
)
def test_a_rule_that_cannot_be_names_its_option(rules: Merge, words: str) -> None:
    with pytest.raises(EyasError, match=words):
        check_names(rules)
