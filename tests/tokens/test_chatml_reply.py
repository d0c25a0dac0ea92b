"""Reasoning and tool calls of ChatML targets, against the finished turns of their own templates."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from eyas.errors import EyasError
from eyas.records import Prompt, Response, Sample, Violation
from eyas.settings import Validate
from eyas.tokens.checks import Context, violations_of
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.chatml import ChatML, load_chatml
from eyas.tokens.codecs.chatml_reply import Grammar
from eyas.tokens.providers import find_rules
from eyas.tokens.rebuild import rebuild_response, rebuild_trajectory

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
OTHERS = ("<tool_response>", "</tool_response>")
# In the form of Qwen3's: reasoning after the last question alone, calls as JSON between markers.
TEMPLATE = """{%- set last = namespace(asked=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' }}
        {%- if m.role == 'assistant' and loop.index0 > last.asked %}
            {%- if m.reasoning_content or loop.last %}
                {{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
            {%- endif %}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if m.content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}OPENING{% endif %}"""
OPENINGS = {
    "own": "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    "opened": "{{- '<think>\\n' }}",
}
EMPTY = "<think>\n\n</think>\n\n"
CALLS = ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
GIVEN = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ASKED = [{"role": "user", "content": "What is 12 times 12?"}]
words = st.text(max_size=30).filter(lambda text: not any(m in text for m in (*MARKERS, "<|")))
bare = words.map(lambda text: text.strip("\n"))
names = st.sampled_from(["add", "get_weather"])
values = st.dictionaries(st.text(max_size=5), st.integers() | words, max_size=3)


def call(name: str, arguments: Any, identity: str = "c") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": identity, "type": "function", "function": function}


calls = st.lists(st.builds(call, names, values), max_size=2).map(tuple)


@pytest.fixture(scope="module")
def make(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatML]:
    """Return a maker of codecs by what their template's prompt opens."""

    def load(template: str, *, thinking: bool = True, tokens: tuple[str, ...] = MARKERS) -> ChatML:
        place = tmp_path_factory.mktemp("qwen")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain = [AddedToken(t, special=False, normalized=False) for t in (*tokens, *OTHERS)]
        tokenizer.add_tokens(plain)
        tokenizer.save(str(place / "tokenizer.json"))
        config = (folder / "tokenizer_config.json").read_text("utf-8")
        (place / "tokenizer_config.json").write_text(config, encoding="utf-8")
        (place / "chat_template.jinja").write_text(template, encoding="utf-8")
        return load_chatml(place, thinking=thinking)

    return load


@pytest.fixture(scope="module", params=sorted(OPENINGS))
def qwen(request: pytest.FixtureRequest, make: Callable[..., ChatML]) -> ChatML:
    """Return the codec of a target that writes `<think>` itself, or whose prompt ends with it."""
    return make(TEMPLATE.replace("OPENING", OPENINGS[request.param]))


@pytest.fixture(scope="module")
def own(make: Callable[..., ChatML]) -> ChatML:
    """Return the codec of the target that writes `<think>` itself."""
    return make(TEMPLATE.replace("OPENING", OPENINGS["own"]))


def ids_of(codec: ChatML, text: str) -> list[int]:
    return codec._tokenizer.encode(text, add_special_tokens=False).ids


def test_the_glue_is_learned_from_the_template(make: Callable[..., ChatML]) -> None:
    def learned(opening: str, **options: Any) -> Grammar:
        return make(TEMPLATE.replace("OPENING", opening), **options)._grammar

    thought = {"closing": "\n</think>\n\n", "call": CALLS, "joint": "\n"}
    assert learned(OPENINGS["own"]) == Grammar(opening="<think>\n", empty=EMPTY, **thought)
    assert learned(OPENINGS["opened"]) == Grammar(opening="", **thought)
    assert learned(OPENINGS["own"], thinking=False) == Grammar(call=CALLS, joint="\n")


def test_a_template_that_leaves_out_reasoning_stands_for_the_common_glue(
    make: Callable[..., ChatML],
) -> None:
    silent = TEMPLATE.replace("m.reasoning_content or loop.last", "false")
    for opening, expected in (("", "<think>\n"), (OPENINGS["opened"], "")):
        grammar = make(silent.replace("OPENING", opening))._grammar
        assert (grammar.opening, grammar.closing) == (expected, "\n</think>\n\n")
        assert grammar.call == CALLS


@GIVEN
@given(thought=bare.filter(bool), content=bare, said=calls)
def test_prompt_and_reply_are_the_finished_turn_of_the_template(
    qwen: ChatML, thought: str, content: str, said: tuple[dict[str, Any], ...]
) -> None:
    objects = [
        c | {"function": c["function"] | {"arguments": json.loads(c["function"]["arguments"])}}
        for c in said
    ]
    turn = {"role": "assistant", "content": content, "reasoning_content": thought}
    finished = qwen._rendered([*ASKED, turn | {"tool_calls": objects}], False)
    reply = ReplyParts(content=content, reasoning=thought, tool_calls=said)
    ids = [*qwen.render_prompt(ASKED, ()), *qwen.reply_ids(reply, "stop"), *ids_of(qwen, "\n")]
    assert ids == ids_of(qwen, finished)


@GIVEN
@given(
    thought=words | st.sampled_from(MARKERS), content=words | st.sampled_from(MARKERS), said=calls
)
def test_a_parsed_reply_gives_its_ids_back(
    qwen: ChatML, thought: str, content: str, said: tuple[dict[str, Any], ...]
) -> None:
    ids = qwen.reply_ids(ReplyParts(content=content, reasoning=thought, tool_calls=said), "stop")
    parsed = qwen.parse_reply(ids)
    assert qwen.reply_ids(parsed, "stop") == ids
    assert [c["function"] for c in parsed.tool_calls] == [c["function"] for c in said]
    assert qwen.markup_fault(ids[:-1], is_cut=False) is None


@GIVEN
@given(thought=bare.filter(bool), content=bare, said=calls)
def test_engines_that_strip_and_engines_that_do_not_give_the_same_ids(
    qwen: ChatML, thought: str, content: str, said: tuple[dict[str, Any], ...]
) -> None:
    stripped = ReplyParts(content=content or None, reasoning=thought, tool_calls=said)
    ids = qwen.reply_ids(stripped, "stop")
    kept = ReplyParts(
        content=f"\n\n{content}" + ("\n" if said and content else ""),
        reasoning=f"{thought}\n" if qwen._grammar.opening == "" else f"\n{thought}\n",
        tool_calls=said,
    )
    assert qwen.reply_ids(kept, "stop") == ids
    raw = ReplyParts(content=f"{qwen.decode(ids[:-1])}<|im_end|>")
    assert qwen.reply_ids(qwen.normalise(raw), "stop") == ids


def test_newlines_that_were_sampled_otherwise_are_kept(own: ChatML) -> None:
    reply = ReplyParts(content="\nIt is.", reasoning="\n\nso\n\n")
    expected = "<think>\n\nso\n\n</think>\nIt is."
    assert own.reply_ids(reply, "stop")[:-1] == ids_of(own, expected)


def test_a_call_in_another_spelling_keeps_it(own: ChatML) -> None:
    first = '<tool_call>{"arguments":{"a":1}, "name":"f"}</tool_call>'
    text = f'So:\n{first} <tool_call>\n{{"name": "g"}}\n</tool_call>'
    reply = own.normalise(ReplyParts(content=text))
    assert [c["function"] for c in reply.tool_calls] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert (reply.content, reply.flags) == ("So:\n", ("raw_tool_calls",))
    ids = own.reply_ids(reply, "tool_calls")
    assert ids[:-1] == ids_of(own, EMPTY + text)
    assert own.reply_ids(own.parse_reply(ids), "stop") == ids


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> and more',
        '<tool_call>\n{"name": "f", "argum',
        "<tool_call>\nf(1)\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
    ],
)
def test_calls_that_are_not_whole_stay_text_and_are_flagged(own: ChatML, text: str) -> None:
    reply = own.normalise(ReplyParts(content=text))
    assert (reply.content, reply.tool_calls, reply.flags) == (text, (), ("malformed_tool_calls",))
    empty = ids_of(own, EMPTY)
    assert not own.markup_ids & set(own.reply_ids(reply, "stop")[len(empty) - 1 :])


def test_a_whole_call_whose_arguments_are_no_json_is_a_call(own: ChatML) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": }\n</tool_call>'
    reply = own.normalise(ReplyParts(content=text))
    assert reply.tool_calls == (call("f", '{"a": ', "call_0"),)
    assert own.reply_ids(reply, "stop")[:-1] == ids_of(own, EMPTY + text)


def test_calls_that_begin_inside_the_reasoning_end_it(qwen: ChatML) -> None:
    section = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reply = qwen.normalise(ReplyParts(content=None, reasoning=f"\nLet me see.\n{section}"))
    assert reply.flags == ("raw_tool_calls", "implicit_think_end")
    ids = qwen.reply_ids(reply, "tool_calls")
    opening = "<think>" if qwen._grammar.opening else ""
    assert ids[:-1] == ids_of(qwen, f"{opening}\nLet me see.\n{section}")
    assert qwen.reply_ids(qwen.parse_reply(ids), "stop") == ids
    assert qwen.markup_fault(ids[:-1], is_cut=False) is None


def test_a_reply_that_was_cut_ends_where_it_was_cut(own: ChatML) -> None:
    def text(**parts: Any) -> str:
        return own.decode(own.reply_ids(ReplyParts(content=None, **parts), "length"))

    assert text() == ""
    assert text(reasoning="so") == "<think>\nso"
    open_call = EMPTY + '<tool_call>\n{"name": "f", "arguments": '
    assert text(tool_calls=(call("f", '{"a": '),)) == f'{open_call}{{"a": '
    assert text(tool_calls=(call("f", '{"a": 1}'),)) == f'{open_call}{{"a": 1}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("opening", "text", "cut", "fault"),
    [
        ("own", "It is.", False, None),
        ("own", "<think>so</think>It is.", False, None),
        ("own", "<think>so", False, "not closed: <think>"),
        ("own", "<think>so", True, None),
        ("own", "so</think>It is.", False, "</think>"),
        ("own", "<think>so</think><tool_call>", True, None),
        ("own", "<think>so</think><tool_call>", False, "<tool_call>"),
        ("own", "</tool_call>", True, "</tool_call>"),
        ("opened", "so", True, None),
        ("opened", "so", False, "no </think>"),
        ("opened", "<think>so</think>", False, "<think> </think>"),
    ],
)
def test_markers_must_follow_one_another(
    make: Callable[..., ChatML], opening: str, text: str, cut: bool, fault: str | None
) -> None:
    codec = make(TEMPLATE.replace("OPENING", OPENINGS[opening]))
    found = codec.markup_fault(ids_of(codec, text), is_cut=cut)
    assert found is None if fault is None else fault in str(found)


def test_other_added_tokens_have_no_place_in_a_reply(own: ChatML) -> None:
    assert set(ids_of(own, "".join(OTHERS))) <= own.special_ids
    assert own.has_special_text("say <think> now")
    assert own.markup_ids == set(ids_of(own, "".join(MARKERS)))


def test_thinking_off_has_no_place_for_reasoning(make: Callable[..., ChatML]) -> None:
    off = make(TEMPLATE.replace("OPENING", OPENINGS["own"]), thinking=False)
    assert off.render_text(ASKED, ()).endswith("assistant\n<think>\n\n</think>\n\n")
    assert off.reply_ids(ReplyParts(content="It is."), "stop")[:-1] == ids_of(off, "It is.")
    thought = ids_of(off, "<think>so</think>It is.")
    assert off.parse_reply(thought) == ReplyParts(content="<think>so</think>It is.")
    with pytest.raises(EyasError, match="no place for reasoning"):
        off.reply_ids(ReplyParts(content="a", reasoning="b"), "stop")
    with pytest.raises(EyasError, match=r"knows no `enable_thinking`(.|\n)*codec: chatml"):
        make(TEMPLATE.replace("OPENING", OPENINGS["opened"]), thinking=False)


def test_markers_that_are_no_tokens_are_text(make: Callable[..., ChatML]) -> None:
    codec = make(TEMPLATE.replace("OPENING", OPENINGS["opened"]), tokens=())
    ids = codec.reply_ids(ReplyParts(content="It is.", reasoning="so"), "stop")
    assert codec.decode(ids[:-1]) == "so\n</think>\n\nIt is."
    assert ids[:-1] == ids_of(codec, "so\n</think>\n\nIt is.")
    reply = codec.normalise(codec.parse_reply(ids))
    assert (reply.reasoning, reply.content) == ("so\n", "\n\nIt is.")
    assert codec.reply_ids(reply, "stop") == ids
    assert codec.markup_fault(ids[:-1], is_cut=False) is None
    half = make(TEMPLATE.replace("OPENING", OPENINGS["opened"]), tokens=MARKERS[2:])
    ids = half.reply_ids(replace(reply, tool_calls=(call("f", "{}"),)), "stop")
    assert half.markup_fault(ids[:-1], is_cut=False) is None
    assert "<tool_call>" in str(half.markup_fault(ids[:-3], is_cut=False))


def test_a_call_without_arguments_is_refused(own: ChatML) -> None:
    with pytest.raises(EyasError, match="expected a function with arguments"):
        own.reply_ids(ReplyParts(content="", tool_calls=({"id": "x"},)), "stop")


def test_a_call_without_a_name_is_refused(own: ChatML) -> None:
    nameless = call("f", "{}") | {"function": {"name": None, "arguments": "{}"}}
    with pytest.raises(EyasError, match="expected a function with a name"):
        own.reply_ids(ReplyParts(content="", tool_calls=(nameless,)), "stop")


def billed(prompt: Prompt, codec: ChatML, reply: ReplyParts, **changes: Any) -> Response:
    """Return a response that is billed as the reply, and says what `changes` say."""
    fields: dict[str, Any] = {
        "id": prompt.id,
        "fingerprint": "f",
        "sample": 0,
        "model": "m",
        "provider": "p",
        "generation_id": "g",
        "reasoning": reply.reasoning,
        "content": reply.content,
        "tool_calls": reply.tool_calls,
        "finish_reason": "stop",
        "native_finish_reason": None,
        "prompt_tokens": len(codec.render_prompt(prompt.messages, prompt.tools)),
        "completion_tokens": len(codec.reply_ids(reply, "stop")),
        "cost_usd": 0.0,
        "latency_s": 0.1,
        "attempts": 1,
        "source": "openrouter",
        "sampling": {},
        "usage": {},
    }
    return Response(**fields | changes)


def test_arguments_written_anew_are_found_by_the_bill(
    qwen: ChatML, rules: Validate, make_prompt: Callable[..., Prompt]
) -> None:
    prompt = make_prompt()
    reply = ReplyParts(
        content=None, reasoning="so", tool_calls=(call("f", '{"a": 1, "b": [2, 3]}'),)
    )
    handed = (call("f", '{"a":1,"b":[2,3]}'),)
    response = billed(prompt, qwen, reply, tool_calls=handed)
    sample = rebuild_response(prompt, response, qwen, rules).result
    assert isinstance(sample, Sample)
    assert "arguments_respelled" in sample.flags
    start, end = sample.spans[0]
    assert list(sample.input_ids[start:end]) == qwen.reply_ids(reply, "stop")
    context = Context(codec=qwen, rules=replace(rules, repeat_ngram=8, repeat_times=8))
    assert violations_of(sample, context) == []


@pytest.mark.parametrize("offset", [0, -1])
@pytest.mark.parametrize("strips", [True, False])
def test_a_provider_of_such_a_target_is_found_out(
    own: ChatML, make_prompt: Callable[..., Prompt], strips: bool, offset: int
) -> None:
    pairs = []
    for number in range(40):
        prompt = make_prompt(messages=({"role": "user", "content": f"What is {number}?"},))
        reply = ReplyParts(content=f"It is {number}.", reasoning=f"The answer of {number}" * 2)
        tokens = len(own.reply_ids(reply, "stop")) + offset
        handed = reply
        if not strips:
            handed = ReplyParts(content=f"\n\n{reply.content}", reasoning=f"\n{reply.reasoning}\n")
        pairs.append((prompt, billed(prompt, own, handed, completion_tokens=tokens)))
    found = find_rules(pairs, own)["p"]
    assert (found.rule.edits, found.rule.offset, found.best.matched) == ((), offset, 40)


@pytest.mark.parametrize("handed", [("", "{}"), (None, "{}"), (None, "\n\n{}")])
def test_an_empty_thought_that_servers_leave_out_is_written(
    own: ChatML, rules: Validate, make_prompt: Callable[..., Prompt], handed: tuple[str | None, str]
) -> None:
    pairs = []
    for number in range(40):
        prompt = make_prompt(messages=({"role": "user", "content": f"{number}? /no_think"},))
        said = f"It is {number}."
        sampled = ids_of(own, f"{EMPTY}{said}<|im_end|>")
        reply = ReplyParts(content=handed[1].format(said), reasoning=handed[0])
        pairs.append((prompt, billed(prompt, own, reply, completion_tokens=len(sampled))))
    rule = find_rules(pairs, own)["p"].rule
    assert (rule.edits, rule.offset) == ((), 0)
    sample = rebuild_response(*pairs[-1], own, rules, rule).result
    assert isinstance(sample, Sample)
    assert list(sample.input_ids[sample.spans[0][0] :]) == sampled


DEEP, SURROGATE = "[" * 3000, '{"a": "\\ud83d"}'


@pytest.mark.parametrize("finish", ["length", "tool_calls"])
@pytest.mark.parametrize("arguments", [DEEP, SURROGATE])
def test_arguments_that_no_token_spells_or_too_deep_end_no_run(
    own: ChatML, rules: Validate, make_prompt: Callable[..., Prompt], arguments: str, finish: str
) -> None:
    prompt, calls = make_prompt(), (call("f", arguments),)
    reply = ReplyParts(content=None, reasoning="so", tool_calls=calls)
    tokens = len(own.reply_ids(reply, finish))
    response = billed(prompt, own, reply, finish_reason=finish, completion_tokens=tokens)
    assert isinstance(rebuild_response(prompt, response, own, rules).result, Sample)
    assert find_rules([(prompt, response)] * 2, own)["p"].replies == 2
    turns = (*ASKED, {"role": "assistant", "content": "", "tool_calls": list(calls)})
    if arguments == DEEP:
        assert own.render_prompt(turns, ())
    else:
        with pytest.raises(EyasError, match="a lone surrogate"):
            own.render_prompt(turns, ())


def test_a_trajectory_is_cut_where_the_template_forgets_reasoning(
    own: ChatML, make_prompt: Callable[..., Prompt]
) -> None:
    def thinks(content: str, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, "reasoning_content": "so", **more}

    result = {"role": "tool", "content": "3", "tool_call_id": "c"}
    asked = ASKED[0]
    loop = [asked, thinks("", tool_calls=[call("add", {"a": 1})]), result, thinks("It is 3.")]
    [whole] = rebuild_trajectory(make_prompt(messages=tuple(loop)), own)
    assert isinstance(whole.result, Sample)
    assert len(whole.result.spans) == 2
    text = own.decode(whole.result.input_ids)
    assert text.count("<think>\nso\n</think>") == 2
    loop[1] = thinks("", tool_calls=[call("add", '{"a":1}')])  # the template writes it spaced
    assert rebuild_trajectory(make_prompt(messages=tuple(loop)), own) == [whole]
    both = rebuild_trajectory(make_prompt(messages=(*loop, asked, thinks("Yes."))), own)
    assert [len(r.result.spans) for r in both if isinstance(r.result, Sample)] == [2, 1]
    assert not [r for r in both if isinstance(r.result, Violation)]
