"""The tokens of an answer as OpenAI's `logprobs` tell them: read from a body, written to one. Pure.

Source: the chat API's `choices[].logprobs.content`, an entry a sampled token, with its text and its
bytes; vLLM writes `token_id:ID` for a text where it is told to.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from eyas.records import Piece


def read_pieces(choice: Mapping[str, Any]) -> tuple[Piece, ...] | None:
    """Return the pieces of a choice; None where they are not told, or not in the known form."""
    try:
        entries = choice["logprobs"]["content"]
        return tuple(_piece(entry["token"], entry.get("bytes")) for entry in entries) or None
    except (AttributeError, KeyError, TypeError, ValueError):  # the answer is paid for without it
        return None


def _piece(token: Any, given: Any) -> Piece:
    """Return a token's bytes as text, which is shorter, where they are UTF-8."""
    if not isinstance(token, str) or not isinstance(given, list | None):
        raise TypeError("a token without text, or bytes that are no list")
    if not given or token.startswith("token_id:"):
        return token
    data = bytes(given)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return tuple(data)


def write_pieces(tokens: Iterable[bytes]) -> dict[str, Any]:
    """Return `logprobs` without the numbers: the local sampler keeps none."""
    return {"content": [{"token": t.decode(errors="replace"), "bytes": list(t)} for t in tokens]}
