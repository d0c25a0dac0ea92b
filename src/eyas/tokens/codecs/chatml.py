"""ChatML targets (SmolLM2 and its like): the folder's own template, a byte-level tokenizer.

Reads: tokenizer.json, tokenizer_config.json, chat_template.jinja of a Hugging Face folder.
Source: https://huggingface.co/docs/transformers/chat_templating (how the template is compiled).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.records import Message, Tool
from eyas.tokens.codecs import ReplyParts

END_OF_TURN = "<|im_end|>"
_FINISHED = ("stop", "tool_calls")
_HINT = "build the target again with `dvc repro -f -s target`"
_TOOLS_HEADER = "You can call these functions. To call one, answer with JSON: name, arguments.\n"


class ChatML:
    """The codec of one target folder; see `Codec` for its methods.

    A template that knows no `tools` gets them declared in the system message, as text and JSON.
    Prompts are encoded with special tokens parsed, as engines do; replies are encoded without, so
    that a literal `<|im_end|>` in prose stays text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, end_of_turn: int) -> None:
        self._tokenizer = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self._knows_tools = "tools" in template
        self._template = _environment().from_string(template)
        added = tokenizer.get_added_tokens_decoder()
        self._special_texts = tuple(token.content for token in added.values() if token.special)
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in added.items() if token.special
        )
        self.stop_ids: tuple[int, ...] = (end_of_turn,)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of the whole chat prompt, the header of the reply included."""
        text = self.render_text(messages, tools)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def render_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the prompt as text.

        Raises: EyasError where the template refuses the messages.
        """
        turns = [message | {"content": message.get("content") or ""} for message in messages]
        if tools and not self._knows_tools:
            turns = _declare_tools(turns, tools)
        try:
            return self._template.render(
                messages=turns, tools=list(tools) or None, add_generation_prompt=True
            )
        except TemplateError as error:
            raise EyasError(f"chat template: refuses these messages ({error})") from None

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        """Return the ids of a reply; they end with `<|im_end|>` unless it was cut."""
        ids = self._plain.encode(reply.content or "", add_special_tokens=False).ids
        return [*ids, *self.stop_ids] if finish_reason in _FINISHED else ids

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        """Return the text of a sampled reply, its end-of-turn id taken off, nothing else lost."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.stop_ids else list(ids)
        return ReplyParts(content=self._tokenizer.decode(kept, skip_special_tokens=False))

    def has_special_text(self, text: str) -> bool:
        """Tell whether text spells a special token, which encoding would turn into a real one."""
        return any(special in text for special in self._special_texts)


def load_chatml(folder: Path) -> ChatML:
    """Read tokenizer and template of a target folder.

    Raises: EyasError if either is missing, or the tokenizer has no `<|im_end|>`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EyasError(f"{path}: no such file", hint=_HINT)
    tokenizer = Tokenizer.from_file(str(path))
    end_of_turn = tokenizer.token_to_id(END_OF_TURN)
    if end_of_turn is None:
        raise EyasError(f"{path}: no token {END_OF_TURN}", hint="this target is not ChatML")
    return ChatML(tokenizer, _template_of(folder), end_of_turn)


def _template_of(folder: Path) -> str:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = read_json(folder / "tokenizer_config.json", hint=_HINT).get("chat_template")
    if not isinstance(template, str):
        raise EyasError(
            f"{folder}: a target without a chat template",
            hint="take the instruction-tuned model; a base model cannot be asked",
        )
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _declare_tools(turns: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools' JSON into the system message, which is made if there is none."""
    text = _TOOLS_HEADER + "\n".join(_to_json(tool["function"]) for tool in tools)
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
