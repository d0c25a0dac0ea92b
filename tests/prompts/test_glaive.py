"""The defects of glaive-function-calling-v2: each is read or has its own reason."""

import json
from typing import Any

import pytest

from eyas.prompts.schemas import ParsedRow, Reject, parse_row

HEAD = (
    "SYSTEM: You are a helpful assistant with access to the following functions. "
    "Use them if required -\n"
)
RATE = {"name": "rate", "description": "A rate.", "parameters": {"type": "object"}}
NEWS = {"name": "news", "description": "News.", "parameters": {}}
PLAIN = "SYSTEM: You are a helpful assistant, with no access to external functions.\n\n"
END = "<|endoftext|>"


def declared(*functions: dict[str, Any]) -> str:
    return HEAD + "\n\n".join(json.dumps(function, indent=4) for function in functions) + "\n"


def chat_of(*turns: str, gap: str = "\n\n\n") -> str:
    return gap.join(turns) + gap


def calling(call: str, before: str = "") -> dict[str, str]:
    """Return a row with one call, its response and a last reply."""
    chat = chat_of(
        "USER: Rate?",
        f"ASSISTANT: {before}<functioncall> {call} {END}",
        'FUNCTION RESPONSE: {"rate": 2}',
        f"ASSISTANT: It is 2. {END}",
    )
    return {"system": declared(RATE), "chat": chat}


def plain(chat: str) -> dict[str, str]:
    return {"system": PLAIN, "chat": chat}


def parsed(row: Any) -> ParsedRow:
    found = parse_row("glaive", row)
    assert isinstance(found, ParsedRow), found
    return found


def test_call_and_response_become_messages_and_the_declared_functions_tools() -> None:
    found = parsed(calling("""{"name": "rate", "arguments": '{"to": "EUR"}'}"""))
    call = {
        "type": "function",
        "function": {"name": "rate", "arguments": '{"to": "EUR"}'},
        "id": "functions.rate:0",
    }
    assert found == ParsedRow(
        upstream_id="",
        messages=(
            {"role": "user", "content": "Rate?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": '{"rate": 2}', "tool_call_id": "functions.rate:0"},
            {"role": "assistant", "content": "It is 2."},
        ),
        tools=({"type": "function", "function": RATE},),
    )


def test_functions_stand_one_after_the_other_and_are_no_array() -> None:
    row = {"system": declared(RATE, NEWS), "chat": f"USER: Hi\n\n\nASSISTANT: Hello {END}"}
    assert [tool["function"] for tool in parsed(row).tools] == [RATE, NEWS]


def test_row_without_functions_keeps_its_system_message() -> None:
    found = parsed(plain(f"USER: a\n\nASSISTANT: b {END}\n\nUSER: c\n\nASSISTANT: d {END}"))
    assert [m["content"] for m in found.messages] == [
        "You are a helpful assistant, with no access to external functions.",
        *("a", "b", "c", "d"),
    ]
    assert found.tools == ()


def test_last_reply_may_be_cut_short() -> None:
    assert parsed(plain("USER: a\n\n\nASSISTANT: half of it")).messages[-1]["content"] == (
        "half of it"
    )


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("""{"name": "rate", "arguments": '{"to": "it's }'s"}'}""", {"to": "it's }'s"}),
        ("""{"name": "rate", "arguments": {"to": "EUR"}}""", {"to": "EUR"}),
        ("""{"name": "rate", "arguments": '{}'}""", {}),
        ("""{"name": "rate", "arguments": '{"to": "to Infinity"}'}""", {"to": "to Infinity"}),
        ("""{ "name": "rate",\n"arguments": '{"to":\n"EUR"}' }""", {"to": "EUR"}),
    ],
)
def test_call_with_one_reading_is_read(call: str, arguments: dict[str, str]) -> None:
    (made,) = parsed(calling(call)).messages[1]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == arguments


def test_words_before_a_call_are_its_content() -> None:
    row = calling("""{"name": "rate", "arguments": '{}'}""", before="Let me look. ")
    assert parsed(row).messages[1]["content"] == "Let me look."


BAD_CALLS = [
    ("""{"name": "rate", "arguments": '{"to": "it\\'s"}'}""", "escaped_quote_in_arguments"),
    ("""{"name": "rate", "arguments": '{"max": Infinity}'}""", "arguments_not_finite"),
    ("""{"name": "rate", "arguments": {"max": -Infinity}}""", "arguments_not_finite"),
    ("""{"name": "rate", "arguments": '{"max": NaN}'}""", "arguments_not_finite"),
    ("""{"name": "rate", "arguments": '["EUR"]'}""", "arguments_not_object"),
    ("""{"name": "rate", "arguments": null}""", "arguments_not_object"),
    ("""{"name": "rate", "arguments": 'null'}""", "arguments_not_object"),
    ("""{"name": "rate", "arguments": '{"to": EUR}'}""", "arguments_not_json"),
    ("""{"name": "rate", "arguments": '{"to": "EUR"}}'}""", "arguments_not_json"),
    ("""{"name": "rate", "parameters": '{"to": "EUR"}'}""", "parameters_for_arguments"),
    ("""{"name": "rate", "parameters": {"to": "EUR"}}""", "parameters_for_arguments"),
    ("""{"name": "rate", "arguments": '{"to": "EU""", "call_cut_short"),
    ("""{"name": "rate", "arguments": {"to": "EU""", "call_cut_short"),
    ("""{"name": "rate", "arguments": '{"to": "EUR"}'}}""", "text_after_call"),
    ("""{"name": "rate", "arguments": {"to": "EUR"}}}""", "text_after_call"),
    ("""{"name": "rate", "arguments": '{}'} Done!""", "text_after_call"),
    ("""{"name": "rate"}""", "bad_tool_calls"),
    ("""{"name": "rate", "options": '{}'}""", "bad_tool_calls"),
    ("""["rate"]""", "bad_tool_calls"),
    ("""{"name": "rate", "arguments": '{}'} <functioncall> {}""", "several_calls"),
    ("""{"name": "news", "arguments": '{}'}""", "undeclared_function"),
]


@pytest.mark.parametrize(("call", "reason"), BAD_CALLS)
def test_call_that_would_have_to_be_guessed_is_rejected(call: str, reason: str) -> None:
    found = parse_row("glaive", calling(call))
    assert isinstance(found, Reject)
    assert found.reason == reason


CALL = f'ASSISTANT: <functioncall> {{"name": "rate", "arguments": \'{{}}\'}} {END}'
BAD_ROWS: list[tuple[Any, str]] = [
    # "AI:" in the source became the end-of-text mark and a new turn, in whoever's text it stood.
    (
        plain(chat_of(f"USER: Is {END}", "ASSISTANT: a field?", "ASSISTANT: Yes.")),
        "end_mark_in_text",
    ),
    (plain(chat_of(f"USER: Is {END}", f"ASSISTANT: a field? {END}")), "end_mark_in_text"),
    (
        plain(chat_of("USER: a", f"ASSISTANT: Open {END}", f"ASSISTANT: b {END}")),
        "end_mark_in_text",
    ),
    (plain(chat_of("USER: a", f"ASSISTANT: b {END} c {END}")), "end_mark_in_text"),
    (
        {
            "system": declared(RATE),
            "chat": chat_of("USER: a", CALL, f'FUNCTION RESPONSE: {{"by": "{END}'),
        },
        "end_mark_in_text",
    ),
    ({"system": declared(RATE, RATE), "chat": "USER: a"}, "function_declared_twice"),
    ({"system": HEAD, "chat": "USER: a"}, "no_functions"),
    ({"system": HEAD + "{'name': 1}", "chat": "USER: a"}, "bad_function"),
    ({"system": HEAD + '{"name": "a b"}', "chat": "USER: a"}, "bad_function"),
    ({"system": HEAD + '{"name": "a", "x": NaN}', "chat": "USER: a"}, "bad_function"),
    ({"system": HEAD + "[" * 3000, "chat": "USER: a"}, "bad_function"),
    ({"system": declared(RATE | {"parameters": []}), "chat": "USER: a"}, "bad_parameters"),
    ({"system": "Be brief.", "chat": "USER: a"}, "unknown_system_text"),
    ({"chat": "USER: a"}, "no_content"),
    ({"system": PLAIN, "chat": None}, "no_content"),
    (plain("Hi there\n\nUSER: a"), "text_before_first_turn"),
    (plain(chat_of("USER: a", "ASSISTANT: b", "USER: c")), "reply_without_end"),
    (plain(chat_of("USER: ", f"ASSISTANT: b {END}")), "no_content"),
    (plain(chat_of("USER: a", "USER: b")), "repeated_role"),
    (plain(chat_of(f"ASSISTANT: b {END}", "USER: a")), "starts_with_assistant"),
    (plain(chat_of("USER: a", "FUNCTION RESPONSE: {}")), "response_without_call"),
    (
        {"system": declared(RATE), "chat": chat_of("USER: a", CALL, "USER: b")},
        "call_without_response",
    ),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_each_other_defect_has_its_reason(row: Any, reason: str) -> None:
    found = parse_row("glaive", row)
    assert isinstance(found, Reject)
    assert found.reason == reason
