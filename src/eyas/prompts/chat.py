"""Check chat messages and tools, and bring them into the form of OpenAI's chat API.

Pure. One set of rules for every schema: who may speak after whom, what a text is, which call a
tool's answer belongs to. Source: https://platform.openai.com/docs/api-reference/chat (roles,
tool calls, content parts); the parts `reasoning` and `tool_call` are LLaMA-Factory's.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from eyas.prompts.rows import RowError, json_of
from eyas.records import Message, Tool

ROLES = ("system", "user", "assistant", "tool")
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


def messages_of(column: object) -> tuple[Message, ...]:
    """Check roles, texts and order; keep only the keys that a chat API knows.

    Raises: RowError with the first reason against them.
    """
    if not isinstance(column, list) or not column:
        raise RowError("no_messages", column)
    messages = tuple(_message(item) for item in column)
    before = ""
    for message in messages:
        if message["role"] not in _NEXT[before]:
            raise RowError(*_order_error(before, message["role"]))
        before = "assistant with calls" if "tool_calls" in message else message["role"]
    return _linked(messages)


def tools_of(tools: object) -> tuple[Tool, ...]:
    """Return the declared functions, given as a list or as its JSON, wrapped or bare.

    Raises: RowError for anything else, or a name that no chat API takes.
    """
    if isinstance(tools, str):
        tools = json_of(tools, "bad_tools") if tools.strip() else None
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RowError("bad_tools", tools)
    return tuple(_tool(tool) for tool in tools)


def asked_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return what the users say: system prompts and tools are alike in all rows of a set."""
    said = (message["content"] for message in messages if message["role"] == "user")
    return "\n".join(text for text in said if isinstance(text, str))


def is_function_name(name: object) -> bool:
    """Tell whether a chat API takes a function of this name."""
    return isinstance(name, str) and _FUNCTION_NAME.fullmatch(name) is not None


def call_of(value: object) -> dict[str, Any]:
    """Return `{"name", "arguments"}` (an object, or its JSON) as a chat API's tool call.

    Raises: RowError naming what is wrong with the call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise RowError("bad_tool_calls", value)
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        text, arguments = arguments, json_of(arguments, "arguments_not_json")
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, dict):
        raise RowError("arguments_not_object", value)
    return {"type": "function", "function": {"name": value["name"], "arguments": text}}


def _order_error(before: str, role: str) -> tuple[str, str]:
    detail = f"{role} after {before or 'nothing'}"
    if before in ("", "system") and role == "assistant":
        return "starts_with_assistant", detail
    return ("repeated_role" if role == before else "bad_turn_order"), detail


def _message(item: object) -> Message:
    if not isinstance(item, dict):
        raise RowError("bad_message", item)
    role = item.get("role")
    if role not in ROLES:
        raise RowError("bad_role", role)
    content, reasoning, calls = _parts(item)
    message: Message = {"role": role, "content": content}
    if reasoning and role == "assistant":
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = _tool_calls(role, calls)
    elif not isinstance(content, str) or not (content.strip() or role == "tool"):
        raise RowError("no_content", item)  # a tool may have nothing to say
    if not isinstance(content, str | None):
        raise RowError("no_content", item)
    return message | _names(item)


def _parts(item: Mapping[str, Any]) -> tuple[object, str, object]:
    """Return content, reasoning and calls of a message whose content is a text or typed parts."""
    content, calls = item.get("content"), item.get("tool_calls")
    reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise RowError("bad_message", item)
    if not isinstance(content, list):
        return content, reasoning, calls
    said: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in said:
            raise RowError("part_without_text", part)
        value = part.get("text", part.get("value"))
        if not isinstance(value, str):
            raise RowError("no_content", part)
        said[kind].append(value)
    made = [call_of(json_of(text, "bad_tool_calls")) for text in said["tool_call"]]
    return "".join(said["text"]), reasoning + "".join(said["reasoning"]), calls or made


def _names(item: Mapping[str, Any]) -> dict[str, str]:
    """Return name and tool_call_id; SWE-agent keeps the latter as a list of one."""
    found = {key: item[key] for key in ("name", "tool_call_id") if item.get(key) is not None}
    ids = item.get("tool_call_ids")
    if isinstance(ids, list) and len(ids) == 1:
        found.setdefault("tool_call_id", ids[0])
    if not all(isinstance(value, str) for value in found.values()):
        raise RowError("bad_message", item)
    return found


def _tool_calls(role: str, calls: object) -> list[dict[str, Any]]:
    if role != "assistant" or not isinstance(calls, list):
        raise RowError("bad_tool_calls", calls)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("bad_tool_calls", call)
        if not isinstance(call.get("id"), str | None):
            raise RowError("bad_tool_calls", call)
    return calls


def _linked(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Name calls that have no id, and let answers without one answer them in their order.

    Ids count through the conversation, `functions.NAME:0` first: the form that Kimi itself writes.
    """
    number, open_ids = 0, list[str]()
    linked = []
    for message in messages:
        calls = [
            call if call.get("id") else call | {"id": f"functions.{call['function']['name']}:{i}"}
            for i, call in enumerate(message.get("tool_calls", ()), start=number)
        ]
        number += len(calls)
        if calls:
            message, open_ids = message | {"tool_calls": calls}, [call["id"] for call in calls]
        elif message["role"] == "tool" and "tool_call_id" in message:
            open_ids = [i for i in open_ids if i != message["tool_call_id"]]
        elif message["role"] == "tool" and open_ids:
            message = message | {"tool_call_id": open_ids.pop(0)}
        linked.append(message)
    return tuple(linked)


def _tool(tool: object) -> Tool:
    if not isinstance(tool, dict):
        raise RowError("bad_tools", tool)
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not is_function_name(function.get("name")):
        raise RowError("bad_tools", tool)
    return tool if "function" in tool else {"type": "function", "function": function}
