r"""Where a reply's texts begin and end, and what a server may have added or taken there. Pure.

Source: a server that joins added tokens with spaces hands out `<think> ok </think> 1`, and the
spaces go on into reasoning and content; another strips white space. What an edit does here undoes
what the server did: `strip_space` for one that adds, `restore_newline` for one that takes away.

| place           | edit            | text   | becomes |
|-----------------|-----------------|--------|---------|
| content_start   | strip_space     | `  1`  | ` 1`    |
| reasoning_end   | strip_space     | `ok `  | `ok`    |
| reasoning_end   | restore_newline | `ok`   | `ok\n`  |
"""

from collections.abc import Sequence
from dataclasses import replace

from eyas.tokens.codecs import ReplyParts

PLACES = ("reasoning_start", "reasoning_end", "content_start", "content_end")
STRIP_SPACE = "strip_space"
_ADDED = {STRIP_SPACE: " ", "strip_newline": "\n"}
_TAKEN = {"restore_space": " ", "restore_newline": "\n"}
EDITS = (*_ADDED, *_TAKEN)
Edit = tuple[str, str]  # (place, edit)


def places_of(reply: ReplyParts, finish_reason: str) -> tuple[str, ...]:
    """Return the borders that a reply has: a text that was cut has no end."""
    finished = finish_reason != "length"
    ended = {
        "reasoning": bool(finished or reply.content or reply.tool_calls),
        "content": bool(finished or reply.tool_calls),
    }
    texts = {"reasoning": reply.reasoning, "content": reply.content}
    return tuple(
        f"{part}_{side}"
        for part, text in texts.items()
        for side in ("start", "end")
        if text and (side == "start" or ended[part])
    )


def edit_reply(reply: ReplyParts, finish_reason: str, edits: Sequence[Edit]) -> ReplyParts:
    """Apply the edits at the borders that the reply has."""
    there = places_of(reply, finish_reason) if edits else ()
    for place, edit in edits:
        if place not in there:
            continue
        if place.startswith("reasoning"):
            reply = replace(reply, reasoning=edit_text(reply.reasoning or "", place, edit))
        else:
            reply = replace(reply, content=edit_text(reply.content or "", place, edit))
    return reply


def edit_text(text: str, place: str, edit: str) -> str:
    """Apply one edit to a text at the side that the place names."""
    at_start = place.endswith("_start")
    if edit in _TAKEN:
        return _TAKEN[edit] + text if at_start else text + _TAKEN[edit]
    return text.removeprefix(_ADDED[edit]) if at_start else text.removesuffix(_ADDED[edit])


def has_space(text: str, place: str) -> bool:
    """Tell whether a space stands at the side that the place names."""
    return text.startswith(" ") if place.endswith("_start") else text.endswith(" ")
