"""ChatML targets (SmolLM2, Qwen3 and their like): the folder's own template and tokenizer.

Reads: tokenizer.json, tokenizer_config.json, chat_template.jinja of a Hugging Face folder.
Source: transformers' apply_chat_template, whose Jinja environment is set up here alike: importing
transformers takes longer than a stage of a small data set. A test holds the renderings equal. Left
out is `strftime_now` (a prompt of today is none of tomorrow) and the tag `generation`.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.records import Message, Tool
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.byte_level import bytes_by_id, id_by_bytes
from eyas.tokens.codecs.chatml_reply import CALL, END_OF_TURN, MARKERS, learn_grammar
from eyas.tokens.codecs.kimi_prompt import THINK, THINK_END, text_of
from eyas.tokens.codecs.replies import (
    IMPLICIT_THINK_END,
    is_json,
    with_reasoning_split,
    without_endings,
)

_ENDINGS = (END_OF_TURN, "<|endoftext|>")
_FINISHED = ("stop", "tool_calls")
_HINT = "build the target again with `dvc repro -f -s target`"
_TOOLS_HEADER = "You can call these functions. To call one, answer with JSON: name, arguments."
_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatML:
    """The codec of one target folder; see `Codec` for its methods.

    A template that knows no `tools` gets them declared in the system message, as text and JSON;
    one that knows no `tool_calls` gets the calls of earlier turns as JSON in their content. The
    local endpoint renders with this codec as well, so both sides agree.
    Prompts are encoded with special tokens parsed, as engines do; replies are encoded part by part
    without, so that a literal `<|im_end|>` in prose stays text. The glue between the parts is the
    template's. A target whose tokenizer has no `<think>` or `<tool_call>` writes these as text.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, variables: Mapping[str, str | bool]
    ) -> None:
        added = tokenizer.get_added_tokens_decoder()
        ids = {token.content: i for i, token in added.items()}
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._template, names = compile_template(template)
        if "enable_thinking" in variables and "enable_thinking" not in names:
            raise EyasError("chat template: knows no `enable_thinking`", hint="take codec: chatml")
        self._knows_tools = "tools" in names
        self._knows_calls = "tool_calls" in template
        self._spelled = re.compile("|".join(map(re.escape, ids)))
        self._markers = {token: ids[token] for token in MARKERS if token in ids}
        self._glued = re.compile(f"({'|'.join(map(re.escape, self._markers)) or '(?!)'})")
        self.markup_ids: frozenset[int] = frozenset(self._markers.values())
        self.special_ids: frozenset[int] = frozenset(added) - self.markup_ids
        self.stop_ids: tuple[int, ...] = (ids[END_OF_TURN],) if END_OF_TURN in ids else ()
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._rendered([{"role": "user", "content": "eyas asks"}], True)  # a broken one fails here
        self._grammar = learn_grammar(self._rendered, thinks=THINK in ids, calls=self._knows_calls)
        self._thinks = self._grammar.opening is not None and {THINK, THINK_END} <= ids.keys()

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of the whole chat prompt, the header of the reply included."""
        return _encode(self._tokenizer, self.render_text(messages, tools))

    def render_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the prompt as text.

        Raises: EyasError where the template refuses the messages.
        """
        turns = [_as_text(message, keep_calls=self._knows_calls) for message in messages]
        if tools and not self._knows_tools:
            turns = _declare_tools(turns, tools)
        return self._rendered(turns, True, list(tools) or None)

    def _rendered(
        self, turns: Sequence[Message], opens_reply: bool, tools: list[Tool] | None = None
    ) -> str:
        try:
            return self._template.render(
                messages=turns, tools=tools, add_generation_prompt=opens_reply, **self._variables
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise EyasError(f"chat template: refuses these messages ({error})") from None

    def normalise(self, reply: ReplyParts) -> ReplyParts:
        """Return a reply with its parts where the target wrote them; what changed is flagged.

        Calls whose markers are plain text to the tokenizer are left in it: the ids are the same.
        """
        reply = without_endings(reply, _ENDINGS)
        if self._grammar.opening is not None:
            reply = with_reasoning_split(reply)
        return self._grammar.with_calls_lifted(reply) if CALL in self._markers else reply

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        """Return the ids of a normalised reply, `<|im_end|>` at its end unless it was cut.

        Raises: EyasError for reasoning or calls where the template has no place for them.
        """
        grammar, finished = self._grammar, finish_reason in _FINISHED
        for part, place in (("reasoning", grammar.opening), ("tool_calls", grammar.call)):
            if getattr(reply, part) and place is None:
                raise EyasError(f"codec chatml: the template has no place for {part} in a reply")
        ids, text = list[int](), ""
        for piece, is_glue in grammar.pieces(reply, finished=finished):
            first, *rest = self._glued.split(piece) if is_glue else (piece,)
            text += first
            for marker, after in zip(rest[::2], rest[1::2], strict=True):
                ids += [*self._literally(text), self._markers[marker]]
                text = after
        ids += self._literally(text)
        return [*ids, *self.stop_ids] if finished else ids

    def _literally(self, text: str) -> list[int]:
        return _encode(self._literal if self.has_special_text(text) else self._tokenizer, text)

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        """Return the parts of a sampled reply; what has no place is kept as text."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.stop_ids else list(ids)
        reasoning, flags = None, ()
        opened = self._thinks and kept[:1] == [self._markers[THINK]]
        if opened or (self._thinks and not self._grammar.opening):
            kept = kept[opened:]
            ends = [m for m in (THINK_END, CALL) if self._markers.get(m) in kept]
            if not ends:
                return ReplyParts(content=None, reasoning=self.decode(kept))
            at = kept.index(self._markers[ends[0]])
            reasoning = self.decode(kept[:at])
            kept = kept[at + (ends[0] == THINK_END) :]
            flags = () if ends[0] == THINK_END else (IMPLICIT_THINK_END,)
        at = kept.index(self._markers[CALL]) if self._markers.get(CALL) in kept else len(kept)
        calls = self._grammar.calls_of(self.decode(kept[at:]))
        content = self.decode(kept if calls is None else kept[:at])
        return ReplyParts(content=content, reasoning=reasoning, tool_calls=calls or (), flags=flags)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, markers included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty if the tokenizer is not a byte-level one."""
        return self._bytes.get(token, b"")

    def id_of(self, token: bytes) -> int | None:
        """Return the one id that has these bytes, or None."""
        return self._ids.get(token)

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        return bytes_by_id(self._tokenizer)

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return id_by_bytes(self._bytes)

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        """Return the markers of a reply if they do not follow one another as they must, or None.

        Those that the tokenizer has not are written as text, which is not looked into.
        """
        if not self._markers:
            return None
        grammar = (
            self._grammar if THINK_END in self._markers else replace(self._grammar, opening=None)
        )
        names = {i: token for token, i in self._markers.items()}
        return grammar.order_fault([names[i] for i in ids if i in names], is_cut=is_cut)

    def has_special_text(self, text: str) -> bool:
        """Tell whether text spells an added token, which encoding would turn into a real one."""
        return self._spelled.search(text) is not None

    @functools.cached_property
    def _literal(self) -> Tokenizer:
        """Return the same tokenizer with added tokens taken as text; few replies need it."""
        bare = json.loads(self._tokenizer.to_str()) | {"added_tokens": []}
        return Tokenizer.from_str(json.dumps(bare))


def load_chatml(folder: Path, *, thinking: bool = True) -> ChatML:
    """Read tokenizer and template of a target folder; `thinking` off tells the template so.

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
    given = {name: _spelling(config[name]) for name in _VARIABLES if config.get(name)}
    variables: dict[str, str | bool] = {**given, **({} if thinking else {"enable_thinking": False})}
    codec = ChatML(tokenizer, template_of(folder, config), variables)
    if not codec.stop_ids:
        raise EyasError(f"{path}: no special token {END_OF_TURN}", hint="this target is not ChatML")
    return codec


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of text, a third faster than `encode`, which keeps every token's place too.

    Raises: EyasError for a lone surrogate, which no token spells.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EyasError(f"codec chatml: a lone surrogate in the text ({error})") from None
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def template_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the chat template of a Hugging Face folder.

    Raises: EyasError if it has none.
    """
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


def compile_template(template: str) -> tuple[Template, set[str]]:
    """Return the template and the names that it expects to be given.

    Raises: EyasError if it is none.
    """
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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _as_text(message: Message, *, keep_calls: bool) -> Message:
    """Return the message with text as content: parts joined, calls added unless `keep_calls`."""
    content = text_of(message.get("content"), str(message.get("role")))
    turn = message | {"content": content}
    if not turn.get("tool_calls"):
        return turn
    if keep_calls:
        return turn | {"tool_calls": [_with_object(call) for call in turn["tool_calls"]]}
    calls: Sequence[dict[str, Any]] = turn.pop("tool_calls")
    lines = [_sorted_json(call.get("function", call)) for call in calls]
    return turn | {"content": "\n".join([content, *lines] if content else lines)}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as an object, as engines hand them to the template."""
    function = call.get("function")
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(given, str) or not is_json(given):
        return call
    return call | {"function": function | {"arguments": json.loads(given)}}


def _declare_tools(turns: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools' JSON into the system message, which is made if there is none."""
    text = "\n".join([_TOOLS_HEADER, *(_sorted_json(tool.get("function", tool)) for tool in tools)])
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _sorted_json(value: object) -> str:
    """Serialise without regard to the order of keys: a proxy may change it on the way."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
