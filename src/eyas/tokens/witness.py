"""Ids from the token texts that an engine hands out as `logprobs`, if they prove right. Pure.

Token texts settle what the text of a reply leaves open: how the sampler spelled it. They are a
witness, not the truth: a provider may leave the reasoning's out, or tell those of another reply.
So the ids must say what the reply says and be as many as were billed, else the text decides.
Source: vLLM and SGLang decode tokens one by one, so a token that is a part of a character arrives
as U+FFFD, or from vLLM as nothing, and the character with its last token. It is unknown then.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.records import Response
from eyas.tokens.codecs import Codec, ReplyParts
from eyas.tokens.codecs.kimi_prompt import arguments_text
from eyas.tokens.differences import REPLACEMENT
from eyas.tokens.providers import ProviderRule

_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")  # what vLLM writes for a text where it is told to
_LOST = REPLACEMENT.encode()  # in the text too, it stands for any bytes
_LOST_TOKENS = 3  # of a character that was cut: it has at most 4 bytes, one at least is missing


class RefusedError(Exception):
    """The token texts do not prove right; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A reply's ids, from its text or its token texts."""

    ids: list[int]
    flags: tuple[str, ...]
    offset: int  # what was billed beyond the tokens
    half_character: bool  # cut inside a character, whose tokens are left out


def read_witness(
    response: Response, said: ReplyParts, codec: Codec, provider: ProviderRule
) -> Reading:
    """Return the ids that the token texts name, if they say what the reply says.

    `said`: the normalised reply, without half a character at its end. The offset is the provider's,
    or none: what text alone takes for one may be a token that the provider strips from the text.

    Raises: RefusedError; without a reason where there are no token texts.
    """
    if response.pieces is None:
        raise RefusedError
    pieces, is_cut = response.pieces, response.finish_reason == "length"
    found = [
        _id_of(codec, piece if isinstance(piece, str) else bytes(piece))
        if before != ""  # else this piece may tell a character of which it has the end alone
        else None
        for piece, before in zip(pieces, (None, *pieces), strict=False)
    ]
    ids = [i for i in found if i is not None]
    if len(ids) < len(found):
        ids = _filled(found, codec.reply_ids(said, response.finish_reason), codec)
    lost = len(pieces) - len(ids)
    if not is_cut and ids[-1:] != [codec.stop_ids[0]]:
        ids.append(codec.stop_ids[0])
    offset = response.completion_tokens - lost - len(ids)
    if offset not in (0, provider.offset_of(response.finish_reason)):
        raise RefusedError(f"billed {response.completion_tokens} tokens, told {len(pieces)}")
    while is_cut and codec.decode(ids[-_LOST_TOKENS - 1 :]).endswith(REPLACEMENT):
        ids.pop()
        lost += 1
    if lost > (_LOST_TOKENS if is_cut else 0):
        raise RefusedError(f"{lost} tokens after the end of the text")
    heard = codec.normalise(codec.parse_reply(ids))
    if part := _difference(said, heard):
        raise RefusedError(f"they tell another {part} than the reply has")
    return Reading(ids=ids, flags=heard.flags, offset=offset, half_character=lost > 0)


@lru_cache(maxsize=1 << 17)
def _id_of(codec: Codec, piece: str | bytes) -> int | None:
    """Return the id of a piece; None where it is a part of a character whose bytes are not told.

    Raises: RefusedError if it is no token of this tokenizer.
    """
    if isinstance(piece, str):
        if REPLACEMENT in piece or not piece:
            return None
        named = _TOKEN_ID.fullmatch(piece)
        if named and int(named[1]) < codec.vocab_size:
            return int(named[1])
    found = codec.id_of(piece.encode() if isinstance(piece, str) else piece)
    if found is None:
        raise RefusedError(f"{piece!r} is no token of the target's")
    return found


def _filled(found: Sequence[int | None], text_ids: Sequence[int], codec: Codec) -> list[int]:
    """Return the ids with unknown ones taken from the text's own; those after a cut are left out.

    Up to the last unknown one and its neighbour all must stand in the text as they do in the reply:
    then a run of unknown ids has this text to spell, and as many ids do.

    | found   | the text's own ids | filled  |
    |---------|--------------------|---------|
    | a ? ? b | a x y b            | a x y b |
    | a ? b   | a x y b            | refused |
    """
    tokens = [codec.bytes_of(i) for i in text_ids]
    ends = itertools.accumulate(map(len, tokens), initial=0)
    text = b"".join(tokens)
    own = {e: i for e, t, i in zip(ends, tokens, text_ids, strict=False) if _LOST not in t}
    checked = len(found) - found[::-1].index(None) + 1
    ids, at = list[int](), 0
    for number, known in enumerate(found[:checked]):
        if at == len(text) and found[number:].count(None) == len(found) - number:
            break
        i = own.get(at) if known is None else known
        token = b"" if i is None else codec.bytes_of(i)
        if i is None or not token or not text.startswith(token, at):
            raise RefusedError(f"token {number} is not told, or not where the text has its place")
        ids.append(i)
        at += len(token)
    return [*ids, *(i for i in found[checked:] if i is not None)]


def _difference(said: ReplyParts, heard: ReplyParts) -> str | None:
    """Return the part that differs: texts up to white space around them, arguments as JSON."""
    for part in ("reasoning", "content"):
        if (getattr(said, part) or "").strip() != (getattr(heard, part) or "").strip():
            return part
    calls = [[_meaning(call) for call in reply.tool_calls] for reply in (said, heard)]
    return None if calls[0] == calls[1] else "tool_calls"


def _meaning(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and arguments of a call, whatever their spelling."""
    text = arguments_text(call)
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), sort_keys=True)
    return str(call["function"].get("name")), text.strip()
