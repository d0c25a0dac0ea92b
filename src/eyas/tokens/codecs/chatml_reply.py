r"""How a ChatML target writes reasoning and tool calls, told by its own template. Pure.

A finished turn with words of ours is rendered once; what the template puts around them is the glue
of every reply. Qwen3's, after a prompt that ends with `<|im_start|>assistant\n`:

| around           | glue                                                           |
|------------------|----------------------------------------------------------------|
| reasoning        | `<think>\n` (nothing if the prompt opens it), `\n</think>\n\n` |
| call             | `\n` if anything but reasoning stands before it                |
| name, arguments  | `<tool_call>\n{"name": "`, `", "arguments": `, `}\n</tool_call>` |

A turn without reasoning may have an empty thought; servers hand out none, so it is written anew.
A border that an engine has left newlines at is taken as sampled, a bare one gets the glue's.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.errors import EyasError
from eyas.records import Message
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.kimi_prompt import THINK, THINK_END, arguments_text
from eyas.tokens.codecs.replies import (
    IMPLICIT_THINK_END,
    MALFORMED_TOOL_CALLS,
    RAW_TOOL_CALLS,
    is_json,
)

CALL, CALL_END, END_OF_TURN = "<tool_call>", "</tool_call>", "<|im_end|>"
MARKERS = {THINK: "T", THINK_END: "t", CALL: "C", CALL_END: "E"}
Piece = tuple[str, bool]  # text, and whether markers in it are real ones
Calls = tuple[dict[str, Any], ...]
_ASKED: Message = {"role": "user", "content": "eyas asks"}
_THOUGHT, _SAID, _NAMES = "eyas thinks", "eyas says", ("eyas_one", "eyas_two")
_CALLS = [{"type": "function", "function": {"name": n, "arguments": {n: 1}}} for n in _NAMES]
_ORDERS = {None: ("(CE)*", "(CE)*C?"), "": ("t(CE)*|(CE)+", "t?(CE)*C?")}
_OWN_ORDER = ("(Tt)?(CE)*|T(CE)+", "(Tt?)?(CE)*C?")  # of targets that write <think> themselves
_BLOCK = re.compile(rf"{CALL}((?:(?!</?tool_call>).)*){CALL_END}\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The glue of a target's replies; None for parts that it has no place for."""

    opening: str | None = None  # before reasoning; empty where the prompt ends with it
    closing: str = ""
    call: tuple[str, str, str] | None = None  # before the name, between, after the arguments
    joint: str = ""  # before a call that follows content or another call
    empty: str = ""  # an empty thought, sampled before words that none precedes

    def pieces(self, reply: ReplyParts, *, finished: bool) -> Iterator[Piece]:
        """Yield the texts of a reply and the glue around them, up to where it was cut."""
        content, thought = reply.content or "", reply.reasoning or ""
        if self.opening is not None and (thought or not self.opening):
            yield (self.opening.rstrip("\n") if thought[:1] == "\n" else self.opening), True
            yield thought, False
            if (content or reply.tool_calls or finished) and IMPLICIT_THINK_END not in reply.flags:
                closing = self.closing.lstrip("\n") if thought[-1:] == "\n" else self.closing
                yield (closing.rstrip("\n") if content[:1] == "\n" else closing), True
        elif self.empty and (content or reply.tool_calls) and IMPLICIT_THINK_END not in reply.flags:
            yield (self.empty.rstrip("\n") if content[:1] == "\n" else self.empty), True
        yield content, False
        joint = "" if content[-1:] in ("", "\n") else self.joint
        for number, call in enumerate(reply.tool_calls, start=1):
            yield joint, True
            yield from self._call(call, closed=finished or number < len(reply.tool_calls))
            joint = "" if "raw" in call else self.joint

    def _call(self, call: dict[str, Any], *, closed: bool) -> Iterator[Piece]:
        """Yield a call; one that was cut inside its arguments stays open."""
        if "raw" in call:
            yield call["raw"], True
        elif self.call:
            text, name = arguments_text(call), call["function"].get("name")
            if not isinstance(name, str):
                raise EyasError(f"tool_calls: expected a function with a name, got {call!r}")
            yield from ((self.call[0], True), (name, False))
            yield from ((self.call[1], True), (text, False))
            if closed or is_json(text):
                yield self.call[2], True

    def with_calls_lifted(self, reply: ReplyParts) -> ReplyParts:
        """Take whole calls at the end of the last text out of it; any others are only flagged."""
        before, call, rest = (reply.content or reply.reasoning or "").partition(CALL)
        if not call and CALL not in (reply.reasoning or ""):
            return reply
        calls = self.calls_of(call + rest) if not reply.tool_calls else None
        if not calls:
            return replace(reply, flags=(*reply.flags, MALFORMED_TOOL_CALLS))
        lifted = replace(reply, tool_calls=calls, flags=(*reply.flags, RAW_TOOL_CALLS))
        if reply.content:
            return replace(lifted, content=before)
        return replace(lifted, reasoning=before, flags=(*lifted.flags, IMPLICIT_THINK_END))

    def calls_of(self, section: str) -> Calls | None:
        """Return the calls of a text that is nothing else, or None.

        Calls that are spelled otherwise than the template would keep their text, as `raw`.
        """
        blocks = list(_BLOCK.finditer(section))
        calls = [c for i, block in enumerate(blocks) if (c := self._parsed(block[1], i))]
        whole = "".join(block[0] for block in blocks) == section
        if self.call is None or len(calls) < len(blocks) or not whole:
            return None
        bare = ReplyParts(content=None, tool_calls=tuple(calls), flags=(IMPLICIT_THINK_END,))
        if "".join(text for text, _ in self.pieces(bare, finished=True)) == section:
            return bare.tool_calls
        return tuple(c | {"raw": b[0]} for c, b in zip(calls, blocks, strict=True))

    def _parsed(self, body: str, number: int) -> dict[str, Any] | None:
        """Return what stands between the markers of a call in OpenAI's form, None if no call."""
        start, between, after = map(re.escape, self.call or ("", "", ""))
        whole = re.fullmatch(
            f'{start}([^"]*){between}(.*){after}', CALL + body + CALL_END, re.DOTALL
        )
        name, text = whole.groups() if whole else (None, "")
        if is_json(body):
            value = json.loads(body)
            name = value.get("name") if isinstance(value, dict) else None
            if isinstance(name, str) and not is_json(text):
                text = json.dumps(value.get("arguments", {}), ensure_ascii=False)
        if not isinstance(name, str):
            return None
        function = {"name": name, "arguments": text}
        return {"id": f"call_{number}", "type": "function", "function": function}

    def order_fault(self, markers: Sequence[str], *, is_cut: bool) -> str | None:
        """Return the markers where they do not follow one another as they must, or None."""
        word = "".join(MARKERS[marker] for marker in markers)
        if re.fullmatch(_ORDERS.get(self.opening, _OWN_ORDER)[is_cut], word):
            return None
        return f"out of order or not closed: {' '.join(markers) or f'no {THINK_END}'}"


def learn_grammar(
    render: Callable[[Sequence[Message], bool], str], *, thinks: bool, calls: bool
) -> Grammar:
    """Return the glue of a template, which renders messages and, where asked to, opens a reply.

    `thinks`: the tokenizer has `<think>`; `calls`: the template speaks of tool calls.
    """

    def around(words: Sequence[str], **said: Any) -> tuple[str, list[str]]:
        """Return what the prompt alone has, and the parts of a finished turn between the words."""
        try:
            prompt = render([_ASKED], True)
            text = render([_ASKED, {"role": "assistant", **said}], False)
        except EyasError:  # a template that refuses such a turn has no place for it
            return "", []
        pairs = zip(prompt, text, strict=False)
        at = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        tag = prompt.rfind("<", 0, at)  # `<think>` and `<tool_call>` begin alike
        at = tag if tag >= 0 and ">" not in prompt[tag:at] else at
        glue = re.split("|".join(map(re.escape, words)), text[at:].partition(END_OF_TURN)[0])
        return prompt[at:], glue if len(glue) == len(words) + 1 else []

    tail, thought = around((_THOUGHT, _SAID), content=_SAID, reasoning_content=_THOUGHT)
    opening, closing = thought[:2] if thought else (None, "")
    if THINK_END in tail:  # thinking is off: the prompt has closed it
        opening, closing = None, ""
    elif (
        thinks and not thought
    ):  # assumption: a template that leaves out all reasoning stands for Qwen3's glue
        opening, closing = "" if THINK in tail else f"{THINK}\n", f"\n{THINK_END}\n\n"
    bare = around((_SAID,), content=_SAID)[1] if opening else []
    empty = bare[0] if bare and THINK_END in bare[0] else ""
    words = [word for name in _NAMES for word in (name, json.dumps({name: 1}))]
    glue = around(words, content="", tool_calls=_CALLS)[1] if calls else []
    start = CALL + glue[0].rpartition(CALL)[2] if glue else ""
    joint = glue[2].removeprefix(glue[4]).removesuffix(start) if glue else ""
    fits = bool(glue) and [glue[1], glue[2]] == [glue[3], glue[4] + joint + start]
    call = (start, glue[1], glue[4]) if fits else None
    return Grammar(opening=opening, closing=closing, call=call, joint=joint, empty=empty)
