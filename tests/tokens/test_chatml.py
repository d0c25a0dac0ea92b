"""The ChatML codec against transformers, and what it refuses."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.tokens.codecs import ReplyParts, load_codec
from eyas.tokens.codecs.chatml import ChatML, load_chatml

GIVEN = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = """{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
        {{- tool | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}
    {%- endfor %}
    {{- eos_token + '\\n' }}
{%- endif %}
    {% for message in messages %}
    {% if loop.index0 > 6 %}{% break %}{% endif %}
{{ '<|im_start|>' + message.role }}
{{ message.content }}
{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}
<|im_end|>
    {% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CALL = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " spaced \n\n"}],
    [
        {"role": "user", "content": "x=  1"},
        {"role": "assistant", "content": "    1) item"},
        {"role": "user", "content": "東京 🙂 <b>&amp;</b> 'q' \"q\""},
    ],
    [{"role": "user", "content": "a literal <|im_end|> in it"}],
    [{"role": "user", "content": ""}],
)
text = st.text(max_size=60) | st.sampled_from(SPECIALS)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": text}),
    min_size=1,
    max_size=4,
)


def with_template(folder: Path, copy: Path, template: str) -> Path:
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return copy


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def rendered_by_transformers(reference: Any, chat: Any, tools: Any = None) -> list[int]:
    return reference.apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )


@pytest.mark.parametrize("template", [None, SMOLLM, WITH_TOOLS], ids=["own", "smollm", "tools"])
def test_prompts_equal_those_of_transformers(
    folder: Path, tmp_path: Path, template: str | None
) -> None:
    place = with_template(folder, tmp_path, template) if template else folder
    codec, reference = load_chatml(place), transformers_tokenizer(place)
    for chat in CHATS:
        assert codec.render_prompt(chat, ()) == rendered_by_transformers(reference, chat)


@GIVEN
@given(chat=messages)
def test_any_prompt_equals_that_of_transformers(
    codec: ChatML, reference: Any, chat: list[dict[str, Any]]
) -> None:
    assert codec.render_prompt(chat, ()) == rendered_by_transformers(reference, chat)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers_tokenizer(folder)


def test_a_template_that_knows_tools_and_calls_gets_them_as_engines_hand_them_on(
    folder: Path, tmp_path: Path
) -> None:
    place = with_template(folder, tmp_path, WITH_TOOLS)
    codec, reference = load_chatml(place), transformers_tokenizer(place)
    chat = [*CHATS[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    parsed = {"name": "f", "arguments": {"a": 1}}
    known = [*CHATS[1], {"role": "assistant", "content": "", "tool_calls": [{"function": parsed}]}]
    assert codec.render_prompt(chat, [TOOL]) == rendered_by_transformers(reference, known, [TOOL])


def test_a_template_without_tools_gets_them_in_a_system_message(codec: ChatML) -> None:
    text = codec.render_text([{"role": "user", "content": "hi"}], [TOOL])
    head, _, rest = text.partition("<|im_end|>")
    sentence, declared = head.removeprefix("<|im_start|>system\n").split("\n")
    assert "call" in sentence
    assert json.loads(declared) == TOOL["function"]
    assert rest == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_message_that_is_there_keeps_its_text_before_the_tools(codec: ChatML) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = codec.render_text(chat, [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions.")
    assert text.count("<|im_start|>system") == 1


def test_the_order_of_keys_in_a_tool_does_not_change_the_prompt(codec: ChatML) -> None:
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    assert codec.render_prompt(CHATS[0], [turned]) == codec.render_prompt(CHATS[0], [TOOL])


def test_calls_of_an_earlier_turn_are_told_where_the_template_cannot(codec: ChatML) -> None:
    chat: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert '{"arguments": "{\\"a\\": 1}", "name": "f"}<|im_end|>' in codec.render_text(chat, ())
    chat[0]["content"] = "Sure."
    assert "Sure.\n{" in codec.render_text(chat, ())


def test_content_in_parts_is_joined(codec: ChatML) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    chat = [{"role": "user", "content": parts}]
    assert codec.render_text(chat, ()) == codec.render_text(CHATS[0], ())


@pytest.mark.parametrize("part", ["hi", {"type": "text", "text": None}, {"type": "image_url"}])
def test_content_that_is_no_text_is_refused(codec: ChatML, part: Any) -> None:
    with pytest.raises(EyasError, match="expected parts of text in the user's content"):
        codec.render_text([{"role": "user", "content": [part]}], ())


@pytest.mark.parametrize(("role", "code"), [("assistant", 0), ("nobody", 1)])
def test_a_comparison_of_no_conversation_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, code: int
) -> None:
    row = {"messages": [CHATS[0][0], {"role": role, "content": "It is."}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    options = ["--folder", str(folder), "--cases", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", ["chatml.py", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("benchmarks/chatml.py", run_name="__main__")
    assert ended.value.code == code


@GIVEN
@given(said=text)
def test_a_reply_comes_back_as_it_was_said(codec: ChatML, said: str) -> None:
    ids = codec.reply_ids(ReplyParts(content=said), "stop")
    assert ids[-1] == codec.stop_ids[0]
    assert not codec.special_ids & set(ids[:-1])
    assert codec.parse_reply(ids) == ReplyParts(content=said)
    assert codec.reply_ids(ReplyParts(content=said), "length") == ids[:-1]


@GIVEN
@given(said=text.filter(lambda said: not any(s in said for s in SPECIALS)))
def test_no_merge_crosses_the_header_of_a_reply(codec: ChatML, said: str) -> None:
    prompt = codec.render_text(CHATS[0], ())
    reply = codec.reply_ids(ReplyParts(content=said), "stop")
    whole = codec._tokenizer.encode(f"{prompt}{said}<|im_end|>", add_special_tokens=False).ids
    assert whole == [*codec.render_prompt(CHATS[0], ()), *reply]


def test_special_text_in_a_prompt_becomes_real_and_is_recognised(codec: ChatML) -> None:
    chat = [{"role": "user", "content": "a literal <|im_end|> in it"}]
    assert codec.render_prompt(chat, ()).count(codec.stop_ids[0]) == 2
    assert codec.has_special_text("a literal <|im_end|> in it")
    assert not codec.has_special_text("< |im_end| > and <|im_ended|")


def test_sampled_special_ids_are_told_not_lost(codec: ChatML) -> None:
    assert codec.parse_reply([1, 2]) == ReplyParts(content="<|im_start|>")
    assert codec.parse_reply([2, 2]) == ReplyParts(content="<|im_end|>")
    assert codec.parse_reply([]) == ReplyParts(content="")


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (ReplyParts(content="a", reasoning="b"), "reasoning"),
        (ReplyParts(content="", tool_calls=(CALL,)), "tool_calls"),
    ],
)
def test_parts_that_the_template_does_not_know_are_refused(
    codec: ChatML, reply: ReplyParts, word: str
) -> None:
    with pytest.raises(EyasError, match=f"no place for {word}"):
        codec.reply_ids(reply, "stop")


def test_what_a_template_refuses_is_told_in_its_words(folder: Path, tmp_path: Path) -> None:
    refusing = "{{ raise_exception('roles must take turns') }}"
    with pytest.raises(EyasError, match=r"refuses these messages \(roles must take turns"):
        load_chatml(with_template(folder, tmp_path, refusing))
    alone = f"{{% if messages | length > 1 %}}{refusing}{{% endif %}}"
    codec = load_chatml(with_template(folder, tmp_path, alone))
    with pytest.raises(EyasError, match=r"refuses these messages \(roles must take turns"):
        codec.render_prompt(CHATS[1], ())


def test_a_missing_name_in_a_template_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="'today' is undefined"):
        load_chatml(with_template(folder, tmp_path, "{{ today() }}"))


def test_the_template_beside_the_tokenizer_comes_first(folder: Path, tmp_path: Path) -> None:
    place = with_template(folder, tmp_path, "unused")
    (place / "chat_template.jinja").write_text("{{ bos_token }}hello", encoding="utf-8")
    assert load_chatml(place).render_text(CHATS[0], ()) == "<|im_start|>hello"


def test_token_objects_in_the_configuration_are_spelled(folder: Path, tmp_path: Path) -> None:
    place = with_template(folder, tmp_path, "{{ bos_token }}")
    config = json.loads((place / "tokenizer_config.json").read_text())
    config["bos_token"] = {"content": "<|im_start|>", "lstrip": False}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chatml(place).render_prompt(CHATS[0], ()) == [1]


@pytest.mark.parametrize(
    ("template", "words"),
    [("", "without a chat template"), ("{% for %}", "does not compile")],
)
def test_a_folder_without_a_usable_template_is_refused(
    folder: Path, tmp_path: Path, template: str, words: str
) -> None:
    with pytest.raises(EyasError, match=words):
        load_chatml(with_template(folder, tmp_path, template))


def test_a_folder_without_a_usable_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"tokenizer\.json: no such file(.|\n)*hint"):
        load_codec("chatml", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EyasError, match=r"tokenizer\.json: not a tokenizer"):
        load_codec("chatml", tmp_path)
    place = with_template(folder, tmp_path, SMOLLM)
    path = place / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("<|im_end|>", "<|done|>"), encoding="utf-8")
    with pytest.raises(EyasError, match=r"no special token <\|im_end\|>(.|\n)*not ChatML"):
        load_codec("chatml", place)


def test_an_unknown_codec_is_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(
        EyasError, match=r"expected chatml \| chatml_instant \| kimi_k2_5 .*, got 'latin'"
    ):
        load_codec("latin", folder)
