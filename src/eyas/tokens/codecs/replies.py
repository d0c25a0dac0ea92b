"""What the families' replies have in common: flags, and what servers leave as text. Pure."""

import json
from collections.abc import Sequence
from dataclasses import replace

from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.kimi_prompt import THINK, THINK_END

IMPLICIT_THINK_END = "implicit_think_end"  # the calls began inside the reasoning, without </think>
RAW_REASONING = "raw_reasoning"  # the reasoning stood in the content
RAW_TOOL_CALLS = "raw_tool_calls"  # the calls stood in the text
MALFORMED_TOOL_CALLS = "malformed_tool_calls"  # they stand there still: not whole, or not last


def without_endings(reply: ReplyParts, endings: Sequence[str]) -> ReplyParts:
    """Take spelled end tokens, in this order if several, off the last text."""
    text = reply.content or reply.reasoning or ""
    for ending in reversed(endings):
        text = text.removesuffix(ending)
    if reply.content:
        return replace(reply, content=text)
    return replace(reply, reasoning=text) if reply.reasoning else reply


def with_reasoning_split(reply: ReplyParts) -> ReplyParts:
    """Split a reply that arrived as one text at the first `</think>`.

    The prompt may have the opening `<think>` already, so it is demanded only of a server that knows
    reasoning and says that there was none.
    """
    text = reply.content or ""
    opened = text.lstrip(" ").startswith(THINK)
    if reply.reasoning or THINK_END not in text or not (opened or reply.reasoning is None):
        return reply
    reasoning, content = text.split(THINK_END, 1)
    if opened:
        reasoning = reasoning.lstrip(" ").removeprefix(THINK)
    return replace(reply, reasoning=reasoning, content=content, flags=(*reply.flags, RAW_REASONING))


def is_json(text: str) -> bool:
    """Tell whether text is one whole JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
