"""Parse upstream rows, a function a schema: each row is a `ParsedRow` or a `Reject`, no guesses.

Source: BFCL v4, https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard;
HumanEval, https://github.com/openai/human-eval; function tools as in OpenAI's chat API.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import EyasError
from eyas.records import Message, Tool, canonical_json

_DETAIL_CHARS = 120
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Who may speak after whom; "" is the start, and a tool answers only an assistant that called one.
_NEXT = {
    "": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user"},
    "assistant with calls": {"tool"},
    "tool": {"tool", "assistant"},
}
_ROLES = ("system", "user", "assistant", "tool")
_JSON_TYPES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "array", "object")},
    "dict": "object",
    "float": "number",
    "tuple": "array",
}
_CODE_REQUEST = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n"
    "```python\n{code}\n```"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """What a row says, in the pipeline's form; `upstream_id` is empty where the row has none."""

    upstream_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Why a row is not used: a reason that is counted, and the text that shows it."""

    reason: str
    detail: str


class RowError(Exception):
    """A row that its schema does not fit: the reason that is counted, and a detail."""

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(reason, detail)
        self.reject = Reject(reason=reason, detail=str(detail)[:_DETAIL_CHARS])


def parse_row(schema: str, row: object) -> ParsedRow | Reject:
    """Parse one upstream row of any type.

    Raises: EyasError for an unknown schema; a malformed row is a `Reject`.
    """
    if schema not in SCHEMAS:
        raise EyasError(
            f"datasets.*.prepare.schema: expected {' | '.join(sorted(SCHEMAS))}, got '{schema}'",
            hint="a new one is a function in src/eyas/prompts/schemas.py",
        )
    if not isinstance(row, Mapping):
        return Reject(reason="not_an_object", detail=str(row)[:_DETAIL_CHARS])
    try:
        canonical_json(row)  # what has no JSON form (or is nested too deep) has no id
    except TypeError as error:
        return Reject(reason="not_json", detail=str(error)[:_DETAIL_CHARS])
    try:
        return SCHEMAS[schema](row)
    except RowError as error:
        return error.reject


def parse_messages(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a row of chat messages: column `messages`, or `prompt` (messages, or a user's text)."""
    column = row["messages"] if "messages" in row else row.get("prompt")
    if isinstance(column, str):
        column = [{"role": "user", "content": column}]
    return ParsedRow(
        upstream_id=_upstream_id(row, "id"),
        messages=_messages(column),
        tools=_openai_tools(row.get("tools")),
    )


def parse_bfcl(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a single-turn row of BFCL v4: `question` is a list of turns, `function` declares tools.

    Later turns of a multi-turn row answer calls that were never made here, so those are rejected.
    """
    turns = row.get("question")
    if not isinstance(turns, list) or not turns:
        raise RowError("no_messages", turns)
    if len(turns) > 1:
        raise RowError("several_turns", f"{len(turns)} turns")
    functions = row.get("function")
    if not isinstance(functions, list) or not functions:
        raise RowError("no_functions", functions)
    tools = tuple(_bfcl_tool(function) for function in functions)
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RowError("function_declared_twice", [f.get("name") for f in functions])
    return ParsedRow(upstream_id=_upstream_id(row, "id"), messages=_messages(turns[0]), tools=tools)


def parse_humaneval(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a HumanEval task: the unfinished function is put into a user's request, as a block."""
    code = row.get("prompt")
    if not isinstance(code, str) or not code.strip():
        raise RowError("no_content", code)
    if "```" in code:
        raise RowError("code_fence_in_code", code)
    content = _CODE_REQUEST.format(code=code.strip("\n"))
    return ParsedRow(
        upstream_id=_upstream_id(row, "task_id"), messages=({"role": "user", "content": content},)
    )


SCHEMAS: dict[str, Callable[[Mapping[str, Any]], ParsedRow]] = {
    "messages": parse_messages,
    "bfcl": parse_bfcl,
    "humaneval": parse_humaneval,
}


def _upstream_id(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError("bad_id", value)
    return str(value)


def _messages(column: object) -> tuple[Message, ...]:
    """Check roles, texts and order; keep only the keys that a chat API knows."""
    if not isinstance(column, list) or not column:
        raise RowError("no_messages", column)
    messages = tuple(_message(item) for item in column)
    before = ""
    for message in messages:
        if message["role"] not in _NEXT[before]:
            raise RowError("bad_turn_order", f"{message['role']} after {before or 'nothing'}")
        before = "assistant with calls" if "tool_calls" in message else message["role"]
    return messages


def _message(item: object) -> Message:
    if not isinstance(item, dict):
        raise RowError("bad_message", item)
    role, content, calls = item.get("role"), item.get("content"), item.get("tool_calls")
    if role not in _ROLES:
        raise RowError("bad_role", role)
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = _tool_calls(role, calls)
    elif not isinstance(content, str) or not content.strip():
        raise RowError("no_content", item)
    if not isinstance(content, str | None):
        raise RowError("no_content", item)
    for key in ("name", "tool_call_id"):
        if item.get(key) is not None:
            if not isinstance(item[key], str):
                raise RowError("bad_message", item)
            message[key] = item[key]
    return message


def _tool_calls(role: str, calls: object) -> list[dict[str, Any]]:
    if role != "assistant" or not isinstance(calls, list):
        raise RowError("bad_tool_calls", calls)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("bad_tool_calls", call)
    return calls


def _openai_tools(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RowError("bad_tools", tools)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not _is_function_name(function.get("name")):
            raise RowError("bad_tools", tool)
    return tuple(tools)


def _bfcl_tool(function: object) -> Tool:
    """Turn a BFCL function into an OpenAI tool; the dots of its name become underscores."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_function", function)
    name = function["name"].replace(".", "_")
    if not _is_function_name(name):
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


def _is_function_name(name: object) -> bool:
    return isinstance(name, str) and _FUNCTION_NAME.fullmatch(name) is not None


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
