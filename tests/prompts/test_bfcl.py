from typing import Any

import pytest

from eyas.prompts.bfcl import with_functions
from eyas.prompts.schemas import ParsedRow, Reject, parse_row
from eyas.records import row_id

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "dict", "properties": {}}}


def bfcl(**changes: Any) -> dict[str, Any]:
    return {"id": "simple_0", "question": [[USER]], "function": [FUNCTION]} | changes


def with_parameters(parameters: Any) -> dict[str, Any]:
    return bfcl(function=[FUNCTION | {"parameters": parameters}])


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
    ({"id": "m", "question": [[USER], [USER]], "involved_classes": ["A"]}, "no_functions"),
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


def test_first_turn_of_a_multi_turn_row_is_the_prompt() -> None:
    later = {"role": "user", "content": "And then?"}
    found = parse_row("bfcl", bfcl(question=[[USER], [later]]))
    assert isinstance(found, ParsedRow)
    assert found.messages == (USER,)


FILES = {"math_api.json": [{"name": "add"}, {"name": "mean"}], "ticket_api.json": [{"name": "t"}]}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"involved_classes": ["MathAPI"]}, ["add", "mean"]),
        ({"involved_classes": ["TicketAPI", "MathAPI"]}, ["t", "add", "mean"]),
        ({"involved_classes": ["MathAPI"], "excluded_function": ["add"]}, ["mean"]),
    ],
)
def test_functions_of_the_classes_are_joined(row: dict[str, Any], names: list[str]) -> None:
    joined = with_functions(row, FILES)
    assert isinstance(joined, dict)
    assert [function["name"] for function in joined["function"]] == names


@pytest.mark.parametrize(
    "row",
    [
        {"involved_classes": ["TravelAPI"]},
        {"involved_classes": ["NoSuchAPI"]},
        {"involved_classes": "MathAPI"},
        {"involved_classes": ["MathAPI"], "excluded_function": "add"},
        {"involved_classes": ["MathAPI"], "function": [FUNCTION]},
        {"id": 1},
        [1],
        None,
    ],
)
def test_row_whose_functions_are_not_to_be_had_stays_as_it_is(row: object) -> None:
    assert with_functions(row, FILES) == row
