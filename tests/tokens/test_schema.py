"""Arguments against declared schemas."""

from typing import Any

import pytest

from eyas.tokens.schema import call_fault, value_fault

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bonn", "Rome"]},
        "days": {"type": "integer"},
        "at": {"type": ["number", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "odd": {"type": "float"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": f"functions.{name}:0", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Bonn"}',
        '{"city": "Rome", "days": 3, "at": null, "tags": ["a"], "odd": "anything"}',
        '{"city": "Rome", "days": 3.0, "at": 1}',
        {"city": "Bonn"},
    ],
)
def test_what_a_schema_allows_has_no_fault(arguments: Any) -> None:
    assert call_fault(call(arguments), TOOLS) is None


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ('{"city": "Bonn"', "f: arguments are no JSON: "),
        ("[" * 3000, "f: arguments are no JSON: "),
        ("[1]", "f: expected an object of arguments, got list"),
        (None, "f: expected an object of arguments, got NoneType"),
        ("{}", "f: arguments: 'city' is missing"),
        ('{"city": "Oslo"}', "f: arguments.city: 'Oslo' is not in the enum"),
        ('{"city": 1}', "f: arguments.city: expected string, got int"),
        ('{"city": "Bonn", "days": true}', "f: arguments.days: expected integer, got bool"),
        ('{"city": "Bonn", "days": 1.5}', "f: arguments.days: expected integer, got float"),
        ('{"city": "Bonn", "tags": ["a", 2]}', "f: arguments.tags[1]: expected string, got int"),
        ('{"city": "Bonn", "x": 1}', "f: arguments: 'x' is not declared"),
    ],
)
def test_a_fault_says_where_and_what(arguments: Any, fault: str) -> None:
    found = call_fault(call(arguments), TOOLS)
    assert found is not None
    assert found.startswith(fault)


def test_a_function_that_was_not_declared_is_a_fault_where_any_was() -> None:
    assert call_fault(call("{}", "g"), TOOLS) == "g: not among the declared functions"
    assert call_fault(call("{}", "g"), ()) is None


@pytest.mark.parametrize("schema", [None, True, {}, {"type": 7}, {"properties": 1, "required": 2}])
def test_a_schema_that_says_nothing_allows_everything(schema: Any) -> None:
    assert value_fault({"a": [1]}, schema, "x") is None
