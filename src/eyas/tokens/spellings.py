"""The spellings of tool-call arguments: a server that parses them writes them anew. Pure.

`{"city": "Bonn"}` and `{"city":"Bonn"}` are other ids, and other counts; the bill tells which.
"""

import json
from dataclasses import replace
from typing import Any

from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.kimi_prompt import arguments_text

ARGUMENTS_RESPELLED = "arguments_respelled"  # written in another spelling than the one given
GIVEN = "given"
_SEPARATORS = {"compact": (",", ":"), "spaced": (", ", ": ")}
SPELLINGS = (GIVEN, *_SEPARATORS)


def spell(reply: ReplyParts, spelling: str) -> ReplyParts:
    """Return the reply with its arguments in a spelling, flagged if that changed any."""
    if spelling == GIVEN or not reply.tool_calls:
        return reply
    calls = tuple(_respelled(call, _SEPARATORS[spelling]) for call in reply.tool_calls)
    if calls == reply.tool_calls:
        return reply
    return replace(reply, tool_calls=calls, flags=(*reply.flags, ARGUMENTS_RESPELLED))


def _respelled(call: dict[str, Any], separators: tuple[str, str]) -> dict[str, Any]:
    """Return the call with its arguments written anew; arguments that are no JSON stay."""
    function = call.get("function")
    if not isinstance(function, dict) or function.get("arguments") is None:
        return call
    given = arguments_text(call)
    try:
        text = json.dumps(json.loads(given), ensure_ascii=False, separators=separators)
        text.encode()  # an escaped lone surrogate has no other spelling
    except (ValueError, RecursionError):
        return call
    return call if text == given else {**call, "function": {**function, "arguments": text}}
