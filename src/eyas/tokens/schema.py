"""The arguments of a tool call against the JSON schema that the prompt declared. Pure.

A small part of JSON Schema: type, enum, properties, required, items, additionalProperties false.
What a schema says beyond that holds of any value: a flag must not cry wolf.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.records import Tool

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def call_fault(call: Mapping[str, Any], tools: Sequence[Tool]) -> str | None:
    """Return what is wrong with a call, in words; without tools any JSON object will do."""
    function = call.get("function") or {}
    name, given = function.get("name"), function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return f"{name}: arguments are no JSON: {str(given)[:60]!r}"
    if not isinstance(arguments, dict):
        return f"{name}: expected an object of arguments, got {type(arguments).__name__}"
    declared = {(f := tool.get("function") or {}).get("name"): f for tool in tools}
    if not declared:
        return None
    if name not in declared:
        return f"{name}: not among the declared functions"
    fault = value_fault(arguments, declared[name].get("parameters") or {}, "arguments")
    return f"{name}: {fault}" if fault else None


def value_fault(value: Any, schema: Any, path: str) -> str | None:
    """Return where a value breaks its schema, or None."""
    if not isinstance(schema, dict):
        return None
    if not _is_of_type(value, schema.get("type")):
        return f"{path}: expected {schema['type']}, got {type(value).__name__}"
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return f"{path}: {value!r} is not in the enum"
    if isinstance(value, dict):
        return _object_fault(value, schema, path)
    if isinstance(value, list):
        faults = (value_fault(v, schema.get("items"), f"{path}[{i}]") for i, v in enumerate(value))
        return next((fault for fault in faults if fault), None)
    return None


def _is_of_type(value: Any, kind: Any) -> bool:
    """Tell whether a value is of a type; of names that JSON Schema does not know any value is."""
    kinds = kind if isinstance(kind, list) else [kind]
    if not all(isinstance(k, str) and k in _TYPES for k in kinds):
        return True
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    return any(isinstance(value, _TYPES[k]) for k in kinds)


def _object_fault(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    missing = [k for k in (required if isinstance(required, list) else []) if k not in value]
    if missing:
        return f"{path}: '{missing[0]}' is missing"
    strange = [k for k in value if k not in known]
    if strange and schema.get("additionalProperties") is False:
        return f"{path}: '{strange[0]}' is not declared"
    faults = (value_fault(v, known.get(k), f"{path}.{k}") for k, v in value.items())
    return next((fault for fault in faults if fault), None)
