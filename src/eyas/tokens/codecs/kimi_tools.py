"""Kimi's tool declarations: JSON schemas written as TypeScript types. Pure.

Source: the K2.5 tokenizer class, which sorts every key, writes TypeScript, and falls back to JSON
for all tools if one schema is outside its subset (`oneOf`, `allOf`, a property without a type).
Its habits that look like slips are kept, since the target was trained on them: only `$defs` may be
referred to, quotes in an enum are not escaped, an integer becomes a `number`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.records import Tool

_INDENT = "  "
_SELF = "parameters"  # how a schema that refers to itself is called
_DEFINITIONS = "#/$defs/"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
_Field = tuple[tuple[bool, str], str]  # what sorts the required ones first, and the line
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


@dataclass(slots=True)
class _Scope:
    """What the schema of one function has defined and referred to so far."""

    definitions: dict[str, Any] = field(default_factory=dict)
    names_itself: bool = False


def declare_tools(tools: Sequence[Tool], *, typescript: bool = True) -> str:
    """Return the body of the `tool_declare` turn."""
    ordered = sort_keys(list(tools)) if typescript else list(tools)
    try:
        text = _namespace(ordered) if typescript else ""
    except _MALFORMED:  # a schema may be anything: all that does not fit is told in JSON
        text = ""
    return text or json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))


def sort_keys(value: Any) -> Any:
    """Return JSON with the keys of its objects in order, at every depth."""
    if isinstance(value, dict):
        return {key: sort_keys(inner) for key, inner in sorted(value.items())}
    return [sort_keys(inner) for inner in value] if isinstance(value, list) else value


def _namespace(tools: Iterable[Tool]) -> str:
    functions = [
        _function(tool["function"])
        for tool in tools
        if tool.get("type") == "function" and tool.get("function")
    ]
    if not functions:
        return ""
    return "\n".join(["# Tools\n\n## functions\nnamespace functions {", *functions, "}\n"])


def _function(function: Mapping[str, Any]) -> str:
    """Return the interfaces that a function's schema defines, its description and its type."""
    scope = _Scope()
    fields, rest = _members(function.get("parameters") or {}, scope, _INDENT)
    parts = []
    if scope.names_itself:
        own = "".join(["\n", ",\n".join(line for _, line in fields), "\n"]) if fields else ""
        parts.append(f"interface {_SELF} {{{own}}}")
        argument = _SELF
    else:
        argument = _block(fields, rest, "")
    parts += [_interface(name, inner, scope) for name, inner in list(scope.definitions.items())]
    parts += _comment(function.get("description"), "")
    parts.append(f"type {function.get('name', 'function')} = (_: {argument}) => any;")
    return "\n".join(parts)


def _interface(name: str, schema: Mapping[str, Any], scope: _Scope) -> str:
    text = f"interface {name} {_type(schema, scope, '')}"
    return "\n".join([*_comment(schema.get("description"), ""), text])


def _type(schema: Any, scope: _Scope, indent: str) -> str:
    """Return a schema as a TypeScript type whose later lines start with `indent`."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _reference(schema["$ref"], scope)
    if "anyOf" in schema:
        return " | ".join([_type(inner, scope, indent) for inner in schema["anyOf"]])
    if "enum" in schema:
        return _enum(schema)
    if not schema.keys():
        return "any"
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join([_NAMES[inner] for inner in kind])
    if kind == "object":
        return _object(schema, scope, indent)
    if kind == "array":
        return _array(schema.get("items") or True, scope, indent)
    return "number" if kind == "integer" else str(kind)


def _reference(reference: str, scope: _Scope) -> str:
    if reference == "#":
        scope.names_itself = True
        return _SELF
    name = reference.split("/")[-1]
    if not reference.startswith(_DEFINITIONS) or not isinstance(scope.definitions[name], dict):
        raise ValueError(f"cannot refer to {reference}")
    return name


def _enum(schema: Mapping[str, Any]) -> str:
    allowed = _enum_types(schema["type"]) if "type" in schema else ()
    for value in schema["enum"]:
        if allowed and value is not None and not isinstance(value, allowed):
            raise ValueError(f"{value!r} is not of the enum's type")
    return " | ".join([f'"{v}"' if isinstance(v, str) else str(v) for v in schema["enum"]])


def _enum_types(kind: Any) -> tuple[type, ...]:
    """Return what the values may be; one kind may stand in a list, alone or beside null."""
    if isinstance(kind, list):
        if len(kind) not in (1, 2) or (len(kind) == 2 and "null" not in kind):
            raise ValueError(f"an enum of the types {kind}")
        kind = kind[-1] if kind[0] == "null" else kind[0]
    return _ENUM_TYPES.get(kind, ()) if isinstance(kind, str) else ()


def _array(items: Any, scope: _Scope, indent: str) -> str:
    """Return an array type; an item with a comment gets lines of its own."""
    deeper = indent + _INDENT
    if isinstance(items, dict) and (notes := _notes(items, deeper)):
        return "\n".join(["Array<", *notes, deeper + _type(items, scope, deeper), f"{indent}>"])
    return f"Array<{_type(items, scope, indent)}>"


def _object(schema: Mapping[str, Any], scope: _Scope, indent: str) -> str:
    fields, rest = _members(schema, scope, indent + _INDENT)
    return _block(fields, rest, indent)


def _block(fields: Sequence[_Field], rest: Sequence[str] | None, indent: str) -> str:
    if rest is None:
        raise ValueError("additionalProperties: neither a schema nor a truth value")
    lines = [*(line for _, line in sorted(fields)), *rest]
    return "\n".join(["{", ",\n".join(lines), f"{indent}}}"]) if lines else "{}"


def _members(
    schema: Mapping[str, Any], scope: _Scope, indent: str
) -> tuple[list[_Field], list[str] | None]:
    """Return the properties by name, and the line about those without one (None: malformed)."""
    if schema.get("$defs"):
        scope.definitions |= schema["$defs"]
    rest = _rest(schema, scope, indent)
    if "properties" not in schema:
        return [], rest
    optional = set(schema["properties"].keys()) - set(schema.get("required", []))
    fields = [
        ((name in optional, name), _field(name, inner, scope, indent, optional=name in optional))
        for name, inner in schema["properties"].items()
    ]
    return fields, rest


def _field(name: str, schema: Any, scope: _Scope, indent: str, *, optional: bool) -> str:
    notes = []
    if isinstance(schema, dict):
        notes = _notes(schema, indent)
        if (default := schema.get("default")) is not None:
            notes.append(f"{indent}// Default: {_literal(default)}")
    mark = "?" if optional else ""
    return "\n".join([*notes, f"{indent}{name}{mark}: {_type(schema, scope, indent)}"])


def _literal(value: Any) -> str:
    return repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)


def _rest(schema: Mapping[str, Any], scope: _Scope, indent: str) -> list[str] | None:
    rest = schema.get("additionalProperties")
    if rest is None:
        return []
    if not isinstance(rest, bool | dict):
        return None
    text = "never" if rest is False else _type(rest, scope, indent)
    return [f"{indent}[k: string]: {text}"]


def _notes(schema: Mapping[str, Any], indent: str) -> list[str]:
    """Return the comment lines of a schema: its description, then its limits in one line."""
    lines = _comment(schema.get("description"), indent)
    told = [f"{key}: {schema[key]}" for key in _limits(schema) if key in schema]
    return [*lines, f"{indent}// {', '.join(told)}"] if told else lines


def _limits(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kind = schema.get("type")
    plain = isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "enum"}
    return _CONSTRAINTS.get(kind, ()) if plain else ()


def _comment(description: Any, indent: str) -> list[str]:
    if not description:
        return []
    return [f"{indent}// {line}" if line else "" for line in description.split("\n")]
