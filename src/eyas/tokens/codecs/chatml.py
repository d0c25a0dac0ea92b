"""ChatML targets (SmolLM2 and its like): the folder's own template, a byte-level tokenizer.

Reads: tokenizer.json, tokenizer_config.json, chat_template.jinja of a Hugging Face folder.
Source: transformers' apply_chat_template, whose Jinja environment is set up here alike: importing
transformers takes longer than a stage of a small data set. A test holds the renderings equal.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.records import Message, Tool
from eyas.tokens.codecs import ReplyParts

END_OF_TURN = "<|im_end|>"
_FINISHED = ("stop", "tool_calls")
_HINT = "build the target again with `dvc repro -f -s target`"
_TOOLS_HEADER = "You can call these functions. To call one, answer with JSON: name, arguments."
_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatML:
    """The codec of one target folder; see `Codec` for its methods.

    A template that knows no `tools` gets them declared in the system message, as text and JSON;
    one that knows no `tool_calls` gets the calls of earlier turns as JSON in their content. The
    local endpoint renders with this codec as well, so both sides agree.
    Prompts are encoded with special tokens parsed, as engines do; replies are encoded without, so
    that a literal `<|im_end|>` in prose stays text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, variables: Mapping[str, str]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._template, names = _compile(template)
        self._knows_tools = "tools" in names
        self._knows_calls = "tool_calls" in template
        self._spelled = re.compile("|".join(re.escape(t.content) for t in added.values()))
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.markup_ids: frozenset[int] = frozenset()
        self.stop_ids = tuple(i for i, t in added.items() if t.content == END_OF_TURN)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of the whole chat prompt, the header of the reply included."""
        text = self.render_text(messages, tools)
        return _encode(self._tokenizer, text)

    def render_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the prompt as text.

        Raises: EyasError where the template refuses the messages.
        """
        turns = [_as_text(message, keep_calls=self._knows_calls) for message in messages]
        if tools and not self._knows_tools:
            turns = _declare_tools(turns, tools)
        declared = list(tools) or None
        try:
            return self._template.render(
                messages=turns, tools=declared, add_generation_prompt=True, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise EyasError(f"chat template: refuses these messages ({error})") from None

    def normalise(self, reply: ReplyParts) -> ReplyParts:
        """Return the reply as it is: a server has nothing to take apart in plain text."""
        return reply

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        """Return the ids of a reply; they end with `<|im_end|>` unless it was cut.

        Raises: EyasError for reasoning or parsed calls: how the target spelled them is not known.
        """
        if reply.reasoning or reply.tool_calls:
            part = "reasoning" if reply.reasoning else "tool_calls"
            raise EyasError(f"codec chatml: expected a reply of text alone, got {part}")
        text = reply.content or ""
        tokenizer = self._literal if self.has_special_text(text) else self._tokenizer
        ids = _encode(tokenizer, text)
        return [*ids, *self.stop_ids] if finish_reason in _FINISHED else ids

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        """Return the text of a sampled reply, its end-of-turn id taken off, nothing else lost."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.stop_ids else list(ids)
        return ReplyParts(content=self.decode(kept))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, markers included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        """Return None: a reply of text alone has no markers."""
        return None

    def has_special_text(self, text: str) -> bool:
        """Tell whether text spells an added token, which encoding would turn into a real one."""
        return self._spelled.search(text) is not None

    @functools.cached_property
    def _literal(self) -> Tokenizer:
        """Return the same tokenizer with special tokens taken as text; few replies need it."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer


def load_chatml(folder: Path) -> ChatML:
    """Read tokenizer and template of a target folder.

    Raises: EyasError if either is missing or broken, or the tokenizer has no `<|im_end|>`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EyasError(f"{path}: no such file", hint=_HINT)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise EyasError(f"{path}: not a tokenizer ({error})", hint=_HINT) from None
    config = read_json(folder / "tokenizer_config.json", hint=_HINT)
    variables = {name: _spelling(config[name]) for name in _VARIABLES if config.get(name)}
    codec = ChatML(tokenizer, _template_of(folder, config), variables)
    if not codec.stop_ids:
        raise EyasError(f"{path}: no special token {END_OF_TURN}", hint="this target is not ChatML")
    return codec


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of text, a third faster than `encode`, which keeps every token's place too."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _template_of(folder: Path, config: Mapping[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    template = beside.read_text("utf-8") if beside.is_file() else config.get("chat_template")
    if not isinstance(template, str) or not template:
        raise EyasError(
            f"{folder}: a target without a chat template",
            hint="take the instruction-tuned model; a base model cannot be asked",
        )
    return template


def _spelling(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _compile(template: str) -> tuple[Template, set[str]]:
    """Return the template and the names that it expects to be given."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
        return environment.from_string(template, globals={"raise_exception": _refuse}), names
    except TemplateError as error:
        raise EyasError(f"chat template: does not compile ({error})", hint=_HINT) from None


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _as_text(message: Message, *, keep_calls: bool) -> Message:
    """Return the message with text as content: parts joined, calls added unless `keep_calls`."""
    content = message.get("content") or ""
    if isinstance(content, list | tuple):
        content = "".join(part.get("text", "") for part in content)
    turn = message | {"content": content}
    if keep_calls or not turn.get("tool_calls"):
        return turn
    calls: Sequence[dict[str, Any]] = turn.pop("tool_calls")
    lines = [_sorted_json(call.get("function", call)) for call in calls]
    return turn | {"content": "\n".join([content, *lines] if content else lines)}


def _declare_tools(turns: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools' JSON into the system message, which is made if there is none."""
    text = "\n".join([_TOOLS_HEADER, *(_sorted_json(tool.get("function", tool)) for tool in tools)])
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _sorted_json(value: object) -> str:
    """Serialise without regard to the order of keys: a proxy may change it on the way."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
