"""Kimi replies put right: what servers leave as text, and what is only flagged."""

from dataclasses import replace
from typing import Any

import pytest

from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.kimi_reply import normalise, order_fault

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def raw_call(identity: str, arguments: str, space: str = "") -> str:
    parts = ["<|tool_call_begin|>", identity, "<|tool_call_argument_begin|>", arguments]
    return space.join([*parts, "<|tool_call_end|>"])


def call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


RAW = SECTION + raw_call("functions.bash:0", '{"a": 1}') + SECTION_END
BASH = call("functions.bash:0", "bash", '{"a": 1}')


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ReplyParts(content="A", reasoning="R"), ReplyParts(content="A", reasoning="R")),
        (ReplyParts(content="A<|im_end|>"), ReplyParts(content="A")),
        (ReplyParts(content="A<|im_end|>[EOS]"), ReplyParts(content="A")),
        (
            ReplyParts(content=None, reasoning="R<|im_end|>"),
            ReplyParts(content=None, reasoning="R"),
        ),
        (
            ReplyParts(content="<think>R</think>A</think>"),
            ReplyParts(content="A</think>", reasoning="R", flags=("raw_reasoning",)),
        ),
        (
            ReplyParts(content=" <think> R </think> A", reasoning=""),
            ReplyParts(content=" A", reasoning=" R ", flags=("raw_reasoning",)),
        ),
        (
            ReplyParts(content="R</think>A"),
            ReplyParts(content="A", reasoning="R", flags=("raw_reasoning",)),
        ),
        (
            ReplyParts(content="the tag </think>", reasoning=""),
            ReplyParts(content="the tag </think>", reasoning=""),
        ),
        (
            ReplyParts(content=f"Sure.{RAW}", reasoning="R"),
            ReplyParts(
                content="Sure.", reasoning="R", tool_calls=(BASH,), flags=("raw_tool_calls",)
            ),
        ),
        (
            ReplyParts(content=None, reasoning=f"R{RAW}"),
            ReplyParts(
                content=None,
                reasoning="R",
                tool_calls=(BASH,),
                flags=("raw_tool_calls", "implicit_think_end"),
            ),
        ),
        (
            ReplyParts(content=f"R</think>{RAW}\n"),
            ReplyParts(
                content="",
                reasoning="R",
                tool_calls=(BASH,),
                flags=("raw_reasoning", "raw_tool_calls"),
            ),
        ),
    ],
)  # fmt: skip
def test_parts_go_where_the_target_wrote_them(given: ReplyParts, expected: ReplyParts) -> None:
    assert normalise(given, thinking=True) == expected
    assert replace(normalise(expected, thinking=True), flags=()) == replace(expected, flags=())


def test_spaces_that_a_server_set_between_tokens_are_no_part_of_a_call() -> None:
    calls = " ".join([raw_call("functions.a:0", '{"x": 1}', " "), raw_call("b.c:11", "{}", " ")])
    reply = normalise(ReplyParts(content=f"A{SECTION} {calls} {SECTION_END}"), thinking=False)
    assert reply.content == "A"
    assert reply.tool_calls == (
        call("functions.a:0", "a", '{"x": 1}'),
        call("b.c:11", "b.c", "{}"),
    )


@pytest.mark.parametrize(
    "text",
    [
        f"A{SECTION}",
        f"A{SECTION}{SECTION_END}",
        f"{RAW} and more",
        RAW + RAW,
        RAW[:-1],
        RAW.replace("functions.bash:0", "call_1"),
        RAW.replace("<|tool_call_end|>", ""),
        RAW.replace('{"a": 1}', "<|tool_call_begin|>"),
    ],
)
def test_a_section_that_is_not_whole_and_last_stays_text(text: str) -> None:
    for given in (ReplyParts(content=text), ReplyParts(content="", reasoning=text)):
        expected = replace(given, flags=("malformed_tool_calls",))
        assert normalise(given, thinking=True) == expected


def test_a_section_beside_calls_that_were_parsed_stays_text() -> None:
    given = ReplyParts(content=RAW, reasoning="R", tool_calls=(BASH,))
    assert normalise(given, thinking=True) == replace(given, flags=("malformed_tool_calls",))
    behind = ReplyParts(content="A", reasoning=RAW)
    assert normalise(behind, thinking=True) == replace(behind, flags=("malformed_tool_calls",))


def test_a_servers_own_call_ids_are_replaced_by_the_targets_form() -> None:
    calls = (call("call_1", "f", "{}"), call("functions.g:7", "g", "{}"), call("", "h", "{}"))
    reply = normalise(ReplyParts(content="", tool_calls=calls), thinking=True)
    assert [c["id"] for c in reply.tool_calls] == [
        "functions.f:0",
        "functions.g:7",
        "functions.h:2",
    ]
    assert reply.flags == ("tool_id_rewritten",)
    later = normalise(ReplyParts(content="", tool_calls=calls, calls_before=12), thinking=True)
    ids = [c["id"] for c in later.tool_calls]
    assert ids == ["functions.f:12", "functions.g:7", "functions.h:14"]


@pytest.mark.parametrize("function", [{"name": None, "arguments": "{}"}, "f", None])
def test_a_call_without_a_name_keeps_its_id(function: Any) -> None:
    given = ReplyParts(content="", tool_calls=({"id": "call_1", "function": function},))
    assert normalise(given, thinking=True) == given


def test_with_thinking_off_tags_are_prose() -> None:
    given = ReplyParts(content="<think>R</think>A")
    assert normalise(given, thinking=False) == given


NAMES = {
    "T": "<think>",
    "t": "</think>",
    "S": SECTION,
    "C": "<|tool_call_begin|>",
    "A": "<|tool_call_argument_begin|>",
    "E": "<|tool_call_end|>",
    "s": SECTION_END,
}


@pytest.mark.parametrize(
    ("word", "whole", "cut"),
    [
        ("t", True, True),
        ("tSCAEs", True, True),
        ("tSCAECAEs", True, True),
        ("SCAEs", True, True),
        ("", False, True),
        ("tS", False, True),
        ("tSCAECA", False, True),
        ("SCAE", False, True),
        ("tt", False, False),
        ("tSs", False, False),
        ("SCAEst", False, False),
        ("tSCAEsSCAEs", False, False),
        ("tSAE", False, False),
        ("Tt", False, False),
    ],
)
def test_markers_follow_one_another_and_a_cut_ends_anywhere(
    word: str, whole: bool, cut: bool
) -> None:
    markers = [NAMES[letter] for letter in word]
    for is_cut, sound in ((False, whole), (True, cut)):
        fault = order_fault(markers, opens=False, thinking=True, is_cut=is_cut)
        assert (fault is None) is sound, fault


@pytest.mark.parametrize(
    ("word", "opens", "thinking", "fault"),
    [
        ("Tt", True, True, None),
        ("TSCAEs", True, True, None),
        ("t", True, True, "out of order or not closed: </think>"),
        ("", True, True, "out of order or not closed: no </think>"),
        ("", False, False, None),
        ("SCAEs", False, False, None),
        ("t", False, False, "out of order or not closed: </think>"),
    ],
)
def test_the_reasoning_to_close_depends_on_the_prompt(
    word: str, opens: bool, thinking: bool, fault: str | None
) -> None:
    markers = [NAMES[letter] for letter in word]
    assert order_fault(markers, opens=opens, thinking=thinking, is_cut=False) == fault
