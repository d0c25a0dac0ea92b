"""The structural rules, each by a sample that breaks it alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.records import Sample
from eyas.settings import Validate
from eyas.tokens.checks import CHECKS, Context, loop_period, violations_of
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.chatml import ChatML

MakeSample = Callable[..., Sample]


@pytest.fixture
def context(codec: ChatML, rules: Validate) -> Context:
    return Context(codec=codec, rules=rules)


def saying(codec: ChatML, make_sample: MakeSample, text: str, **changes: Any) -> Sample:
    ids = codec.reply_ids(ReplyParts(content=text), "stop")
    spans = ((1, 1 + len(ids)),)
    return make_sample(input_ids=(1, *ids), spans=spans, **changes)


def rules_broken(sample: Sample, context: Context) -> list[str]:
    return [v.rule for v in violations_of(sample, context)]


def test_a_sound_sample_breaks_no_rule(
    codec: ChatML, context: Context, make_sample: MakeSample
) -> None:
    assert rules_broken(saying(codec, make_sample, "It is 144."), context) == []
    two = make_sample(input_ids=(1, 40, 2, 198, 1, 41, 2), spans=((1, 3), (5, 7)))
    assert rules_broken(two, context) == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"input_ids": (1, 40, 41, 600, 43, 2)}, "ids_in_range"),
        ({"input_ids": (1, 40, 41, -1, 43, 2)}, "ids_in_range"),
        ({"input_ids": (), "spans": ()}, "ids_in_range"),
        ({"spans": ()}, "spans"),
        ({"spans": ((0, 3),)}, "spans"),
        ({"spans": ((3, 3),)}, "spans"),
        ({"spans": ((3, 7),)}, "spans"),
        ({"spans": ((4, 6), (1, 3))}, "spans"),
        ({"spans": ((1, 4), (3, 6))}, "spans"),
        ({"spans": ((1, 3), (5, 6))}, "says_something"),
        ({"spans": ((3, 5),)}, "ends_with_stop"),
        ({"spans": ((1, 3), (3, 5)), "flags": ("truncated",)}, "ends_with_stop"),
        ({"input_ids": (1, 40, 41, 1, 43, 2)}, "no_special_inside"),
        ({"input_ids": (1, 40, 41, 2, 43, 2)}, "no_special_inside"),
    ],
)
def test_a_rule_is_broken_alone(
    context: Context, make_sample: MakeSample, changes: dict[str, Any], rule: str
) -> None:
    assert rules_broken(make_sample(**changes), context)[:1] == [rule]


def test_a_cut_reply_needs_no_stop_id(context: Context, make_sample: MakeSample) -> None:
    cut = make_sample(input_ids=(1, 40, 41, 42, 43), spans=((3, 5),), flags=("truncated",))
    assert rules_broken(cut, context) == []


@pytest.mark.parametrize(
    ("text", "rule", "shown"),
    [
        ("lost � here", "no_replacement_character", "U+FFFD in 'lost � here'"),
        ("so <|im_end|> it is", "no_leaked_marker", "'<|im_end|>' as text"),
        ("<think> no", "no_leaked_marker", "'<think>' as text"),
        ("a <|tool_calls_section_begin|> b", "no_leaked_marker", "section_begin|>' as text"),
        ("end\n: OPENROUTER PROCESSING\n", "no_api_fragment", "': OPENROUTER PROCESSING' in"),
        ('{"id":"gen-1","choices":[]}', "no_api_fragment", "gen-' in the text"),
        ("the dog the dog the dog the dog", "no_repetition_loop", "a period of"),
    ],
)
def test_a_faulty_text_is_found_and_shown(
    codec: ChatML, context: Context, make_sample: MakeSample, text: str, rule: str, shown: str
) -> None:
    (violation,) = violations_of(saying(codec, make_sample, text), context)
    assert (violation.rule, violation.severity) == (rule, "reject")
    assert shown in violation.detail


class Calling(ChatML):
    """A codec whose replies are one call with the text as its arguments."""

    def __init__(self, codec: ChatML) -> None:
        vars(self).update(vars(codec))
        self.markup_ids = frozenset({43})

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        return f"cut {is_cut}" if 43 in ids else None

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        text = super().parse_reply(ids).content
        call = {"id": "f:0", "function": {"name": "f", "arguments": text}}
        return ReplyParts(content=None, tool_calls=(call,))


def test_faulty_arguments_are_a_flag_and_hide_no_other_rule(
    codec: ChatML, rules: Validate, make_sample: MakeSample
) -> None:
    schema = {"type": "object", "required": ["x"]}
    tools = {"p1": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    context = Context(codec=Calling(codec), rules=replace(rules, drop_loops=False), tools=tools)
    split = saying(codec, make_sample, "{}", id="p1-0", conversation="the whole it is a part of")
    (violation,) = violations_of(split, context)
    assert (violation.rule, violation.severity) == ("arguments_fit", "flag")
    assert violation.detail == "f: arguments: 'x' is missing"
    other = saying(codec, make_sample, "{}", id="p2-0")
    assert violations_of(other, context) == []
    looping = saying(codec, make_sample, "the dog the dog the dog the dog", id="p1-0")
    assert rules_broken(looping, context) == ["no_repetition_loop", "arguments_fit"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ('{"x": "\N{REPLACEMENT CHARACTER}"}', "no_replacement_character"),
        ('{"x": "<|im_end|>"}', "no_leaked_marker"),
        ('{"x": "data: [DONE]"}', "no_api_fragment"),
    ],
)
def test_the_arguments_of_a_call_are_looked_at_as_text_is(
    codec: ChatML, rules: Validate, make_sample: MakeSample, arguments: str, rule: str
) -> None:
    class Writes(Calling):
        def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
            function = {"name": "f", "arguments": arguments}
            return ReplyParts(content=None, tool_calls=({"id": "c", "function": function},))

    context = Context(codec=Writes(codec), rules=rules)
    assert rule in rules_broken(saying(codec, make_sample, "the fox"), context)


def test_markup_is_judged_reply_by_reply_and_only_the_last_may_be_cut(
    codec: ChatML, rules: Validate, make_sample: MakeSample
) -> None:
    context = Context(codec=Calling(codec), rules=rules)
    first = make_sample(
        input_ids=(1, 43, 40, 2, 1, 41), spans=((1, 4), (5, 6)), flags=("truncated",)
    )
    assert [v.detail for v in violations_of(first, context)] == ["cut False"]
    last = make_sample(
        input_ids=(1, 40, 2, 1, 41, 43), spans=((1, 3), (4, 6)), flags=("truncated",)
    )
    assert [v.detail for v in violations_of(last, context)] == ["cut True"]
    silent = make_sample(input_ids=(1, 43, 2), spans=((1, 3),))
    assert rules_broken(silent, context) == ["says_something"]


def test_a_loop_is_a_flag_where_loops_are_kept(
    codec: ChatML, rules: Validate, make_sample: MakeSample
) -> None:
    context = Context(codec=codec, rules=replace(rules, drop_loops=False))
    looping = saying(codec, make_sample, "the dog the dog the dog the dog")
    assert [v.severity for v in violations_of(looping, context)] == ["flag"]


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ((1, 2, 1, 2, 1, 2), 2),
        ((1, 2, 3, 1, 2, 3), 3),
        ((9, 9, 9, 7, 7, 7), 0),
        ((7, 7, 7, 7, 7), 0),
        ((5, 7, 7, 7, 7, 7, 7), 1),
        ((), 0),
    ],
)
def test_a_loop_fills_the_window(ids: tuple[int, ...], period: int) -> None:
    assert loop_period(ids, 3, 2) == period


@given(
    head=st.lists(st.integers(0, 5)),
    unit=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    times=st.integers(2, 4),
)
def test_every_loop_is_found_whatever_stands_before_it(
    head: list[int], unit: list[int], times: int
) -> None:
    ids = (head + unit * 4 * times)[: len(head) + 4 * times + 4]
    period = loop_period(ids, 4, times)
    assert 1 <= period <= len(unit)
    window = ids[-4 * times :]
    assert all(window[i] == window[i - period] for i in range(period, len(window)))


def test_every_rule_tells_what_it_is_about() -> None:
    assert all(check.__name__.startswith("check_") and check.__doc__ for check in CHECKS)
