"""Codecs: how a target family renders prompts and how the parts of its replies become ids.

A codec is made from the target's own folder. A new family is one module and one line in `_LOADERS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from eyas.errors import EyasError
from eyas.records import Message, Tool
from eyas.tokens.codecs.kimi_prompt import RELEASES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyParts:
    """A reply as an API hands it out, or as `Codec.normalise` has put it right."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    flags: tuple[str, ...] = ()  # what was put right, or could not be
    calls_before: int = 0  # in the turns before: a target may number its calls through them


def num_calls(messages: Sequence[Message]) -> int:
    """Return how many tool calls a conversation has."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)


class Codec(Protocol):
    """What the pipeline asks of a target's format."""

    stop_ids: tuple[int, ...]
    special_ids: frozenset[int]  # never inside a reply
    markup_ids: frozenset[int]  # set a reply's parts apart: reasoning, tool calls
    vocab_size: int

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of the whole chat prompt, the header of the reply included.

        Raises: EyasError where the template refuses the messages.
        """
        ...

    def normalise(self, reply: ReplyParts) -> ReplyParts:
        """Return a reply with its parts where the target wrote them; what changed is flagged.

        A server may leave markers as text, or raw tool calls in the content.
        """
        ...

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        """Return the ids of a normalised reply, the end-of-turn id at its end unless it was cut.

        Raises: EyasError for parts that the target's format has no place for.
        """
        ...

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        """Return the parts of a sampled reply, as an engine would hand them out."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, markers included; bytes that are no UTF-8 become U+FFFD."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, a special one's text; empty where tokens are no bytes."""
        ...

    def id_of(self, token: bytes) -> int | None:
        """Return the one id that has these bytes, or None."""
        ...

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        """Return which marker of a reply's parts is missing or out of place, or None.

        The ids have no end-of-turn id; a reply that was cut may stop between any two markers.
        """
        ...

    def has_special_text(self, text: str) -> bool:
        """Tell whether text spells a special token, which encoding would turn into a real one."""
        ...


def load_codec(name: str, folder: Path) -> Codec:
    """Return the named codec over a target folder.

    Raises: EyasError for an unknown name, or a folder without tokenizer or chat template.
    """
    if name not in _LOADERS:
        raise EyasError(
            f"target.codec: expected {' | '.join(sorted(_LOADERS))}, got '{name}'",
            hint="a new family needs a codec under src/eyas/tokens/codecs",
        )
    return _LOADERS[name](folder)


def _chatml(thinking: bool, folder: Path) -> Codec:
    from eyas.tokens.codecs.chatml import load_chatml

    return load_chatml(folder, thinking=thinking)


def _kimi(release: str, folder: Path) -> Codec:
    from eyas.tokens.codecs.kimi import load_kimi

    return load_kimi(folder, release)


_LOADERS: dict[str, Callable[[Path], Codec]] = {
    "chatml": partial(_chatml, True),
    "chatml_instant": partial(_chatml, False),  # `enable_thinking: false`, where a template asks
    **{name: partial(_kimi, name) for name in RELEASES},
}
