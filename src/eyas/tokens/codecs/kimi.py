"""Kimi targets (K2-Thinking, K2.5, K2.6): exact ids of prompts and of replies.

Reads: tiktoken.model, tokenizer_config.json of a Hugging Face folder.
Source: template and tokenizer class of K2.5. kimi_prompt.RELEASES has what differs elsewhere.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.records import Message, Tool
from eyas.tokens.codecs import ReplyParts, kimi_prompt, kimi_reply
from eyas.tokens.codecs.chatml import compile_template, template_of
from eyas.tokens.codecs.kimi_prompt import (
    ARGUMENTS,
    CALL,
    CALL_END,
    IM_END,
    MIDDLE,
    RELEASES,
    SECTION,
    SECTION_END,
    THINK,
    THINK_END,
    Release,
)
from eyas.tokens.codecs.kimi_tokenizer import KimiTokenizer, load_tokenizer
from eyas.tokens.codecs.kimi_tools import declare_tools
from eyas.tokens.codecs.replies import IMPLICIT_THINK_END, is_json

log = logging.getLogger("eyas")
_ASKED = {"role": "user", "content": "eyas asks"}
_CALLED = kimi_reply.call_of("functions.eyas:0", "{}")
_PROBE: tuple[Message, ...] = (
    *(_ASKED, {"role": "assistant", "content": "eyas says", "reasoning_content": "so"}, _ASKED),
    {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [_CALLED]},
    {"role": "tool", "content": "eyas hears", "tool_call_id": _CALLED["id"]},
)
_TOOL: Tool = {"type": "function", "function": {"name": "eyas", "parameters": {"type": "object"}}}
_PROBES: tuple[tuple[tuple[Message, ...], tuple[Tool, ...]], ...] = (
    (_PROBE, ()),
    (({"role": "system", "name": "falcon", "content": "eyas rules"}, *_PROBE), (_TOOL,)),
)
_FINISHED = ("stop", "tool_calls")
_MARKUP = (THINK_END, SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END)
NEEDED = (*_MARKUP, "<|im_user|>", "<|im_assistant|>", "<|im_system|>", MIDDLE, IM_END, THINK)


class Kimi:
    """The codec of one target folder; see `Codec` for its methods.

    Prompts are encoded with special tokens parsed, as engines do; replies are encoded part by part
    without, so that a literal `<think>` in prose stays text. Special tokens always end a word, so
    parts encoded apart are the whole encoded at once.
    """

    def __init__(self, tokenizer: KimiTokenizer, release: Release) -> None:
        markup = _MARKUP if release.opens_thinking else (THINK, *_MARKUP)
        self._tokenizer = tokenizer
        self._release = release
        self._id = tokenizer.ids
        self.stop_ids: tuple[int, ...] = (self._id[IM_END],)
        self.markup_ids = frozenset(self._id[token] for token in markup)
        self.special_ids = frozenset(self._id.values()) - self.markup_ids
        self.vocab_size = tokenizer.size
        self.bytes_of, self.id_of = tokenizer.bytes_of, tokenizer.id_of

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of the whole chat prompt, the header of the reply included.

        Raises: EyasError for content that is not text.
        """
        return self._tokenizer.encode(kimi_prompt.render_prompt(messages, tools, self._release))

    def normalise(self, reply: ReplyParts) -> ReplyParts:
        """Return a reply with its parts where the target wrote them; what changed is flagged."""
        return kimi_reply.normalise(reply, thinking=self._release.thinking)

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        """Return the ids of a normalised reply, `<|im_end|>` at its end unless it was cut.

        Raises: EyasError for reasoning where the prompt has closed it, or a call without arguments.
        """
        finished = finish_reason in _FINISHED
        ids = self._thought(reply, finished=finished)
        ids += self._tokenizer.encode_plain(reply.content or "")
        ids += self._called(reply.tool_calls, finished=finished)
        return [*ids, *self.stop_ids] if finished else ids

    def _thought(self, reply: ReplyParts, *, finished: bool) -> list[int]:
        """Return the ids of the reasoning, closed if anything shows that it had ended."""
        if not self._release.thinking:
            if reply.reasoning:
                raise EyasError("codec kimi: expected no reasoning with thinking off, got some")
            return []
        opening = [] if self._release.opens_thinking else [self._id[THINK]]
        ids = [*opening, *self._tokenizer.encode_plain(reply.reasoning or "")]
        ended = bool(reply.content or reply.tool_calls or finished)
        implicit = IMPLICIT_THINK_END in reply.flags
        return [*ids, self._id[THINK_END]] if ended and not implicit else ids

    def _called(self, calls: Sequence[Mapping[str, Any]], *, finished: bool) -> list[int]:
        """Return the ids of the tool section; it stays open where it was cut inside arguments."""
        if not calls:
            return []
        encode, last = self._tokenizer.encode_plain, ""
        ids = [self._id[SECTION]]
        for call in calls:
            last = kimi_prompt.arguments_text(call)
            ids += [self._id[CALL], *encode(str(call.get("id")))]
            ids += [self._id[ARGUMENTS], *encode(last), self._id[CALL_END]]
        return [*ids, self._id[SECTION_END]] if finished or is_json(last) else ids[:-1]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, markers included."""
        return self._tokenizer.decode(ids)

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        """Return the parts of a sampled reply; what has no place is kept as text."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.stop_ids else list(ids)
        if not self._release.thinking:
            return self._parse_answer(kept, None, ())
        if kept[:1] == [self._id[THINK]] and not self._release.opens_thinking:
            kept = kept[1:]
        for marker, flags in ((THINK_END, ()), (SECTION, (IMPLICIT_THINK_END,))):
            if self._id[marker] in kept:
                end = kept.index(self._id[marker])
                rest = kept[end + 1 :] if marker == THINK_END else kept[end:]
                return self._parse_answer(rest, self._tokenizer.decode(kept[:end]), flags)
        return ReplyParts(content=None, reasoning=self._tokenizer.decode(kept))

    def _parse_answer(
        self, ids: list[int], reasoning: str | None, flags: tuple[str, ...]
    ) -> ReplyParts:
        start = ids.index(self._id[SECTION]) if self._id[SECTION] in ids else len(ids)
        calls = self._parse_calls(ids[start:])
        content = self._tokenizer.decode(ids if calls is None else ids[:start])
        return ReplyParts(content=content, reasoning=reasoning, tool_calls=calls or (), flags=flags)

    def _parse_calls(self, ids: list[int]) -> tuple[dict[str, Any], ...] | None:
        """Return the calls of a section that is the last thing said, or None.

        A section that was cut has its last call as far as it was said.
        """
        if not ids:
            return ()
        is_whole = ids[-1] == self._id[SECTION_END]
        before, *parts = _split(ids[1:-1] if is_whole else ids[1:], self._id[CALL])
        calls = []
        for number, part in enumerate(parts, start=1):
            is_cut = not is_whole and number == len(parts)
            if part[-1:] == [self._id[CALL_END]]:
                part = part[:-1]
            elif not is_cut:
                return None
            pieces = _split(part, self._id[ARGUMENTS])
            if before or (len(pieces) != 2 and not (is_cut and len(pieces) == 1)):
                return None
            identity, arguments = map(self._tokenizer.decode, (*pieces, [])[:2])
            calls.append(kimi_reply.call_of(identity, arguments))
        return tuple(calls) or (None if before or is_whole else ())

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        """Return the markers of a reply if they do not follow one another as they must, or None."""
        names = {self._id[token]: token for token in (THINK, *_MARKUP)}
        return kimi_reply.order_fault(
            [names[i] for i in ids if i in names],
            opens=not self._release.opens_thinking,
            thinking=self._release.thinking,
            is_cut=is_cut,
        )

    def has_special_text(self, text: str) -> bool:
        """Tell whether text spells a special token, which encoding would turn into a real one."""
        return self._tokenizer.spells_special(text)


def load_kimi(folder: Path, release: str) -> Kimi:
    """Read the tokenizer of a target folder.

    Raises: EyasError if a file is missing, not a Kimi target's, or of another release.
    """
    codec = Kimi(load_tokenizer(folder, NEEDED), RELEASES[release])
    check_template(folder, release)
    return codec


def check_template(folder: Path, name: str) -> None:
    """Hold the folder's own template against the codec, where there is one, in two chats.

    Raises: EyasError if they differ: the target is another release, or its template has changed.
    """
    config, release = read_json(folder / "tokenizer_config.json"), RELEASES[name]
    if not (config.get("chat_template") or (folder / "chat_template.jinja").is_file()):
        return
    known = " | ".join(sorted(RELEASES))
    kwargs: dict[str, object] = {
        "thinking": release.thinking,
        "preserve_thinking": release.keeps_history_reasoning,
    }
    for messages, tools in _PROBES:
        if tools:
            kwargs |= {"tools": list(tools), "tools_ts_str": declare_tools(tools, typescript=True)}
        try:
            template, _ = compile_template(template_of(folder, config))
            text = template.render(messages=messages, add_generation_prompt=True, **kwargs)
        except (EyasError, TemplateError, TypeError) as error:
            log.warning("%s: a chat template not to be held against %s (%s)", folder, name, error)
            return
        if text != kimi_prompt.render_prompt(messages, tools, release):
            raise EyasError(
                f"{folder}: its chat template writes other prompts than codec {name}: {text!r}",
                hint=f"another release ({known}), or one that is new to eyas",
            )


def _split(ids: Sequence[int], separator: int) -> list[list[int]]:
    """Split ids at every separator, as str.split does."""
    parts: list[list[int]] = [[]]
    for i in ids:
        if i == separator:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts
