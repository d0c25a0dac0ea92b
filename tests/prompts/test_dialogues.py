from typing import Any

import pytest

from eyas.prompts.schemas import ParsedRow, Reject, parse_row

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def human(text: Any = "Hi") -> dict[str, Any]:
    return {"from": "human", "value": text}


def gpt(text: Any = "Hello") -> dict[str, Any]:
    return {"from": "gpt", "value": text}


def parsed(schema: str, row: Any) -> ParsedRow:
    found = parse_row(schema, row)
    assert isinstance(found, ParsedRow), found
    return found


@pytest.mark.parametrize(
    ("row", "parsed_row"),
    [
        (
            {"prompt_id": "p", "prompt": "Hi", "messages": [USER, REPLY]},
            ParsedRow(upstream_id="p", messages=(USER, REPLY)),
        ),
        ({"id": "0", "data": ["Hi", "Hello"]}, ParsedRow(upstream_id="0", messages=(USER, REPLY))),
        ({"data": ["Hi"]}, ParsedRow(upstream_id="", messages=(USER,))),
        ({"class": "x", "data": "Hi"}, ParsedRow(upstream_id="", messages=(USER,))),
    ],
)
def test_both_forms_of_ultrachat_are_read(row: dict[str, Any], parsed_row: ParsedRow) -> None:
    assert parse_row("ultrachat", row) == parsed_row


@pytest.mark.parametrize("name", ["gpt", "chatgpt", "bing", "bard", "assistant"])
@pytest.mark.parametrize("asker", ["human", "user"])
def test_every_spelling_of_sharegpts_roles_is_known(name: str, asker: str) -> None:
    said = [{"from": "system", "value": "Be brief."}, human() | {"from": asker}]
    row = {"id": "abc", "conversations": [*said, gpt() | {"from": name}]}
    assert parsed("sharegpt", row).messages == (SYSTEM, USER, REPLY)


@pytest.mark.parametrize(
    ("identity", "conversation"),
    [
        ("QWJhYvA_0", "QWJhYvA"),
        ("i6IyJda_12", "i6IyJda"),
        ("identity_3", ""),
        ("abc_0", ""),
        ("QWJhYvA", ""),
        ("_3", ""),
        (7, ""),
    ],
)
def test_parts_of_a_split_conversation_name_it(identity: Any, conversation: str) -> None:
    found = parsed("sharegpt", {"id": identity, "conversations": [human()]})
    assert (found.upstream_id, found.conversation) == (str(identity), conversation)


def test_speakers_are_known_in_any_case() -> None:
    said = [
        {"from": "Human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "TOOL", "value": ""},
        {"from": "model", "value": "a"},
        {"from": "USER", "value": "and?"},
    ]
    found = parsed("sharegpt", {"id": "a", "conversations": said})
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant", "user"]


def test_tool_calls_in_sharegpts_form_are_linked_to_their_answers() -> None:
    two = '[{"name": "f", "arguments": {"a": "é"}}, {"name": "g", "arguments": {}}]'
    row = {
        "system": "Be brief.",
        "conversations": [
            human(),
            {"from": "function_call", "value": two},
            {"from": "observation", "value": "1"},
            {"from": "observation", "value": "2"},
            gpt(),
        ],
        "tools": '[{"name": "f", "description": "", "parameters": {}}]',
    }
    found = parsed("sharegpt", row)
    system, _, calling, first, second, _ = found.messages
    assert system == SYSTEM
    assert [call["id"] for call in calling["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert calling["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "é"}'}
    assert (first["tool_call_id"], second["tool_call_id"]) == ("functions.f:0", "functions.g:1")
    assert found.tools[0]["function"]["name"] == "f"


@pytest.mark.parametrize("tools", ["", "[]", None])
def test_no_tools_are_spelled_in_three_ways(tools: Any) -> None:
    assert parsed("sharegpt", {"conversations": [human()], "tools": tools}).tools == ()


def test_thoughts_of_the_mixture_become_reasoning() -> None:
    reply = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello"}
    row = {"messages": [USER, reply], "num_tokens": 3, "source": "x"}
    assert parsed("mixture_of_thoughts", row).messages == (
        USER,
        REPLY | {"reasoning_content": "Hm."},
    )


def test_openthoughts_loses_its_system_prompt_and_its_markup() -> None:
    reply = (
        "<|begin_of_thought|>\n\nHm.\n\n<|end_of_thought|>\n\n"
        "<|begin_of_solution|>\n\nHello\n\n<|end_of_solution|>"
    )
    row = {
        "system": "Use the markup.",
        "conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": reply}],
    }
    assert parsed("openthoughts", row).messages == (USER, REPLY | {"reasoning_content": "Hm."})
    row["conversations"][1]["value"] = "Hello"
    assert parsed("openthoughts", row).messages == (USER, REPLY)


@pytest.mark.parametrize(
    ("schema", "row", "reason"),
    [
        ("ultrachat", {}, "no_messages"),
        ("ultrachat", {"data": []}, "no_messages"),
        ("ultrachat", {"data": {"0": "Hi"}}, "no_messages"),
        ("ultrachat", {"data": ["Hi", None]}, "no_content"),
        ("ultrachat", {"data": ["Hi", " "]}, "no_content"),
        ("ultrachat", {"data": " "}, "no_content"),
        ("ultrachat", {"messages": [USER, USER]}, "repeated_role"),
        ("sharegpt", {"id": "a"}, "no_messages"),
        ("sharegpt", {"id": "a", "conversations": []}, "no_messages"),
        ("sharegpt", {"conversations": [gpt(), human()]}, "starts_with_assistant"),
        ("sharegpt", {"conversations": [gpt()]}, "starts_with_assistant"),
        ("sharegpt", {"conversations": [human(), human()]}, "repeated_role"),
        ("sharegpt", {"conversations": [human(), gpt(), gpt()]}, "repeated_role"),
        ("sharegpt", {"conversations": [human(None)]}, "no_content"),
        ("sharegpt", {"conversations": ["Hi"]}, "bad_message"),
        ("sharegpt", {"conversations": [{"from": "bingo", "value": "Hi"}]}, "bad_role"),
        ("sharegpt", {"conversations": [USER]}, "bad_role"),
        ("sharegpt", {"conversations": [human()], "tools": "{"}, "bad_tools"),
        ("sharegpt", {"conversations": [human()], "tools": "[1]"}, "bad_tools"),
        ("sharegpt", {"conversations": [human()], "system": 3}, "no_content"),
        (
            "sharegpt",
            {"conversations": [human(), {"from": "function_call", "value": "f()"}]},
            "bad_tool_calls",
        ),
        (
            "sharegpt",
            {"conversations": [human(), {"from": "function_call", "value": None}]},
            "bad_tool_calls",
        ),
        (
            "sharegpt",
            {"conversations": [human(), {"from": "function_call", "value": '{"name": "f"}'}]},
            "arguments_not_object",
        ),
        (
            "sharegpt",
            {"conversations": [human(), {"from": "observation", "value": "1"}]},
            "bad_turn_order",
        ),
        ("sharegpt", {"id": [], "conversations": [human()]}, "bad_id"),
        ("mixture_of_thoughts", {"messages": []}, "no_messages"),
        ("openthoughts", {"conversations": None}, "no_messages"),
    ],
)
def test_malformed_dialogues_have_a_named_reason(schema: str, row: Any, reason: str) -> None:
    found = parse_row(schema, row)
    assert isinstance(found, Reject)
    assert found.reason == reason
