"""Parse the rows of the Berkeley function-calling leaderboard, and join its function documents.

Pure. Source: BFCL v4, https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard
(bfcl_eval/constants/executable_backend_config.py has the classes' files).
"""

from collections.abc import Mapping
from typing import Any

from eyas.prompts.chat import is_function_name, messages_of
from eyas.prompts.rows import ParsedRow, RowError, upstream_id
from eyas.records import Tool

FUNCTION_FILES = {
    "GorillaFileSystem": "gorilla_file_system.json",
    "MathAPI": "math_api.json",
    "MessageAPI": "message_api.json",
    "TwitterAPI": "posting_api.json",
    "TicketAPI": "ticket_api.json",
    "TradingBot": "trading_bot.json",
    "TravelAPI": "travel_booking.json",
    "VehicleControlAPI": "vehicle_control.json",
    "WebSearchAPI": "web_search.json",
    "MemoryAPI_kv": "memory_kv.json",
    "MemoryAPI_vector": "memory_vector.json",
    "MemoryAPI_rec_sum": "memory_rec_sum.json",
}
_JSON_TYPES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "array", "object")},
    "dict": "object",
    "float": "number",
    "tuple": "array",
}


def parse_bfcl(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a row: `question` is a list of turns, `function` declares the tools.

    The first turn is the prompt: a later one follows calls that nobody has made yet.
    """
    turns = row.get("question")
    if not isinstance(turns, list) or not turns:
        raise RowError("no_messages", turns)
    functions = row.get("function")
    if not isinstance(functions, list) or not functions:
        classes = row.get("involved_classes")
        where = f"name source.functions: they are in the files of {classes}" if classes else ""
        raise RowError("no_functions", where or functions)
    tools = tuple(_tool(function) for function in functions)
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RowError("function_declared_twice", [f.get("name") for f in functions])
    return ParsedRow(
        upstream_id=upstream_id(row, "id"), messages=messages_of(turns[0]), tools=tools
    )


def with_functions(row: object, files: Mapping[str, list[Any]]) -> object:
    """Add to a multi-turn row the functions of its classes, read from the leaderboard's files.

    A row that needs none, or whose classes have no file here, comes back as it is.
    """
    if not isinstance(row, dict) or "function" in row:
        return row
    classes, left_out = row.get("involved_classes"), row.get("excluded_function") or []
    missed = row.get("missed_function")  # by turn: the functions told later, not with the prompt
    if isinstance(missed, dict) and isinstance(left_out, list):
        told = [names for names in missed.values() if isinstance(names, list)]
        left_out = [*left_out, *(name for names in told for name in names)]
    names = [FUNCTION_FILES.get(str(c), "") for c in classes] if isinstance(classes, list) else []
    if not names or not isinstance(left_out, list) or not files.keys() >= set(names):
        return row
    functions = [function for name in names for function in files[name]]
    kept = [f for f in functions if not (isinstance(f, dict) and f.get("name") in left_out)]
    return row | {"function": kept}


def _tool(function: object) -> Tool:
    """Turn a BFCL function into an OpenAI tool; the dots of its name become underscores."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_function", function)
    name = function["name"].replace(".", "_")
    if not is_function_name(name):
        raise RowError("bad_function", function["name"])
    parameters = _json_schema(function.get("parameters"))
    if parameters.get("type") != "object":
        raise RowError("bad_function", function.get("parameters"))
    description = function.get("description", "")
    if not isinstance(description, str):
        raise RowError("bad_function", description)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _json_schema(schema: object) -> dict[str, Any]:
    """Map Python's type names to JSON Schema's, at every depth; `any` says nothing about a type."""
    if not isinstance(schema, dict):
        raise RowError("bad_parameters", schema)
    mapped = dict(schema)
    if "type" in mapped:
        kind = mapped.pop("type")
        if kind != "any":
            mapped = {"type": _json_type(kind), **mapped}
    if "items" in mapped:
        mapped["items"] = _json_schema(mapped["items"])
    if isinstance(mapped.get("additionalProperties"), dict):
        mapped["additionalProperties"] = _json_schema(mapped["additionalProperties"])
    if "properties" in mapped:
        if not isinstance(mapped["properties"], dict):
            raise RowError("bad_parameters", mapped["properties"])
        mapped["properties"] = {
            name: _json_schema(inner) for name, inner in mapped["properties"].items()
        }
    return mapped


def _json_type(kind: object) -> str:
    if not isinstance(kind, str) or kind not in _JSON_TYPES:
        raise RowError("unknown_type", kind)
    return _JSON_TYPES[kind]
