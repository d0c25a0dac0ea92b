"""The Kimi codec: replies against rendered text, and the official class's ids where they are."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi import TEMPLATE

from eyas.errors import EyasError
from eyas.records import Prompt, Response, Sample, Violation
from eyas.settings import Validate
from eyas.tokens.codecs import _LOADERS, ReplyParts, load_codec
from eyas.tokens.codecs.kimi import NEEDED, Kimi, check_template, load_kimi
from eyas.tokens.codecs.kimi_prompt import (
    ARGUMENTS,
    CALL,
    CALL_END,
    RELEASES,
    SECTION,
    SECTION_END,
    render_prompt,
)
from eyas.tokens.codecs.kimi_reply import IMPLICIT_THINK_END, call_of
from eyas.tokens.codecs.kimi_tokenizer import KimiTokenizer
from eyas.tokens.rebuild import rebuild_response, rebuild_trajectory

OFFICIAL = Path("../shared/kimi")
needs_official = pytest.mark.skipif(
    not OFFICIAL.is_dir(), reason="../shared/kimi (ranks file, goldens) is not on this machine"
)
TOKENIZER = KimiTokenizer(
    {bytes([byte]): byte for byte in range(256)}, dict(enumerate(NEEDED, start=256))
)
CODECS = {name: Kimi(TOKENIZER, release) for name, release in RELEASES.items()}
K2_5 = CODECS["kimi_k2_5"]
ID = TOKENIZER.ids
END = ID["<|im_end|>"]
USER = {"role": "user", "content": "Q"}

plain = st.text(max_size=20).filter(lambda text: not TOKENIZER.spells_special(text))
calls = st.lists(
    st.builds(call_of, st.sampled_from(["functions.f:0", "g.h:12"]), plain), max_size=3
)
replies = st.builds(
    ReplyParts, content=plain, reasoning=plain, tool_calls=calls.map(tuple), flags=st.just(())
)


def spelled(*tokens: str | bytes) -> list[int]:
    """Return special tokens by name and bytes as they are."""
    return [i for t in tokens for i in ([ID[t]] if isinstance(t, str) else t)]


@pytest.mark.parametrize("release", ["kimi_k2_5", "kimi_k2_5_instant", "kimi_k2_thinking"])
@given(reply=replies)
def test_a_reply_comes_back_from_its_ids(release: str, reply: ReplyParts) -> None:
    codec = CODECS[release]
    if not RELEASES[release].thinking:
        reply = ReplyParts(content=reply.content, tool_calls=reply.tool_calls)
    ids = codec.reply_ids(reply, "stop")
    assert codec.parse_reply(ids) == reply
    assert ids[-1] == END
    assert not codec.special_ids & set(ids[:-1])
    assert set(ids[:-1]) - codec.markup_ids <= set(range(256))


@pytest.mark.parametrize("release", ["kimi_k2_5", "kimi_k2_5_instant", "kimi_k2_thinking"])
@given(reply=replies)
def test_a_reply_has_its_markup_in_order_and_so_has_every_beginning(
    release: str, reply: ReplyParts
) -> None:
    codec = CODECS[release]
    if not RELEASES[release].thinking:
        reply = ReplyParts(content=reply.content, tool_calls=reply.tool_calls)
    ids = codec.reply_ids(reply, "stop")[:-1]
    assert codec.markup_fault(ids, is_cut=False) is None
    assert all(codec.markup_fault(ids[:end], is_cut=True) is None for end in range(len(ids)))


@given(reply=replies)
def test_parts_encoded_apart_are_the_rendered_turn_encoded_whole(reply: ReplyParts) -> None:
    turn = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning}
    messages = [USER, turn | {"tool_calls": list(reply.tool_calls)}]
    release = RELEASES["kimi_k2_6_preserved"]
    whole = TOKENIZER.encode(render_prompt(messages, (), release, opens_reply=False))
    codec = CODECS["kimi_k2_6_preserved"]
    assert whole == [*codec.render_prompt([USER], ()), *codec.reply_ids(reply, "tool_calls")]


@pytest.mark.parametrize(
    ("content", "reasoning", "finish", "ids"),
    [
        ("A", "R", "stop", spelled(b"R", "</think>", b"A", "<|im_end|>")),
        ("A", None, "stop", spelled("</think>", b"A", "<|im_end|>")),
        ("A", "R", "length", spelled(b"R", "</think>", b"A")),
        (None, "R", "length", spelled(b"R")),
        (None, "R", "stop", spelled(b"R", "</think>", "<|im_end|>")),
        ("<think>", "", "length", spelled("</think>", b"<think>")),
    ],
)
def test_reasoning_is_closed_where_anything_shows_that_it_ended(
    content: str | None, reasoning: str | None, finish: str, ids: list[int]
) -> None:
    assert K2_5.reply_ids(ReplyParts(content=content, reasoning=reasoning), finish) == ids


def test_calls_that_began_inside_the_reasoning_are_not_preceded_by_its_end() -> None:
    reply = ReplyParts(
        content=None,
        reasoning="R",
        tool_calls=(call_of("functions.f:0", "{}"),),
        flags=(IMPLICIT_THINK_END,),
    )
    ids = K2_5.reply_ids(reply, "tool_calls")
    assert ids[:2] == spelled(b"R", SECTION)
    assert K2_5.parse_reply(ids) == ReplyParts(
        content="", reasoning="R", tool_calls=reply.tool_calls, flags=reply.flags
    )


@pytest.mark.parametrize(("arguments", "is_open"), [('{"a": ', True), ('{"a": 1}', False)])
def test_a_reply_cut_inside_arguments_leaves_the_section_open(
    arguments: str, is_open: bool
) -> None:
    reply = ReplyParts(content="", tool_calls=(call_of("functions.f:0", arguments),))
    ids = K2_5.reply_ids(reply, "length")
    assert (ID[CALL_END] not in ids) is is_open
    assert (ID[SECTION_END] not in ids) is is_open
    assert END not in ids
    said = K2_5.parse_reply(ids)
    assert said.content == ""


@pytest.mark.parametrize(
    "inside",
    [
        spelled(),
        spelled(b"x", CALL, b"f:0", ARGUMENTS, b"{}", CALL_END),
        spelled(CALL, CALL),
        spelled(CALL, b"f:0", CALL_END),
        spelled(CALL, b"f:0", ARGUMENTS, b"{}"),
    ],
)
def test_a_sampled_section_that_is_not_whole_stays_text(inside: list[int]) -> None:
    section = [*spelled(SECTION), *inside, *spelled(SECTION_END)]
    said = K2_5.parse_reply([*spelled("</think>"), *section, END])
    assert said == ReplyParts(content=TOKENIZER.decode(section), reasoning="")


@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        (spelled(), ()),
        (spelled(CALL), (call_of("", ""),)),
        (spelled(CALL, b"f:0"), (call_of("f:0", ""),)),
        (spelled(CALL, b"f:0", ARGUMENTS, b'{"a'), (call_of("f:0", '{"a'),)),
        (spelled(CALL, b"f:0", ARGUMENTS, b"{}", CALL_END), (call_of("f:0", "{}"),)),
        (
            spelled(CALL, b"f:0", ARGUMENTS, b"{}", CALL_END, CALL, b"g"),
            (call_of("f:0", "{}"), call_of("g", "")),
        ),
    ],
)
def test_of_a_section_that_was_cut_no_marker_is_left_in_the_text(
    inside: list[int], calls: tuple[dict[str, Any], ...]
) -> None:
    said = K2_5.parse_reply([*spelled(b"R", "</think>", b"A", SECTION), *inside])
    assert said == ReplyParts(content="A", reasoning="R", tool_calls=calls)


def test_raw_calls_are_read_in_a_time_that_grows_with_their_number() -> None:
    call = f" {CALL} functions.f:0 {ARGUMENTS} {{}} {CALL_END}"
    started_s = time.process_time()
    for count, end in ((20_000, ""), (20_000, "</s>"), (20_000, SECTION_END)):
        reply = K2_5.normalise(ReplyParts(content=f"</think>{SECTION}{call * count}{end}"))
        assert (len(reply.tool_calls) == count) is (end == SECTION_END)
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize("before", ["", "so"])
def test_a_space_at_every_raw_marker_is_none_of_the_texts(before: str) -> None:
    markers = f"{SECTION} {CALL} functions.f:0 {ARGUMENTS} {{}} {CALL_END} {SECTION_END}"
    reply = K2_5.normalise(ReplyParts(content=f"{before} {markers}", reasoning="R"))
    assert (reply.content, reply.tool_calls) == (before, (call_of("functions.f:0", "{}"),))


def test_ids_that_never_end_thinking_are_all_reasoning() -> None:
    assert K2_5.parse_reply(spelled(b"R")) == ReplyParts(content=None, reasoning="R")
    assert K2_5.parse_reply([]) == ReplyParts(content=None, reasoning="")


def test_reasoning_has_no_place_where_thinking_is_off() -> None:
    codec = CODECS["kimi_k2_5_instant"]
    assert codec.reply_ids(ReplyParts(content="A", reasoning=""), "stop") == [*b"A", END]
    with pytest.raises(EyasError, match="expected no reasoning with thinking off"):
        codec.reply_ids(ReplyParts(content="A", reasoning="R"), "stop")


def test_only_a_release_that_opens_its_thinking_itself_may_say_so() -> None:
    think = ID["<think>"]
    assert think in K2_5.special_ids
    thinking = CODECS["kimi_k2_thinking"]
    assert think in thinking.markup_ids
    reply = ReplyParts(content="A", reasoning="R")
    assert thinking.reply_ids(reply, "stop") == [think, *K2_5.reply_ids(reply, "stop")]


def test_every_reserved_id_is_special_but_those_that_structure_a_reply() -> None:
    for codec in CODECS.values():
        assert codec.special_ids | codec.markup_ids == set(range(256, 512))
        assert not codec.special_ids & codec.markup_ids
        assert codec.stop_ids == (END,)
        assert codec.vocab_size == 512


def test_special_text_in_a_prompt_becomes_real_and_is_recognised() -> None:
    chat = [{"role": "user", "content": "say <think> now"}]
    assert K2_5.render_prompt(chat, ()).count(ID["<think>"]) == 2
    assert K2_5.has_special_text("say <think> now")
    assert K2_5.has_special_text("<|reserved_token_300|>")
    assert not K2_5.has_special_text("say < think > and <|im_ended|>")


def test_a_trajectory_is_one_sample_as_long_as_no_reasoning_is_dropped(
    make_prompt: Callable[..., Prompt],
) -> None:
    call = call_of("functions.f:0", "{}")
    calling = {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "functions.f:0", "content": "20"}
    answer = {"role": "assistant", "content": "A", "reasoning_content": "S"}
    messages = (USER, calling, result, answer, USER, answer)
    samples = [r.result for r in rebuild_trajectory(make_prompt(messages=messages), K2_5)]
    assert [len(getattr(sample, "spans", ())) for sample in samples] == [2, 1]
    whole = getattr(samples[0], "input_ids", ())
    assert list(whole) == [
        *K2_5.render_prompt(messages[:3], ()),
        *spelled(b"S", "</think>", b"A", "<|im_end|>"),
    ]


def loop_of(identity: str) -> tuple[dict[str, Any], ...]:
    """Return four calls with results, and an answer; the ids are made of `identity`."""
    messages = [USER]
    for number in range(4):
        made = call_of("functions.f:0", "{}") | {"id": identity.format(number)}
        messages += [
            {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": identity.format(number), "content": "20"},
        ]
    return (*messages, {"role": "assistant", "content": "A", "reasoning_content": "S"})


@pytest.mark.parametrize("identity", ["call_{}", "call_x"])
def test_ids_of_other_servers_are_rewritten_through_a_whole_trajectory(
    make_prompt: Callable[..., Prompt], identity: str
) -> None:
    own, other = (
        rebuild_trajectory(make_prompt(messages=loop_of(name)), K2_5)
        for name in ("functions.f:{}", identity)
    )
    assert [len(getattr(r.result, "spans", ())) for r in own] == [5]
    assert other == own


def test_the_number_of_a_rewritten_id_goes_on_from_the_turns_before(
    rules: Validate, make_prompt: Callable[..., Prompt], make_response: Callable[..., Response]
) -> None:
    prompt = make_prompt(messages=loop_of("functions.f:{}")[:-1])
    true = ReplyParts(content=None, tool_calls=(call_of("functions.f:4", "{}"),))
    response = make_response(
        prompt,
        content=None,
        tool_calls=(true.tool_calls[0] | {"id": "call_abc"},),
        finish_reason="tool_calls",
        completion_tokens=len(K2_5.reply_ids(true, "stop")),
        prompt_tokens=len(K2_5.render_prompt(prompt.messages, ())),
    )
    sample = rebuild_response(prompt, response, K2_5, rules).result
    assert isinstance(sample, Sample)
    assert list(sample.input_ids[sample.spans[0][0] :]) == K2_5.reply_ids(true, "stop")


Rebuild = Callable[..., Sample]


@pytest.fixture
def rebuild(
    rules: Validate,
    make_prompt: Callable[..., Prompt],
    make_response: Callable[..., Response],
) -> Rebuild:
    """Return a maker of samples from what a server said."""
    prompt = make_prompt()
    prompt_tokens = len(K2_5.render_prompt(prompt.messages, ()))

    def make(**said: Any) -> Sample:
        response = make_response(prompt, prompt_tokens=prompt_tokens, **said)
        sample = rebuild_response(prompt, response, K2_5, rules).result
        assert isinstance(sample, Sample)
        return sample

    return make


@pytest.mark.parametrize(
    ("said", "billed", "ids", "flags"),
    [
        (
            {"reasoning": "R\N{REPLACEMENT CHARACTER}", "content": None, "finish_reason": "length"},
            3,
            spelled(b"R"),
            ("truncated", "half_character"),
        ),
        (
            {"content": "R</think>A"},
            4,
            spelled(b"R", "</think>", b"A", "<|im_end|>"),
            ("raw_reasoning",),
        ),
        (
            {
                "content": None,
                "tool_calls": (call_of("f:0", '{"a":1}'),),
                "finish_reason": "tool_calls",
            },
            18,
            spelled(
                "</think>",
                SECTION,
                CALL,
                b"f:0",
                ARGUMENTS,
                b'{"a": 1}',
                CALL_END,
                SECTION_END,
                "<|im_end|>",
            ),
            ("arguments_respelled",),
        ),
        (
            {
                "content": None,
                "reasoning": "R",
                "tool_calls": (call_of("f:0", "{}"),),
                "finish_reason": "tool_calls",
            },
            12,
            spelled(
                b"R", SECTION, CALL, b"f:0", ARGUMENTS, b"{}", CALL_END, SECTION_END, "<|im_end|>"
            ),
            ("implicit_think_end",),
        ),
    ],
)
def test_a_response_is_put_right_and_its_sample_says_so(
    rebuild: Rebuild, said: dict[str, Any], billed: int, ids: list[int], flags: tuple[str, ...]
) -> None:
    sample = rebuild(completion_tokens=billed, **said)
    ((start, end),) = sample.spans
    assert list(sample.input_ids[start:end]) == ids
    assert sample.flags == flags


def test_two_spellings_that_fit_the_bill_are_none(
    rules: Validate,
    make_prompt: Callable[..., Prompt],
    make_response: Callable[..., Response],
) -> None:
    """As given it is one too many: a thought that was not ended, or arguments without a space."""
    prompt = make_prompt()
    response = make_response(
        prompt,
        content=None,
        reasoning="R",
        tool_calls=(call_of("f:0", '{"a": 1}'),),
        finish_reason="tool_calls",
        completion_tokens=18,
        prompt_tokens=len(K2_5.render_prompt(prompt.messages, ())),
    )
    result = rebuild_response(prompt, response, K2_5, rules).result
    assert isinstance(result, Violation)
    assert (result.rule, result.detail) == ("count_mismatch", "billed 18 tokens, rebuilt 19")


@pytest.mark.parametrize("said", [{"content": ""}, {"content": None, "reasoning": ""}])
def test_markers_without_a_word_are_an_empty_reply(
    rules: Validate,
    make_prompt: Callable[..., Prompt],
    make_response: Callable[..., Response],
    said: dict[str, Any],
) -> None:
    prompt = make_prompt()
    response = make_response(prompt, completion_tokens=2, **said)
    result = rebuild_response(prompt, response, K2_5, rules).result
    assert isinstance(result, Violation)
    assert result.rule == "empty_reply"


def test_the_template_of_the_folder_is_held_against_the_codec(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    check_template(tmp_path, "kimi_k2_5")  # none there: nothing to compare
    path = tmp_path / "chat_template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    for name in ("kimi_k2_5", "kimi_k2_5_instant", "kimi_k2_6"):
        check_template(tmp_path, name)
    with pytest.raises(EyasError, match=r"other prompts than codec kimi_k2_thinking(.|\n)*k2_6 \|"):
        check_template(tmp_path, "kimi_k2_thinking")
    path.write_text(TEMPLATE.replace("m.role == 'tool'", "false"), encoding="utf-8")
    with pytest.raises(EyasError, match=r"other prompts than codec kimi_k2_5: '<\|im_user"):
        check_template(tmp_path, "kimi_k2_5")
    for old, new in (("tool_declare", "tools"), ("m.name or m.role", "m.role")):
        path.write_text(TEMPLATE.replace(old, new), encoding="utf-8")
        with pytest.raises(EyasError, match="other prompts than codec kimi_k2_5"):
            check_template(tmp_path, "kimi_k2_5")
    assert not caplog.records
    path.write_text("{{ today() }}", encoding="utf-8")
    check_template(tmp_path, "kimi_k2_5")
    assert "not to be held against kimi_k2_5" in caplog.text


def test_every_release_can_be_named_as_a_codec(tmp_path: Path) -> None:
    assert set(_LOADERS) - {"chatml", "chatml_instant"} == set(RELEASES)
    for name in RELEASES:
        with pytest.raises(EyasError, match=r"tiktoken\.model: no such file"):
            load_codec(name, tmp_path)


@needs_official
@pytest.mark.parametrize(
    ("kind", "file", "total"),
    [
        ("cases", "chat_conformance_k25.jsonl", 141),
        ("cases", "chat_golden_k25.jsonl", 16),
        ("completions", "completion_golden_k25.jsonl", 7),
        ("encodings", "encode_golden.jsonl", 27),
    ],
)
def test_ids_are_those_of_the_official_class(kind: str, file: str, total: int) -> None:
    command = [sys.executable, "benchmarks/conformance.py", "--tokenizer", str(OFFICIAL)]
    run = subprocess.run([*command, f"--{kind}", str(OFFICIAL / file)], capture_output=True)
    assert json.loads(run.stdout) == {"ok": total, "total": total, "failed": []}
    assert run.returncode == 0


@needs_official
def test_a_wrong_case_is_told_by_name(tmp_path: Path) -> None:
    lines = (OFFICIAL / "chat_golden_k25.jsonl").read_bytes().splitlines()
    cases: list[dict[str, Any]] = [json.loads(line) for line in lines[:4]]
    cases[0]["text"] += "x"
    cases[1]["ids"][0] = 0
    cases[2]["messages"][0]["content"] = 5
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
    command = [sys.executable, "benchmarks/conformance.py", "--tokenizer", str(OFFICIAL)]
    run = subprocess.run([*command, "--cases", str(path)], capture_output=True)
    told = json.loads(run.stdout)
    assert (told["ok"], told["total"], run.returncode) == (1, 4, 1)
    assert [words.split(":")[0] for words in told["failed"]] == [
        "no_system",
        "system",
        "thinking_off",
    ]


@needs_official
def test_a_recorded_reply_of_k2_thinking_has_the_billed_length() -> None:
    row = json.loads((OFFICIAL / "observed_counts.jsonl").read_bytes().splitlines()[0])
    codec = load_kimi(OFFICIAL, "kimi_k2_thinking")
    reply = ReplyParts(
        content=None,
        reasoning=row["reasoning"],
        tool_calls=tuple(call_of(*call) for call in row["calls"]),
    )
    assert len(codec.reply_ids(reply, "tool_calls")) == row["reported_output_tokens"]


@needs_official
def test_the_folders_special_tokens_are_the_published_ones() -> None:
    codec = load_kimi(OFFICIAL, "kimi_k2_5")
    table = json.loads((OFFICIAL / "special_tokens.json").read_bytes())
    assert codec.vocab_size == table["vocab_size"]
    assert codec.stop_ids == (table["eos_in_model_config"],)
    markup = {int(i) for i, token in table["tokens"].items() if not token["special"]}
    assert codec.markup_ids == markup - {163606}, "<think> stands in the prompt already"
    for i, token in table["tokens"].items():
        assert codec._tokenizer.encode(token["content"]) == [int(i)]
