"""Tool declarations: schemas and what the K2.5 tokenizer class makes of them."""

import json
from typing import Any

import pytest

from eyas.tokens.codecs.kimi_tools import declare_tools, sort_keys


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def argument_of(properties: dict[str, Any], **more: Any) -> list[str]:
    """Return the lines between the braces of a function's argument."""
    schema = {"type": "object", "properties": properties, "required": list(properties), **more}
    lines = declare_tools([tool(schema)]).split("\n")
    assert lines[:4] == ["# Tools", "", "## functions", "namespace functions {"]
    assert lines[-3:] == ["}) => any;", "}", ""]
    assert lines[4] == "type f = (_: {"
    return lines[5:-3]


@pytest.mark.parametrize(
    ("schema", "lines"),
    [
        ({"type": "string"}, ["  x: string"]),
        ({"type": "integer"}, ["  x: number"]),
        ({"type": "null"}, ["  x: null"]),
        ({"type": "dict"}, ["  x: dict"]),
        ({}, ["  x: any"]),
        (True, ["  x: any"]),
        (False, ["  x: null"]),
        ({"type": "array"}, ["  x: Array<any>"]),
        ({"type": "array", "items": {"type": "integer"}}, ["  x: Array<number>"]),
        ({"type": "object"}, ["  x: {}"]),
        ({"type": ["string", "null"]}, ["  x: string | null"]),
        ({"type": ["object", "array"]}, ["  x: {} | Array<any>"]),
        ({"enum": ["a", 1, None, True, 'q"']}, ['  x: "a" | 1 | None | True | "q""']),
        ({"enum": ["a", None], "type": ["null", "string"]}, ['  x: "a" | None']),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["  x: string | null"]),
        (
            {"type": "string", "description": "One.\n\nTwo."},
            ["  // One.", "", "  // Two.", "  x: string"],
        ),
        ({"type": "string", "description": None}, ["  x: string"]),
        ({"type": "string", "default": "é"}, ['  // Default: "é"', "  x: string"]),
        ({"type": "boolean", "default": False}, ["  // Default: False", "  x: boolean"]),
        ({"type": "array", "default": [1, None]}, ["  // Default: [1, null]", "  x: Array<any>"]),
        ({"type": "string", "default": None}, ["  x: string"]),
        (
            {"type": "string", "pattern": "^a", "minLength": 1, "maximum": 9},
            ["  // minLength: 1, pattern: ^a", "  x: string"],
        ),
        (
            {"type": "number", "minimum": 0, "maximum": 1.5},
            ["  // maximum: 1.5, minimum: 0", "  x: number"],
        ),
        ({"type": "array", "minItems": 1}, ["  // minItems: 1", "  x: Array<any>"]),
        ({"enum": ["a"], "type": "string", "minLength": 1}, ['  x: "a"']),
        (
            {"type": "array", "items": {"type": "string", "description": "Each."}},
            ["  x: Array<", "    // Each.", "    string", "  >"],
        ),
        (
            {"anyOf": [{"type": "object", "properties": {"y": {"type": "string"}}}]},
            ["  x: {", "    y?: string", "  }"],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "object", "properties": {"y": {}}}},
            ["  x: {", "    [k: string]: {", "      y?: any", "    }", "  }"],
        ),
    ],
)  # fmt: skip
def test_a_schema_becomes_the_type_that_the_target_knows(schema: Any, lines: list[str]) -> None:
    assert argument_of({"x": schema}) == lines


def test_required_properties_come_first_and_each_group_by_name() -> None:
    properties = {name: {"type": "string"} for name in "dbca"}
    lines = argument_of(properties, required=["c", "b", "z"])
    assert lines == ["  b: string,", "  c: string,", "  a?: string,", "  d?: string"]


@pytest.mark.parametrize(("rest", "told"), [(True, "any"), (False, "never"), ({}, "any")])
def test_properties_without_a_name_are_told_last(rest: Any, told: str) -> None:
    lines = argument_of({"x": {"type": "string"}}, additionalProperties=rest)
    assert lines == ["  x: string,", f"  [k: string]: {told}"]


def test_definitions_become_interfaces_before_the_function() -> None:
    node = {
        "type": "object",
        "description": "A node.",
        "properties": {"next": {"$ref": "#/$defs/Node"}},
    }
    schema = {"$defs": {"Node": node}, "properties": {"head": {"$ref": "#/$defs/Node"}}}
    text = declare_tools([tool(schema, description="Walk.")])
    assert text.split("\n")[4:-2] == [
        "// A node.",
        "interface Node {",
        "  next?: Node",
        "}",
        "// Walk.",
        "type f = (_: {",
        "  head?: Node",
        "}) => any;",
    ]


def test_a_schema_that_refers_to_itself_gets_a_name() -> None:
    schema = {"properties": {"b": {"type": "string"}, "a": {"$ref": "#"}}, "required": ["b"]}
    assert declare_tools([tool(schema)]).split("\n")[4:-2] == [
        "interface parameters {",
        "  a?: parameters,",
        "  b: string",
        "}",
        "type f = (_: parameters) => any;",
    ]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_arguments_has_an_empty_type(parameters: Any) -> None:
    assert "\ntype f = (_: {}) => any;\n" in declare_tools([tool(parameters)])


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"oneOf": [{"type": "string"}]},
        {"allOf": [{"type": "string"}]},
        {"$ref": "#/definitions/X"},
        {"$ref": "#/$defs/Missing"},
        {"type": ["string", "tuple"]},
        {"enum": [1], "type": "string"},
        {"enum": ["a"], "type": ["string", "integer"]},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "object", "additionalProperties": "no"},
        {"type": "string", "description": ["list"]},
        None,
        "string",
    ],
)
def test_one_schema_outside_the_subset_puts_all_tools_in_sorted_compact_json(schema: Any) -> None:
    tools = [tool({}), tool({"type": "object", "properties": {"x": schema}}, description="é")]
    text = declare_tools(tools)
    assert text == json.dumps(sort_keys(tools), ensure_ascii=False, separators=(",", ":"))
    assert text.startswith('[{"function":{"name":"f","parameters":{}},"type":"function"},')


def test_other_kinds_of_tools_are_passed_over_and_alone_are_told_in_json() -> None:
    plugin = {"type": "plugin", "function": {"name": "g"}}
    assert declare_tools([plugin, tool({})]) == declare_tools([tool({})])
    assert declare_tools([plugin]) == '[{"function":{"name":"g"},"type":"plugin"}]'


def test_the_order_of_keys_in_a_tool_does_not_change_its_declaration() -> None:
    schema = {"type": "object", "properties": {"b": {"enum": ["x"]}, "a": {"type": "string"}}}
    turned = {key: schema[key] for key in reversed(schema)}
    assert declare_tools([tool(schema)]) == declare_tools([tool(turned)])


def test_without_typescript_tools_are_json_in_their_own_order() -> None:
    text = declare_tools([tool({"type": "object"})], typescript=False)
    assert text == ('[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]')
