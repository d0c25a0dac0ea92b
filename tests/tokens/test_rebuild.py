"""Replies back to ids: what is kept, what is rejected, and how good the evidence is."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.records import Message, Prompt, Response, Sample, Tool, Violation
from eyas.settings import Validate
from eyas.tokens.audit import truth_metrics
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.chatml import ChatML, load_chatml
from eyas.tokens.providers import ProviderRule
from eyas.tokens.rebuild import Rebuilt, rebuild_response, rebuild_trajectory

Make = Callable[..., Response]
Ask = Callable[..., Prompt]
ANCHOR = Path("../shared/anchor")
TARGET = Path("models/target")
GIVEN = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def kept(rebuilt: Rebuilt) -> Sample:
    assert isinstance(rebuilt.result, Sample), rebuilt.result
    return rebuilt.result


def rejected(rebuilt: Rebuilt) -> Violation:
    assert isinstance(rebuilt.result, Violation), rebuilt.result
    return rebuilt.result


@GIVEN
@given(said=st.text(min_size=1, max_size=80), cut=st.booleans(), true=st.booleans())
def test_the_span_of_a_sample_inverts_to_the_reply(
    codec: ChatML,
    rules: Validate,
    make_prompt: Ask,
    make_response: Make,
    said: str,
    cut: bool,
    true: bool,
) -> None:
    prompt = make_prompt()
    finish = "length" if cut else "stop"
    said = said.rstrip("�") + "." if cut else said
    response = make_response(prompt, content=said, finish_reason=finish)
    if true:
        ids = codec.reply_ids(ReplyParts(content=said), finish)
        response = replace(response, true_ids=tuple(ids))
    sample = kept(rebuild_response(prompt, response, codec, rules))
    ((start, end),) = sample.spans
    assert list(sample.input_ids[:start]) == codec.render_prompt(prompt.messages, ())
    assert codec.parse_reply(sample.input_ids[start:end]).content == said
    assert end == len(sample.input_ids)
    assert (sample.input_ids[-1] in codec.stop_ids) is not cut
    assert sample.flags == (("truncated",) if cut else ())
    assert sample.completion_tokens_billed == end - start


def test_a_sample_carries_what_its_answer_said(
    codec: ChatML, rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    prompt = make_prompt()
    response = make_response(prompt, sample=3, provider="Moonshot AI")
    sample = kept(rebuild_response(prompt, response, codec, rules))
    assert (sample.id, sample.conversation, sample.dataset) == ("p1-3", "p1", "chat")
    assert (sample.provider, sample.temperature) == ("Moonshot AI", 0.5)


@pytest.mark.parametrize(
    ("off", "keep_near", "kind"),
    [
        (0, False, "exact"),
        (1, False, "count_mismatch"),
        (1, True, "near"),
        (-2, True, "near"),
        (3, True, "count_mismatch"),
        (-3, False, "count_mismatch"),
    ],
)
def test_the_bill_decides_what_is_exact_near_or_rejected(
    codec: ChatML,
    rules: Validate,
    make_prompt: Ask,
    make_response: Make,
    off: int,
    keep_near: bool,
    kind: str,
) -> None:
    prompt = make_prompt()
    response = make_response(prompt)
    response = replace(response, completion_tokens=response.completion_tokens + off)
    rebuilt = rebuild_response(prompt, response, codec, replace(rules, keep_near=keep_near))
    assert rebuilt.evidence is not None
    assert rebuilt.evidence.count_delta == off
    if kind == "count_mismatch":
        assert rejected(rebuilt).rule == kind
        assert rejected(rebuilt).detail.startswith(f"billed {response.completion_tokens} tokens")
    else:
        assert kept(rebuilt).flags == (() if kind == "exact" else ("near",))


@pytest.mark.parametrize(
    ("changes", "rule", "detail"),
    [
        ({"finish_reason": "error"}, "finish_reason", "error"),
        ({"finish_reason": "content_filter"}, "finish_reason", "content_filter"),
        ({"content": ""}, "empty_reply", "finish_reason stop"),
        ({"content": None, "finish_reason": "length"}, "empty_reply", "finish_reason length"),
        ({"content": "�", "finish_reason": "length"}, "empty_reply", "finish_reason length"),
        ({"reasoning": "hm"}, "not_of_this_format", "no place for reasoning"),
        ({"tool_calls": ({"id": "x"},)}, "not_of_this_format", "no place for tool_calls"),
        ({"prompt_tokens": 1}, "prompt_mismatch", "billed 1 prompt tokens, rendered"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_rejected_with_its_reason(
    codec: ChatML,
    rules: Validate,
    make_prompt: Ask,
    make_response: Make,
    changes: dict[str, object],
    rule: str,
    detail: str,
) -> None:
    prompt = make_prompt()
    violation = rejected(rebuild_response(prompt, make_response(prompt, **changes), codec, rules))
    assert (violation.id, violation.rule, violation.severity) == ("p1", rule, "reject")
    assert detail in violation.detail


@pytest.mark.parametrize(
    ("missing", "explained"), [(0, False), (1, True), (2, True), (3, True), (4, False)]
)
def test_half_a_character_at_a_cut_is_left_out_and_explains_up_to_three_tokens(
    codec: ChatML,
    rules: Validate,
    make_prompt: Ask,
    make_response: Make,
    missing: int,
    explained: bool,
) -> None:
    prompt = make_prompt()
    ids = codec.reply_ids(ReplyParts(content="It is"), "length")
    response = make_response(
        prompt,
        content="It is�",
        finish_reason="length",
        completion_tokens=len(ids) + missing,
        true_ids=(*ids, *range(200, 200 + missing)),
    )
    rebuilt = rebuild_response(prompt, response, codec, rules)
    if explained:
        assert kept(rebuilt).flags == ("truncated", "half_character")
        assert kept(rebuilt).input_ids[-len(ids) :] == tuple(ids)
        assert rebuilt.evidence is not None
        assert rebuilt.evidence.identical
    else:
        assert missing == 0 or rejected(rebuilt).rule == "count_mismatch"


def test_other_ids_than_those_sampled_are_flagged_and_told_as_silent_or_caught(
    codec: ChatML, rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    prompt = make_prompt()
    honest = make_response(prompt)
    ids = tuple(codec.reply_ids(ReplyParts(content="It is 144."), "stop"))
    right = replace(honest, true_ids=ids)
    silent = replace(honest, true_ids=(ids[0] + 1, *ids[1:]))
    longer = replace(honest, true_ids=(7, *ids), completion_tokens=len(ids) + 1)
    unknown = replace(honest, true_ids=None)
    all_four = (right, silent, longer, unknown)
    rebuilt = [rebuild_response(prompt, r, codec, rules) for r in all_four]
    assert [r.evidence and r.evidence.identical for r in rebuilt] == [True, False, False, None]
    assert kept(rebuilt[1]).flags == ("true_ids_differ",)
    assert rejected(rebuilt[2]).rule == "count_mismatch"
    assert truth_metrics(rebuilt) == {
        "replies_of_known_ids": 3,
        "identical_share": 0.333333,
        "kept_identical_share": 0.5,
        "identical_token_share": round(23 / 25, 6),  # replies of 8, 8 and 9, two tokens are others
        "kept_identical_token_share": round(15 / 16, 6),
        "mismatches_caught": 1,
        "silent_mismatches": 1,
    }


def test_a_providers_rule_undoes_its_white_space_and_its_offset(
    codec: ChatML, rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    prompt = make_prompt()
    honest = make_response(prompt)
    plain = kept(rebuild_response(prompt, honest, codec, rules))
    given = replace(
        honest,
        content=" It is 144. ",
        completion_tokens=honest.completion_tokens - 1,
        prompt_tokens=honest.prompt_tokens + 2,
    )
    edits = (("content_start", "strip_space"), ("content_end", "strip_space"))
    rule = ProviderRule(edits=edits, offset=-1, prompt_offset=2)
    rebuilt = rebuild_response(prompt, given, codec, rules, rule)
    assert kept(rebuilt).input_ids == plain.input_ids
    assert kept(rebuilt).flags == ()
    assert rebuilt.evidence is not None
    assert (rebuilt.evidence.count_delta, rebuilt.evidence.prompt_delta) == (0, 0)
    assert rejected(rebuild_response(prompt, given, codec, rules)).rule == "prompt_mismatch"
    over = replace(given, completion_tokens=honest.completion_tokens)
    violation = rejected(rebuild_response(prompt, over, codec, rules, rule))
    billed = honest.completion_tokens
    assert violation.detail == f"billed {billed} tokens, rebuilt {billed}, k = -1"


def test_no_reply_of_a_rejected_provider_is_kept(
    codec: ChatML, rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    prompt = make_prompt()
    rule = ProviderRule(rejected="provider 'Acme': another prompt template")
    rebuilt = rebuild_response(prompt, make_response(prompt), codec, rules, rule)
    assert rejected(rebuilt).rule == "provider_template"
    assert rejected(rebuilt).detail == "provider 'Acme': another prompt template"
    assert rebuilt.evidence is not None


def test_an_imported_answer_with_true_ids_is_not_rebuilt(
    codec: ChatML, rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    prompt = make_prompt()
    answer = make_response(
        prompt, source="imported", content="other text", true_ids=(7, 8, 2), completion_tokens=99
    )
    rebuilt = rebuild_response(prompt, answer, codec, rules)
    assert kept(rebuilt).input_ids[-3:] == (7, 8, 2)
    assert rebuilt.evidence is None
    cut = rebuild_response(prompt, replace(answer, finish_reason="length"), codec, rules)
    assert kept(cut).flags == ("truncated",)
    unknown = rebuild_response(prompt, replace(answer, true_ids=None), codec, rules)
    assert rejected(unknown).rule == "count_mismatch"


USER = {"role": "user", "content": "What is 12 times 12?"}
SAID = {"role": "assistant", "content": "It is 144."}
MORE = {"role": "user", "content": "and the dog?"}
DOG = {"role": "assistant", "content": "the lazy dog"}


def test_a_conversation_is_one_sample_with_a_span_a_reply(codec: ChatML, make_prompt: Ask) -> None:
    prompt = make_prompt(messages=(USER, SAID, MORE, DOG, USER))
    (rebuilt,) = rebuild_trajectory(prompt, codec)
    sample = kept(rebuilt)
    assert rebuilt.evidence is None
    said = [codec.parse_reply(sample.input_ids[a:b]).content for a, b in sample.spans]
    assert said == ["It is 144.", "the lazy dog"]
    assert all(sample.input_ids[end - 1] == codec.stop_ids[0] for _, end in sample.spans)
    text = codec._tokenizer.decode(list(sample.input_ids), skip_special_tokens=False)
    assert text == codec.render_text((USER, SAID, MORE), ()) + "the lazy dog<|im_end|>"
    assert (sample.id, sample.conversation, sample.provider) == ("p1-0", "p1", "imported")
    assert sample.completion_tokens_billed is None


def test_samples_of_one_upstream_conversation_share_its_name(
    codec: ChatML, make_prompt: Ask
) -> None:
    prompt = make_prompt(messages=(USER, SAID), conversation="abc")
    (rebuilt,) = rebuild_trajectory(prompt, codec)
    assert kept(rebuilt).conversation == "abc"


class Forgetful:
    """A codec whose template tells only the last message, as Kimi's rewrites its history."""

    stop_ids: tuple[int, ...] = (2,)
    special_ids: frozenset[int] = frozenset({1, 2})
    markup_ids: frozenset[int] = frozenset()
    vocab_size: int = 300

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return [1, *messages[-1]["content"].encode()]

    def normalise(self, reply: ReplyParts) -> ReplyParts:
        return reply

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        return [*(reply.content or "").encode(), 2]

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        return ReplyParts(content=bytes(ids[:-1]).decode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])

    def id_of(self, token: bytes) -> int | None:
        return token[0] if len(token) == 1 else None

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        return None

    def has_special_text(self, text: str) -> bool:
        return False


def test_a_template_that_rewrites_history_gives_a_sample_a_turn(make_prompt: Ask) -> None:
    prompt = make_prompt(messages=(USER, SAID, MORE, DOG))
    samples = [kept(r) for r in rebuild_trajectory(prompt, Forgetful())]
    assert [s.id for s in samples] == ["p1-0", "p1-1"]
    assert [len(s.spans) for s in samples] == [1, 1]
    assert {s.conversation for s in samples} == {"p1"}
    ((start, end),) = samples[1].spans
    assert bytes(samples[1].input_ids[start : end - 1]) == b"the lazy dog"
    assert bytes(samples[1].input_ids[1:start]) == b"and the dog?"


@pytest.mark.parametrize(
    ("messages", "rule", "detail"),
    [
        ((USER,), "no_reply", "1 messages"),
        ((USER, SAID | {"content": ""}), "empty_reply", "message 1"),
        ((USER, SAID | {"reasoning": "hm"}), "not_of_this_format", "reasoning"),
        ((USER, SAID | {"tool_calls": [{"id": "x"}]}), "not_of_this_format", "tool_calls"),
    ],
)
def test_a_conversation_that_cannot_be_rebuilt_is_rejected_whole(
    codec: ChatML, make_prompt: Ask, messages: tuple[Message, ...], rule: str, detail: str
) -> None:
    (rebuilt,) = rebuild_trajectory(make_prompt(messages=messages), codec)
    assert rejected(rebuilt).rule == rule
    assert detail in rejected(rebuilt).detail


def test_what_a_template_refuses_is_a_rejected_row_not_an_end(
    rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    class Refusing(Forgetful):
        def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
            raise EyasError("chat template: refuses")

    prompt = make_prompt(messages=(USER, SAID))
    assert rejected(rebuild_trajectory(prompt, Refusing())[0]).rule == "not_of_this_format"
    response = make_response(make_prompt())
    rebuilt = rebuild_response(prompt, response, Refusing(), rules)
    assert rejected(rebuilt).detail == "chat template: refuses"


@pytest.mark.skipif(not ANCHOR.is_dir(), reason="../shared/anchor is not on this machine")
@pytest.mark.skipif(not (TARGET / "tokenizer.json").is_file(), reason="models/target is not built")
def test_real_replies_that_pass_the_bill_have_the_sampled_ids(
    rules: Validate, make_prompt: Ask, make_response: Make
) -> None:
    codec = load_chatml(TARGET)
    if codec.vocab_size != 49152:
        pytest.skip("models/target is not SmolLM2")
    rows = [json.loads(line) for line in (ANCHOR / "train.jsonl").read_bytes().splitlines()]
    prompt = make_prompt()
    rebuilt = []
    for row in rows:
        ids = tuple(row["reply_ids"])
        finish = "stop" if ids[-1] in codec.stop_ids else "length"
        response = make_response(
            prompt,
            content=codec.parse_reply(ids).content,
            finish_reason=finish,
            prompt_tokens=len(codec.render_prompt(prompt.messages, ())),
            completion_tokens=len(ids),
            true_ids=ids,
        )
        rebuilt.append(rebuild_response(prompt, response, codec, rules))
    metrics = truth_metrics(rebuilt)
    assert metrics["replies_of_known_ids"] == 260
    assert metrics["identical_share"] >= 0.96  # the sampler spelled 10 of 260 in other tokens
    assert metrics["kept_identical_share"] >= 0.99
