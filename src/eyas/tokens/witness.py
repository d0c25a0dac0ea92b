"""Ids from the token texts that an engine hands out as `logprobs`, if they prove right. Pure.

Token texts settle what the text of a reply leaves open: how the sampler spelled it. They are a
witness, not the truth: a provider may leave the reasoning's out, or tell those of another reply.
So the ids must say what the reply says and be as many as were billed, else the text decides.
Source: vLLM and SGLang decode tokens one by one, so a token that is a part of a character arrives
as U+FFFD, or from vLLM as nothing, and the character with its last token. It is unknown then.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.records import Response
from eyas.tokens.codecs import Codec, ReplyParts
from eyas.tokens.codecs.kimi_prompt import arguments_text
from eyas.tokens.differences import REPLACEMENT
from eyas.tokens.providers import ProviderRule

_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")  # what vLLM writes for a text where it is told to
_Way = tuple[Any, ...]  # an id and the way to it; empty at the beginning
_LONGEST_PART = 16  # bytes of a token that is a part of a character
_MOST_WAYS = 64
_SHOWN = 40  # of a piece that is no token
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
    if not is_cut and codec.special_ids.intersection(ids[-2:-1]):
        raise RefusedError("a special token before the last")
    heard = codec.normalise(codec.parse_reply(ids))
    if part := _difference(said, heard, exact=offset != 0):
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
        raise RefusedError(f"{piece[:_SHOWN]!r} is no token of the target's")
    return found


def _filled(found: Sequence[int | None], text_ids: Sequence[int], codec: Codec) -> list[int]:
    """Return the ids with unknown ones found from the text; those after a cut are left out.

    An unknown token is a part of a character. Up to the last one and its neighbour all must stand
    in the text as they do in the reply, and there must be one way to spell it so.

    | found   | the text       | filled                                |
    |---------|----------------|---------------------------------------|
    | a ? ? b | a, 2 parts, b  | a x y b, if no other two tokens do it |
    | a ? b   | a, a word, b   | refused: a whole word has its text    |

    Raises: RefusedError if there is no way, or more than one.
    """
    text = b"".join(map(codec.bytes_of, text_ids))
    checked = len(found) - found[::-1].index(None) + 1
    cut = next(n for n in range(len(found), -1, -1) if n == 0 or found[n - 1] is not None)
    ends: dict[int, _Way | None] = {0: ()}  # ways to spell the text up to a place; None: several
    for number, known in enumerate(found[:checked]):
        if number >= cut and len(text) in ends:
            ends = {len(text): ends[len(text)]}
            break
        longer: dict[int, _Way | None] = {}
        for at, way in ends.items():
            for i, size in _nexts(known, text[at : at + _LONGEST_PART], codec):
                several = way is None or at + size in longer
                longer[at + size] = None if several else (i, way)
        if not 0 < len(longer) <= _MOST_WAYS:
            raise RefusedError(f"token {number} is not told, or not where the text has its place")
        ends = longer
    way, *others = ends.values()
    if way is None or others:
        raise RefusedError("parts of characters are not told, and may be spelled in several ways")
    return [*_ids_of(way), *(i for i in found[checked:] if i is not None)]


def _nexts(known: int | None, text: bytes, codec: Codec) -> Iterator[tuple[int, int]]:
    """Yield the ids, with their sizes in bytes, that a token may have where this text goes on."""
    if known is not None:
        token = codec.bytes_of(known)
        if token and text.startswith(token[:_LONGEST_PART]):
            yield known, len(token)
        return
    for size in range(1, len(text) + 1):
        found = codec.id_of(text[:size])
        if found is not None and REPLACEMENT in text[:size].decode(errors="replace"):
            yield found, size


def _ids_of(way: _Way) -> list[int]:
    ids = list[int]()
    while way:
        i, way = way
        ids.append(i)
    return ids[::-1]


def _difference(said: ReplyParts, heard: ReplyParts, *, exact: bool) -> str | None:
    """Return the part that differs: texts up to white space around them, arguments as JSON.

    `exact`: to the last space, where a token that was billed may have been one.
    """
    for part in ("reasoning", "content"):
        texts = [getattr(reply, part) or "" for reply in (said, heard)]
        if len({text if exact else text.strip() for text in texts}) > 1:
            return part
    calls = [[_meaning(call) for call in reply.tool_calls] for reply in (said, heard)]
    return None if calls[0] == calls[1] else "tool_calls"


def _meaning(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and arguments of a call, whatever their spelling."""
    text = arguments_text(call)
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), sort_keys=True)
    return str(call["function"].get("name")), text.strip()
