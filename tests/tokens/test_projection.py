"""The projection: what is added up, and what is left without a data set."""

from collections.abc import Callable
from typing import Any

from eyas.records import Sample
from eyas.tokens.projection import Extent, metered, project

MakeSample = Callable[..., Sample]
A = Extent(samples=2, tokens=30, supervised=12, final_rows=10)
B = Extent(samples=1, tokens=10, supervised=8, final_rows=7)


def table(**mixed: Extent) -> dict[str, Any]:
    costs = {"wide": lambda one: 10.0 * one.tokens, "tight": lambda one: 1.4 * one.final_rows}
    return project({"a": A, "b": B}, mixed, costs, lambda tokens: tokens / 10)


def test_samples_pass_through_and_are_added_up_by_data_set(make_sample: MakeSample) -> None:
    rows = [
        make_sample(id="1", input_ids=range(9), spans=((2, 4), (5, 9))),
        make_sample(id="2", input_ids=range(5), spans=((3, 5),)),
        make_sample(id="3", dataset="code"),
    ]
    found = {"empty": Extent()}
    assert list(metered(rows, found, lambda s: len(s.spans))) == rows
    assert found == {
        "empty": Extent(),
        "chat": Extent(samples=2, tokens=14, supervised=8, final_rows=3),
        "code": Extent(samples=1, tokens=6, supervised=3, final_rows=1),
    }


def test_each_set_stands_beside_what_is_left_without_it() -> None:
    whole = table(a=A, b=B)
    assert whole["datasets"]["a"]["mixture"] == {
        "samples": 2,
        "tokens": 30,
        "supervised_share": 0.4,
        "bytes": {"wide": 300, "tight": 14},
        "hours": 3.0,
    }
    assert whole["datasets"]["a"]["all_without"] == whole["datasets"]["b"]["mixture"]
    assert whole["datasets"]["b"]["all_without"] == whole["datasets"]["a"]["mixture"]
    assert whole["all"]["mixture"]["tokens"] == 40
    assert whole["all"]["mixture"]["supervised_share"] == 0.5


def test_what_a_cap_left_out_shows_beside_what_there_is() -> None:
    capped = table(a=Extent(samples=1, tokens=10, supervised=4, final_rows=3))
    assert capped["all"]["valid"]["tokens"] == 40
    assert capped["all"]["mixture"]["tokens"] == 10
    assert capped["datasets"]["b"]["mixture"]["samples"] == 0
    assert capped["datasets"]["b"]["mixture"]["supervised_share"] == 0
    assert capped["datasets"]["b"]["all_without"] == capped["all"]["mixture"]


def test_hours_are_unknown_without_a_rate() -> None:
    nothing = project({"a": A}, {"a": A}, {}, lambda _tokens: None)
    assert nothing["all"]["mixture"]["hours"] is None
