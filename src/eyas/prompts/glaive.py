r"""Parse the rows of glaive-function-calling-v2: declarations and a chat, both plain text.

Pure. The text has one reading or the row is rejected. Read as they stand: apostrophes in the quoted
arguments, arguments as a bare object, words before a call, turns one blank line apart. Rejected:

| in the row                                      | reason                                   |
|-------------------------------------------------|------------------------------------------|
| `\'` inside the quoted arguments                | escaped_quote_in_arguments               |
| `Infinity` or `NaN` in them                     | arguments_not_finite                     |
| a list or null; what is no JSON at all          | arguments_not_object, arguments_not_json |
| `parameters` where `arguments` should stand     | parameters_for_arguments                 |
| a call that stops short; more text behind it    | call_cut_short, text_after_call          |
| two calls in one turn                           | several_calls                            |
| "AI:" replaced by the end-of-text mark          | end_mark_in_text                         |
| a name not declared                             | undeclared_function                      |
| a name declared twice                           | function_declared_twice                  |
| a response to no call                           | response_without_call                    |
| a call that nothing responds to                 | call_without_response                    |

Source: https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from eyas.prompts.chat import call_of, is_function_name, messages_of
from eyas.prompts.rows import ParsedRow, RowError, json_of, text_of
from eyas.records import Message, Tool

_WITH_TOOLS = re.compile(
    r"SYSTEM: You are a helpful assistant with access to the following functions\."
    r" Use them if required -\s*"
)
_WITHOUT_TOOLS = "You are a helpful assistant, with no access to external functions."
_TURN = re.compile(r"(?:\A|\n\n+)(USER|ASSISTANT|FUNCTION RESPONSE):")
_END, _CALL = "<|endoftext|>", "<functioncall>"
_QUOTED_CALL = re.compile(
    r"""\{\s*"name":\s*"(?P<name>[^"]*)",\s*"(?P<key>\w+)":\s*'(?P<text>.*)'\s*\}(?P<rest>.*)""",
    re.DOTALL,
)
_NOT_FINITE = re.compile(r"(?<![\w\"])-?(?:Infinity|NaN)\b")


def parse_glaive(row: Mapping[str, Any]) -> ParsedRow:
    """Parse one row; the declared functions become tools, not a system message."""
    system, tools = _declared(text_of(row, "system"))
    turns = list(_turns(text_of(row, "chat")))
    _check_calls(turns, {tool["function"]["name"] for tool in tools})
    return ParsedRow(upstream_id="", messages=messages_of([*system, *turns]), tools=tools)


def _declared(system: str) -> tuple[list[Message], tuple[Tool, ...]]:
    if system.strip() == f"SYSTEM: {_WITHOUT_TOOLS}":
        return [{"role": "system", "content": _WITHOUT_TOOLS}], ()
    head = _WITH_TOOLS.match(system)
    if head is None:
        raise RowError("unknown_system_text", system)
    tools = tuple(_functions(system[head.end() :]))
    names = [tool["function"]["name"] for tool in tools]
    if not tools:
        raise RowError("no_functions", system)
    if len(set(names)) < len(names):
        raise RowError("function_declared_twice", names)
    return [], tools


def _functions(text: str) -> Iterator[Tool]:
    """Yield the objects that stand one after the other, which together are no JSON."""
    decoder, place = json.JSONDecoder(), 0
    while text[place:].strip():
        start = place + len(text[place:]) - len(text[place:].lstrip())
        try:
            _, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            raise RowError("bad_function", text[start:]) from None
        function = json_of(text[start:place], "bad_function")
        if not isinstance(function, dict) or not is_function_name(function.get("name")):
            raise RowError("bad_function", function)
        if not isinstance(function.get("parameters", {}), dict):
            raise RowError("bad_parameters", function)
        yield {"type": "function", "function": function}


def _turns(chat: str) -> Iterator[Message]:
    head, *pieces = _TURN.split(chat)
    if head.strip():
        raise RowError("text_before_first_turn", head)
    speakers, texts = pieces[::2], [piece.strip() for piece in pieces[1::2]]
    before = ""
    for number, (speaker, text) in enumerate(zip(speakers, texts, strict=True), start=1):
        if speaker == before == "ASSISTANT":
            raise RowError("end_mark_in_text", text)
        before = speaker
        if speaker == "ASSISTANT":
            yield _reply(text, is_last=number == len(texts))
        else:
            _check_mark(text)
            yield {"role": "user" if speaker == "USER" else "tool", "content": text}


def _check_mark(text: str) -> None:
    if _END in text:
        raise RowError("end_mark_in_text", text)


def _reply(text: str, *, is_last: bool) -> Message:
    said = text.removesuffix(_END).rstrip()
    if said == text and not is_last:
        raise RowError("reply_without_end", text)
    _check_mark(said)
    before, *calls = said.split(_CALL)
    if not calls:
        return {"role": "assistant", "content": said}
    if len(calls) > 1:
        raise RowError("several_calls", said)
    return {
        "role": "assistant",
        "content": before.strip() or None,
        "tool_calls": [_call(calls[0].strip())],
    }


def _call(text: str) -> dict[str, Any]:
    """Read `{"name": "f", "arguments": '{"k": "v"}'}`, or the same with a bare object."""
    quoted = _QUOTED_CALL.fullmatch(text)
    if quoted is None:
        return _bare_call(text)
    if quoted["rest"].strip():
        raise RowError("text_after_call", text)
    _check_key(quoted["key"], text)
    if "\\'" in quoted["text"]:
        raise RowError("escaped_quote_in_arguments", text)
    if _NOT_FINITE.search(quoted["text"]):
        json_of(quoted["text"], "arguments_not_finite")  # the word may stand inside a string
    return call_of({"name": quoted["name"], "arguments": quoted["text"]})


def _bare_call(text: str) -> dict[str, Any]:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        raise RowError("call_cut_short", text) from None
    if text[end:].strip():
        raise RowError("text_after_call", text)
    reason = "arguments_not_finite" if _NOT_FINITE.search(text) else "bad_tool_calls"
    call = json_of(text, reason)
    if isinstance(call, dict) and "arguments" not in call:
        _check_key(next((key for key in call if key != "name"), ""), text)
    return call_of(call)


def _check_key(key: str, text: str) -> None:
    if key == "parameters":
        raise RowError("parameters_for_arguments", text)
    if key != "arguments":
        raise RowError("bad_tool_calls", text)


def _check_calls(turns: list[Message], declared: set[str]) -> None:
    """Check that each response answers a call, each call is answered, and each name is known."""
    waiting = False
    for turn in turns:
        if turn["role"] == "tool" and not waiting:
            raise RowError("response_without_call", turn["content"])
        if turn["role"] != "tool" and waiting:
            raise RowError("call_without_response", turn)
        waiting = "tool_calls" in turn
        for call in turn.get("tool_calls", ()):
            if call["function"]["name"] not in declared:
                raise RowError("undeclared_function", call["function"]["name"])
