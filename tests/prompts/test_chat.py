import json
from typing import Any

import pytest

from eyas.prompts.chat import asked_text
from eyas.prompts.schemas import ParsedRow, Reject, parse_row

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c1"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


GOOD_MESSAGES: list[tuple[dict[str, Any], ParsedRow]] = [
    ({"id": "a", "messages": [USER]}, ParsedRow(upstream_id="a", messages=(USER,))),
    ({"id": 7, "prompt": [USER]}, ParsedRow(upstream_id="7", messages=(USER,))),
    ({"prompt": "Hi"}, ParsedRow(upstream_id="", messages=(USER,))),
    (
        {"messages": [SYSTEM, USER, REPLY, USER], "tags": ["en"]},
        ParsedRow(upstream_id="", messages=(SYSTEM, USER, REPLY, USER)),
    ),
    (
        {"messages": [USER, CALLING, RESULT, RESULT, REPLY], "tools": [TOOL]},
        ParsedRow(upstream_id="", messages=(USER, CALLING, RESULT, RESULT, REPLY), tools=(TOOL,)),
    ),
    (
        {"messages": [{"role": "user", "content": "Hi", "name": "n", "weight": 1}]},
        ParsedRow(upstream_id="", messages=({"role": "user", "content": "Hi", "name": "n"},)),
    ),
]


@pytest.mark.parametrize(("row", "parsed"), GOOD_MESSAGES)
def test_chat_rows_keep_what_a_chat_api_knows(row: dict[str, Any], parsed: ParsedRow) -> None:
    assert parse_row("messages", row) == parsed


MALFORMED_MESSAGES: list[tuple[Any, str]] = [
    (None, "not_an_object"),
    ([USER], "not_an_object"),
    ({}, "no_messages"),
    ({"messages": []}, "no_messages"),
    ({"messages": {"role": "user"}}, "no_messages"),
    ({"messages": None, "prompt": "Hi"}, "no_messages"),
    ({"prompt": " "}, "no_content"),
    ({"messages": ["Hi"]}, "bad_message"),
    ({"messages": [{"from": "human", "value": "Hi"}]}, "bad_role"),
    ({"messages": [{"role": "function", "content": "Hi"}]}, "bad_role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "bad_role"),
    ({"messages": [{"role": "user"}]}, "no_content"),
    ({"messages": [{"role": "user", "content": "\n"}]}, "no_content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "no_content"),
    ({"messages": [USER, CALLING | {"content": 3}]}, "no_content"),
    ({"messages": [USER | {"name": 3}]}, "bad_message"),
    ({"messages": [REPLY, USER]}, "starts_with_assistant"),
    ({"messages": [USER, USER]}, "repeated_role"),
    ({"messages": [USER, REPLY, REPLY]}, "repeated_role"),
    ({"messages": [USER, SYSTEM]}, "bad_turn_order"),
    ({"messages": [USER, REPLY, RESULT]}, "bad_turn_order"),
    ({"messages": [USER, CALLING, USER]}, "bad_turn_order"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "bad_tool_calls"),
    ({"messages": [USER, CALLING | {"tool_calls": "f()"}]}, "bad_tool_calls"),
    ({"messages": [USER, CALLING | {"tool_calls": ["f"]}]}, "bad_tool_calls"),
    ({"messages": [USER, CALLING | {"tool_calls": [{"function": {}}]}]}, "bad_tool_calls"),
    ({"messages": [USER], "tools": "["}, "bad_tools"),
    ({"messages": [USER], "tools": {}}, "bad_tools"),
    ({"messages": [USER], "tools": ["f"]}, "bad_tools"),
    ({"messages": [USER], "tools": [{"function": {"name": "a b"}}]}, "bad_tools"),
    ({"messages": [USER], "id": True}, "bad_id"),
    ({"messages": [USER], "id": 1.5}, "bad_id"),
    ({"messages": [USER], "when": object()}, "not_json"),
    ({"messages": [USER], "text": "\ud800"}, "not_json"),
]


@pytest.mark.parametrize(("row", "reason"), MALFORMED_MESSAGES)
def test_malformed_chat_rows_have_a_named_reason(row: Any, reason: str) -> None:
    found = parse_row("messages", row)
    assert isinstance(found, Reject)
    assert found.reason == reason
    assert len(found.detail) <= 120


def parsed(row: Any) -> ParsedRow:
    found = parse_row("messages", row)
    assert isinstance(found, ParsedRow), found
    return found


def test_typed_parts_become_text_reasoning_and_calls() -> None:
    call = '{"name": "f", "arguments": {"a": 1}}'
    parts = [
        {"type": "reasoning", "value": "Hm."},
        {"type": "text", "value": "I call"},
        {"type": "text", "text": " it."},
        {"type": "tool_call", "value": call},
    ]
    asked = {"role": "user", "content": [{"type": "text", "value": "Hi"}]}
    found = parsed({"messages": [asked, {"role": "assistant", "content": parts}]}).messages
    assert found == (
        USER,
        {
            "role": "assistant",
            "content": "I call it.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "functions.f:0",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ],
        },
    )


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_of_a_reply_is_kept_under_one_name(field: str) -> None:
    row = {"conversations": [USER | {field: "no"}, REPLY | {field: "Hm."}]}
    assert parsed(row).messages == (USER, REPLY | {"reasoning_content": "Hm."})


def test_calls_are_numbered_through_the_conversation() -> None:
    bare = {"function": {"name": "f", "arguments": "{}"}}
    calling, answer = CALLING | {"tool_calls": [bare]}, {"role": "tool", "content": "3"}
    found = parsed({"messages": [USER, calling, answer, calling, answer]}).messages
    assert [m["tool_calls"][0]["id"] for m in (found[1], found[3])] == [
        "functions.f:0",
        "functions.f:1",
    ]
    assert [m["tool_call_id"] for m in (found[2], found[4])] == ["functions.f:0", "functions.f:1"]


def test_ids_that_upstream_gave_stay() -> None:
    second = CALL | {"id": "c2"}
    answers = [RESULT, {"role": "tool", "content": "4"}]
    row = {"messages": [USER, CALLING | {"tool_calls": [CALL, second]}, *answers]}
    found = parsed(row).messages
    assert [call["id"] for call in found[1]["tool_calls"]] == ["c1", "c2"]
    assert [message["tool_call_id"] for message in found[2:]] == ["c1", "c2"]


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]], json.dumps([TOOL])])
def test_tools_are_a_list_or_its_json_wrapped_or_bare(tools: Any) -> None:
    assert parsed({"messages": [USER], "tools": tools}).tools == (TOOL,)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image"}]}, "part_without_text"),
        ({"role": "user", "content": ["Hi"]}, "part_without_text"),
        ({"role": "user", "content": [{"type": ["text"], "text": "Hi"}]}, "part_without_text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "no_content"),
        ({"role": "user", "content": []}, "no_content"),
        ({"role": "user", "content": "Hi", "reasoning": {"text": "Hm."}}, "bad_message"),
        ({"role": "user", "content": [{"type": "tool_call", "value": "f"}]}, "bad_tool_calls"),
        ({"role": "user", "content": "Hi", "tool_call_ids": [3]}, "bad_message"),
    ],
)
def test_malformed_parts_have_a_named_reason(message: Any, reason: str) -> None:
    found = parse_row("messages", {"messages": [message]})
    assert isinstance(found, Reject)
    assert found.reason == reason


def test_only_what_users_say_is_compared() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": None},
        {"role": "user", "content": "c"},
    ]
    assert asked_text(messages) == "a\nc"
