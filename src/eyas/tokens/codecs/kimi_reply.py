"""A Kimi reply put right: what a server left as text goes back to the part it belongs to. Pure.

Source: the reasoning and tool parsers of SGLang and vLLM. Without them a reply arrives as one text;
with them, tool calls that the model began inside its reasoning stay there, and a server that joins
tokens with spaces leaves one at each marker.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.kimi_prompt import (
    ARGUMENTS,
    CALL,
    CALL_END,
    IM_END,
    SECTION,
    SECTION_END,
    THINK,
    THINK_END,
)
from eyas.tokens.codecs.replies import (
    IMPLICIT_THINK_END,
    MALFORMED_TOOL_CALLS,
    RAW_TOOL_CALLS,
    with_reasoning_split,
    without_endings,
)

TOOL_ID_REWRITTEN = "tool_id_rewritten"  # a server gave the call another id than the model

_ENDINGS = (IM_END, "[EOS]")
_OWN_ID = re.compile(r"(functions\.)?[\w.\-]+:\d+")
_LETTERS = {
    THINK: "T",
    THINK_END: "t",
    SECTION: "S",
    CALL: "C",
    ARGUMENTS: "A",
    CALL_END: "E",
    SECTION_END: "s",
}
_WHOLE_SECTION = "S(?:CAE)+s"


def normalise(reply: ReplyParts, *, thinking: bool) -> ReplyParts:
    """Return the reply with every part in its place; its flags tell what was done, or was not."""
    reply = without_endings(reply, _ENDINGS)
    if thinking:
        reply = with_reasoning_split(reply)
    return _with_own_ids(_with_calls_lifted(reply))


def _with_calls_lifted(reply: ReplyParts) -> ReplyParts:
    """Take a whole section at the end of the last text out of it; any other is only flagged."""
    reasoning, content = reply.reasoning or "", reply.content or ""
    if SECTION not in reasoning and SECTION not in content:
        return reply
    in_reasoning = not content
    before, _, section = (reasoning if in_reasoning else content).partition(SECTION)
    calls = _calls_of(section)
    if calls is None or reply.tool_calls or (reasoning + content).count(SECTION) > 1:
        return replace(reply, flags=(*reply.flags, MALFORMED_TOOL_CALLS))
    if section.startswith(" "):  # a server that joins tokens with spaces
        before = before.removesuffix(" ")
    flags = (*reply.flags, RAW_TOOL_CALLS, *([IMPLICIT_THINK_END] if in_reasoning else []))
    lifted = replace(reply, tool_calls=calls, flags=flags)
    return replace(lifted, reasoning=before) if in_reasoning else replace(lifted, content=before)


def _calls_of(section: str) -> tuple[dict[str, Any], ...] | None:
    """Return the calls of a section's text, from behind its first marker; None if it is not whole.

    At each marker there may be a space; behind the last there may be white space, and nothing else.
    """
    inside, end, after = section.partition(SECTION_END)
    before, *parts = inside.split(CALL)
    if not end or after.strip() or before.strip(" ") or not parts:
        return None
    calls = []
    for part in parts:
        identity, marker, rest = part.removesuffix(" ").partition(ARGUMENTS)
        identity, arguments = _bare(identity), _bare(rest.removesuffix(CALL_END))
        whole = marker and rest.endswith(CALL_END) and "<|tool_call" not in arguments
        if not (whole and _OWN_ID.fullmatch(identity)):
            return None
        calls.append(call_of(identity, arguments))
    return tuple(calls)


def _bare(text: str) -> str:
    return text.removeprefix(" ").removesuffix(" ")


def call_of(identity: str, arguments: str) -> dict[str, Any]:
    """Return a call in OpenAI's form; its function's name stands in its id."""
    name = identity.removeprefix("functions.").rpartition(":")[0] or identity
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def _with_own_ids(reply: ReplyParts) -> ReplyParts:
    """Give every call an id of the model's own form: `functions.NAME:INDEX`, the conversation's."""
    numbered = enumerate(reply.tool_calls, start=reply.calls_before)
    calls = tuple(_with_own_id(call, index) for index, call in numbered)
    if calls == reply.tool_calls:
        return reply
    return replace(reply, tool_calls=calls, flags=(*reply.flags, TOOL_ID_REWRITTEN))


def _with_own_id(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if _OWN_ID.fullmatch(str(call.get("id"))) or not isinstance(name, str):
        return dict(call)
    return {**call, "id": f"functions.{name}:{index}"}


def order_fault(markers: Sequence[str], *, opens: bool, thinking: bool, is_cut: bool) -> str | None:
    """Return the markers of a reply's parts where they do not follow one another as they must.

    Source: the grammar of a turn. Reasoning ends with `</think>` or where a tool section begins.
    `opens`: the reply has `<think>` itself; `thinking`: there is reasoning to end. A reply that was
    cut has any beginning of what a whole one has.
    """
    if unknown := [marker for marker in markers if marker not in _LETTERS]:
        return f"{unknown[0]} inside the reply"
    opening, end = ("T" if opens else "", "t") if thinking else ("", "")
    whole = rf"{opening}(?:{end}(?:{_WHOLE_SECTION})?|{_WHOLE_SECTION})"
    beginning = rf"(?:{opening}(?:{end})?(?:S(?:CAE)*(?:CA?|(?<=E)s)?)?)?"
    word = "".join(_LETTERS[marker] for marker in markers)
    if re.fullmatch(beginning if is_cut else whole, word):
        return None
    return f"out of order or not closed: {' '.join(markers) or 'no </think>'}"
