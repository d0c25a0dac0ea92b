"""The spellings of tool-call arguments: a server that parses them writes them anew. Pure.

`{"city": "Bonn"}` and `{"city":"Bonn"}` are other ids, and other counts; the bill tells which.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eyas.tokens.codecs import ReplyParts

ARGUMENTS_RESPELLED = "arguments_respelled"  # another spelling than the one given fits the bill
_SEPARATORS = {"compact": (",", ":"), "spaced": (", ", ": ")}


def spellings_of(reply: ReplyParts) -> Iterator[ReplyParts]:
    """Yield the reply as given, then with compact and with spaced arguments where they differ."""
    yield reply
    for separators in _SEPARATORS.values() if reply.tool_calls else ():
        calls = tuple(_respelled(call, separators) for call in reply.tool_calls)
        if calls != reply.tool_calls:
            flags = (*reply.flags, ARGUMENTS_RESPELLED)
            yield replace(reply, tool_calls=calls, flags=flags)


def _respelled(call: dict[str, Any], separators: tuple[str, str]) -> dict[str, Any]:
    """Return the call with its arguments written anew; arguments that are no JSON stay."""
    function = call.get("function")
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(given, str):
        return call
    try:
        text = json.dumps(json.loads(given), ensure_ascii=False, separators=separators)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": text}}
