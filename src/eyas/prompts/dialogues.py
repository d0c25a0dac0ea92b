"""Parse the conversation sets: who spoke is spelled differently in each.

Pure. Source: the data sets' pages; https://github.com/lm-sys/FastChat (a long conversation of
ShareGPT is split into parts `ID_0`, `ID_2`, ...: fastchat/data/split_long_conversation.py).
"""

import re
from collections.abc import Mapping
from typing import Any

from eyas.prompts.chat import call_of, messages_of, tools_of
from eyas.prompts.rows import ParsedRow, RowError, json_of, upstream_id
from eyas.records import Message

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    "system": "system",
    "function_call": "call",
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
}
_PART = re.compile(r"([A-Za-z0-9]{7})_\d+")  # as ShareGPT names its conversations
_THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_THOUGHT = re.compile(
    r"\s*<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>"
    r"\s*<\|begin_of_solution\|>(.*?)(?:<\|end_of_solution\|>\s*)?",
    re.DOTALL,
)


def parse_messages(row: Mapping[str, Any]) -> ParsedRow:
    """Parse chat messages: column `messages`, `conversations`, or `prompt` (or a user's text)."""
    names = ("messages", "conversations", "prompt")
    column = next((row[name] for name in names if name in row), None)
    if isinstance(column, str):
        column = [{"role": "user", "content": column}]
    return ParsedRow(
        upstream_id=upstream_id(row, "id"),
        messages=messages_of(column),
        tools=tools_of(row.get("tools")),
    )


def parse_mixture_of_thoughts(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a row whose replies begin with `<think>...</think>`, which becomes their reasoning."""
    messages = messages_of(row.get("messages"))
    return ParsedRow(
        upstream_id=upstream_id(row, "id"),
        messages=tuple(_with_reasoning(message, _THINK) for message in messages),
    )


def parse_openthoughts(row: Mapping[str, Any]) -> ParsedRow:
    """Parse OpenThoughts; its system prompt asks for a markup that the target has no use for."""
    messages = messages_of(_said(row.get("conversations")))
    return ParsedRow(
        upstream_id=upstream_id(row, "id"),
        messages=tuple(
            _with_reasoning(message, _THOUGHT)
            for message in messages
            if message["role"] != "system"
        ),
    )


def parse_ultrachat(row: Mapping[str, Any]) -> ParsedRow:
    """Parse UltraChat: `messages`, or `data` as texts of user and assistant in turn, or as one."""
    if "messages" in row:
        found = messages_of(row["messages"])
        return ParsedRow(upstream_id=upstream_id(row, "prompt_id"), messages=found)
    texts = row.get("data")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list):
        raise RowError("no_messages", texts)
    turns = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    return ParsedRow(upstream_id=upstream_id(row, "id"), messages=messages_of(turns))


def parse_sharegpt(row: Mapping[str, Any]) -> ParsedRow:
    """Parse ShareGPT, glaive's tool calls in its form included; parts of one split stay together.

    Example: rows `QWJhYvA_0` and `QWJhYvA_2` are both of the conversation `QWJhYvA`.
    """
    identity = upstream_id(row, "id")
    part = _PART.fullmatch(identity)
    return ParsedRow(
        upstream_id=identity,
        messages=messages_of([*_system(row), *_said(row.get("conversations"))]),
        tools=tools_of(row.get("tools")),
        conversation=part[1] if part else "",
    )


def _system(row: Mapping[str, Any]) -> list[Message]:
    """Return the system message of a re-cut row, which has its text in a column."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _said(column: object) -> list[Message]:
    if not isinstance(column, list) or not column:
        raise RowError("no_messages", column)
    return [_turn(item) for item in column]


def _turn(item: object) -> Message:
    if not isinstance(item, dict):
        raise RowError("bad_message", item)
    speaker, value = item.get("from"), item.get("value")
    role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise RowError("bad_role", speaker)
    if role != "call":
        return {"role": role, "content": value}
    if not isinstance(value, str):
        raise RowError("bad_tool_calls", value)
    calls = json_of(value, "bad_tool_calls")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": None, "tool_calls": [call_of(call) for call in calls]}


def _with_reasoning(message: Message, markup: re.Pattern[str]) -> Message:
    """Take the thoughts out of a reply's text; a reply without the markup stays as it is."""
    content = message["content"]
    found = markup.fullmatch(content) if message["role"] == "assistant" and content else None
    if found is None or "reasoning_content" in message:
        return message
    return message | {"reasoning_content": found[1].strip(), "content": found[2].strip()}
