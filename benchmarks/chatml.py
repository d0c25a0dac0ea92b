"""Compare the ChatML codec with transformers and with the template's own finished turns.

Every reply of the conversations of FILE is a case: its prompt's ids must be those of
`apply_chat_template`, and prompt + reply those of the finished chat that the template writes. The
reply is then handed on as engines do (texts stripped, arguments written anew, calls or reasoning
left raw) and must come back as the same ids. DIR is a Hugging Face folder; weights are not read.
Prints one JSON line, {"ok": n, "total": n, "failed": {check: [how many, where]}}; exits 1 if any
failed, or no row was a conversation. Replies without reasoning are not held against a finished
turn, where a template may write an empty thought. Two checks fail rightly: of a template that
leaves reasoning out, every finished turn; of texts that spell a marker, which stays text here.

Run: python benchmarks/chatml.py --folder DIR --cases FILE (of chat messages)
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from eyas.files import read_jsonl
from eyas.prompts.chat import messages_of, tools_of
from eyas.prompts.rows import RowError
from eyas.records import Message, Tool
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.chatml import ChatML, load_chatml
from eyas.tokens.codecs.replies import is_json

END = "<|im_end|>"


def main() -> None:
    """Read the arguments, compare every reply, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cases", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    codec, reference = (
        load_chatml(given.folder),
        PreTrainedTokenizerFast.from_pretrained(given.folder),
    )
    total, failed = 0, dict[str, list[Any]]()
    for number, row in enumerate(read_jsonl(given.cases), start=1):
        for name, holds in checks_of(row, codec, reference):
            total += 1
            if not holds:
                failed.setdefault(name, [0, f"line {number}"])[0] += 1
    ok = total - sum(found[0] for found in failed.values())
    print(json.dumps({"ok": ok, "total": total, "failed": failed}))
    sys.exit(1 if failed or not total else 0)


def checks_of(row: Any, codec: ChatML, reference: Any) -> Iterator[tuple[str, bool]]:
    """Yield the checks of every reply of a row; a row that is no conversation has none."""
    try:
        messages = messages_of(row.get("messages", row.get("conversations")))
        tools = tools_of(row.get("tools"))
    except RowError:
        return
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            yield from _checks(messages[:place], message, tools, codec, reference)


def _checks(
    before: tuple[Message, ...],
    reply: Message,
    tools: tuple[Tool, ...],
    codec: ChatML,
    reference: Any,
) -> Iterator[tuple[str, bool]]:
    def official(chat: list[Message], *, opens: bool) -> list[int]:
        return reference.apply_chat_template(
            chat, tools=list(tools) or None, add_generation_prompt=opens, return_dict=False
        )

    turns = [_for_template(message) for message in (*before, reply)]
    prompt = codec.render_prompt(before, tools)
    yield "prompt", prompt == official(turns[:-1], opens=True)
    parts = ReplyParts(
        content=reply["content"],
        reasoning=reply.get("reasoning_content"),
        tool_calls=tuple(turns[-1].get("tool_calls", ())),
    )
    ids = codec.reply_ids(parts, "stop")
    if parts.reasoning:
        finished = official(turns, opens=False)
        yield "finished turn", finished[: len(prompt) + len(ids)] == [*prompt, *ids]
    parsed = codec.parse_reply(ids)
    yield "round trip", codec.reply_ids(parsed, "stop") == ids
    for name, handed in _hands(parsed, codec.decode(ids[:-1])):
        yield name, codec.reply_ids(codec.normalise(handed), "stop") == ids


def _hands(parsed: ReplyParts, text: str) -> Iterator[tuple[str, ReplyParts]]:
    """Yield the reply as engines hand it out."""
    stripped = replace(
        parsed,
        content=(parsed.content or "").strip("\n") or None,
        reasoning=parsed.reasoning and parsed.reasoning.strip("\n"),
    )
    yield "texts stripped", stripped
    yield "all in the content", ReplyParts(content=text + END)
    if parsed.reasoning is not None:
        said = text.split("</think>", 1)[1] if "</think>" in text else ""
        yield "calls in the content", ReplyParts(content=said, reasoning=parsed.reasoning)


def _for_template(message: Message) -> Message:
    """Return a message as engines hand it to the template: text content, arguments as objects."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(text)}}
        for call in message.get("tool_calls", ())
        if is_json(text := call["function"]["arguments"])
    ]
    turn = message | {"content": message["content"] or ""}
    return turn | {"tool_calls": calls} if calls else turn


if __name__ == "__main__":
    main()
