from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.prompts.schemas import SCHEMAS, ParsedRow, Reject, parse_row
from eyas.records import row_id

UPSTREAM = Path("../shared/prompts")
USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c1"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "dict", "properties": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def bfcl(**changes: Any) -> dict[str, Any]:
    return {"id": "simple_0", "question": [[USER]], "function": [FUNCTION]} | changes


def with_parameters(parameters: Any) -> dict[str, Any]:
    return bfcl(function=[FUNCTION | {"parameters": parameters}])


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
    ({"messages": [REPLY, USER]}, "bad_turn_order"),
    ({"messages": [USER, USER]}, "bad_turn_order"),
    ({"messages": [USER, REPLY, REPLY]}, "bad_turn_order"),
    ({"messages": [USER, SYSTEM]}, "bad_turn_order"),
    ({"messages": [USER, REPLY, RESULT]}, "bad_turn_order"),
    ({"messages": [USER, CALLING, USER]}, "bad_turn_order"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "bad_tool_calls"),
    ({"messages": [USER, CALLING | {"tool_calls": "f()"}]}, "bad_tool_calls"),
    ({"messages": [USER, CALLING | {"tool_calls": ["f"]}]}, "bad_tool_calls"),
    ({"messages": [USER, CALLING | {"tool_calls": [{"function": {}}]}]}, "bad_tool_calls"),
    ({"messages": [USER], "tools": "[]"}, "bad_tools"),
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


def test_bfcl_row_becomes_messages_and_openai_tools() -> None:
    function = {"name": "math.area", "description": "Area.", "parameters": {"type": "dict"}}
    found = parse_row("bfcl", bfcl(function=[function]))
    tool = {
        "type": "function",
        "function": {
            "name": "math_area",
            "description": "Area.",
            "parameters": {"type": "object"},
        },
    }
    assert found == ParsedRow(upstream_id="simple_0", messages=(USER,), tools=(tool,))


SCHEMA_PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "float", "description": "x"}, {"type": "number", "description": "x"}),
    ({"type": "tuple", "items": {"type": "float"}}, {"type": "array", "items": {"type": "number"}}),
    ({"type": "any", "default": 1}, {"default": 1}),
    ({"description": "free"}, {"description": "free"}),
    (
        {"type": "dict", "properties": {"type": {"type": "dict", "properties": {}}}},
        {"type": "object", "properties": {"type": {"type": "object", "properties": {}}}},
    ),
    (
        {"type": "array", "items": {"type": "array", "items": {"type": "any"}}},
        {"type": "array", "items": {"type": "array", "items": {}}},
    ),
    (
        {"type": "dict", "additionalProperties": {"type": "float"}},
        {"type": "object", "additionalProperties": {"type": "number"}},
    ),
    ({"type": "string", "enum": ["dict", "any"]}, {"type": "string", "enum": ["dict", "any"]}),
]


@pytest.mark.parametrize(("given_schema", "expected"), SCHEMA_PAIRS)
def test_bfcl_types_become_json_schema_at_every_depth(
    given_schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    row = with_parameters({"type": "dict", "properties": {"x": given_schema}})
    found = parse_row("bfcl", row)
    assert isinstance(found, ParsedRow)
    assert found.tools[0]["function"]["parameters"]["properties"]["x"] == expected


def test_parsing_leaves_the_upstream_row_as_it_was() -> None:
    row = with_parameters({"type": "dict", "properties": {"x": {"type": "float"}}})
    before = row_id("d", "", row)
    parse_row("bfcl", row)
    assert row_id("d", "", row) == before


MALFORMED_BFCL: list[tuple[dict[str, Any], str]] = [
    (bfcl(question=None), "no_messages"),
    (bfcl(question=[]), "no_messages"),
    (bfcl(question=[[]]), "no_messages"),
    (bfcl(question=[USER]), "no_messages"),
    (bfcl(question=[[USER], [USER]]), "several_turns"),
    ({"id": "m", "question": [[USER], [USER]], "involved_classes": []}, "several_turns"),
    ({"id": "m", "question": [[USER]]}, "no_functions"),
    (bfcl(function=[]), "no_functions"),
    (bfcl(function=["f"]), "bad_function"),
    (bfcl(function=[{"description": "d"}]), "bad_function"),
    (bfcl(function=[FUNCTION | {"name": "a b"}]), "bad_function"),
    (bfcl(function=[FUNCTION | {"name": "x" * 65}]), "bad_function"),
    (bfcl(function=[FUNCTION | {"description": None}]), "bad_function"),
    (
        bfcl(function=[FUNCTION | {"name": "a.b"}, FUNCTION | {"name": "a_b"}]),
        "function_declared_twice",
    ),
    (with_parameters(None), "bad_parameters"),
    (with_parameters({"type": "string"}), "bad_function"),
    (with_parameters({"type": "HashMap"}), "unknown_type"),
    (with_parameters({"type": ["dict"]}), "unknown_type"),
    (with_parameters({"type": "dict", "properties": []}), "bad_parameters"),
    (with_parameters({"type": "dict", "properties": {"x": "float"}}), "bad_parameters"),
    (
        with_parameters({"type": "dict", "properties": {"x": {"type": "array", "items": []}}}),
        "bad_parameters",
    ),
    (bfcl(id=[1]), "bad_id"),
]


@pytest.mark.parametrize(("row", "reason"), MALFORMED_BFCL)
def test_malformed_bfcl_rows_have_a_named_reason(row: dict[str, Any], reason: str) -> None:
    found = parse_row("bfcl", row)
    assert isinstance(found, Reject)
    assert found.reason == reason


def test_nesting_too_deep_for_json_is_a_reject_not_a_crash() -> None:
    schema: dict[str, Any] = {"type": "dict"}
    for _ in range(400):
        schema = {"type": "dict", "properties": {"x": schema}}
    found = parse_row("bfcl", with_parameters(schema))
    assert isinstance(found, Reject)
    assert found.reason == "not_json"


def test_humaneval_task_becomes_a_request_with_a_code_block() -> None:
    row = {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    '''Double x.'''\n", "test": "..."}
    content = (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        "```python\ndef f(x):\n    '''Double x.'''\n```"
    )
    assert parse_row("humaneval", row) == ParsedRow(
        upstream_id="HumanEval/0", messages=({"role": "user", "content": content},)
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"task_id": "t"}, "no_content"),
        ({"task_id": "t", "prompt": "  \n"}, "no_content"),
        ({"task_id": "t", "prompt": ["def f():"]}, "no_content"),
        ({"task_id": "t", "prompt": "def f():\n    '```'"}, "code_fence_in_code"),
        ({"task_id": {}, "prompt": "def f():"}, "bad_id"),
    ],
)
def test_malformed_humaneval_rows_have_a_named_reason(row: dict[str, Any], reason: str) -> None:
    found = parse_row("humaneval", row)
    assert isinstance(found, Reject)
    assert found.reason == reason


def test_unknown_schema_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(EyasError, match=r"bfcl \| humaneval \| messages, got 'sharegpt'"):
        parse_row("sharegpt", {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("id", "task_id", "messages", "prompt", "question", "function", "tools")
ROWS = st.dictionaries(st.sampled_from(KEYS), JSON) | st.just({"when": date(2024, 1, 1)}) | JSON


@given(st.sampled_from(sorted(SCHEMAS)), ROWS)
def test_any_json_value_is_parsed_or_rejected_without_an_exception(schema: str, row: Any) -> None:
    assert isinstance(parse_row(schema, row), ParsedRow | Reject)


@given(st.permutations(["role", "content", "name"]), st.permutations(["id", "messages", "x"]))
def test_row_id_does_not_depend_on_the_order_of_keys(inner: list[str], outer: list[str]) -> None:
    message = {"role": "user", "content": "Hi", "name": "n"}
    row = {"id": "a", "messages": [{key: message[key] for key in inner}], "x": 1}
    found = parse_row("messages", {key: row[key] for key in outer})
    assert isinstance(found, ParsedRow)
    assert row_id("d", found.upstream_id, found.messages) == row_id("d", "a", [message])


UPSTREAM_COUNTS = [
    ("bfcl", "bfcl_v4_simple_python.jsonl", 110, {}),
    ("bfcl", "bfcl_v4_parallel_multiple.jsonl", 60, {}),
    ("bfcl", "bfcl_v4_multi_turn_base.jsonl", 0, {"several_turns": 40}),
    ("humaneval", "humaneval.jsonl", 164, {}),
]


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason="needs ../shared/prompts, real upstream rows")
@pytest.mark.parametrize(("schema", "name", "parsed", "rejected"), UPSTREAM_COUNTS)
def test_real_upstream_files_parse_row_for_row(
    schema: str, name: str, parsed: int, rejected: dict[str, int]
) -> None:
    found = [parse_row(schema, row) for row in read_jsonl(UPSTREAM / name)]
    reasons = [row.reason for row in found if isinstance(row, Reject)]
    assert sum(isinstance(row, ParsedRow) for row in found) == parsed
    assert {reason: reasons.count(reason) for reason in reasons} == rejected
