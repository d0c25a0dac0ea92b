"""Every payload of shared/facts/kimi_openrouter.md section 7, and what else a body can be."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.generation.outcomes import Outcome, classify, lost

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, "cost": 0.25}


def choice(finish: Any = "stop", **fields: Any) -> dict[str, Any]:
    message = fields.pop("message", {"role": "assistant", "content": "hello"})
    return {"index": 0, "finish_reason": finish, "message": message} | fields


def answer(*choices: Any, **fields: Any) -> dict[str, Any]:
    head = {"id": "gen-1", "provider": "Moonshot AI", "model": "moonshotai/kimi-k2.5-0127"}
    return head | {"choices": list(choices), "usage": USAGE} | fields


def said(finish: str = "stop", **message: Any) -> dict[str, Any]:
    return answer(choice(finish, message={"role": "assistant", **message}))


def error(code: Any, message: str = "no", **fields: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, **fields}, "user_id": "u"}


def judge(
    status: int, value: object, headers: dict[str, str] | None = None, *, now_s: float = 0.0
) -> Outcome:
    body = value if isinstance(value, str) else orjson.dumps(value).decode()
    return classify(status, headers or {}, body, now_s=now_s)


CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_TEXT = " <|tool_calls_section_begin|> <|tool_call_begin|> functions.bash:0 {}"
IN_FLIGHT = {"metadata": {"limit_source": "openrouter_in_flight_budget"}}
KEY_LIMIT = {"limit_source": "openrouter_key_limit", "resets_at": "x"}
FLAGGED = {"reasons": ["violence"], "flagged_input": "...", "provider_name": "P"}
POOL = {"raw": "slow down", "provider_name": "P", "limit_source": "upstream_provider_shared_pool"}
PARTIAL = choice("stop", error={"code": 502, "metadata": {"error_type": "provider_unavailable"}})
CLOUDFLARE = "<html><title>522: Connection timed out</title></html>"

# what, status, body, kind, reason
CASES: list[tuple[str, int, Any, str, str]] = [
    ("answer", 200, answer(choice()), "ok", "complete"),
    ("truncated", 200, said("length", content="half an ans"), "ok", "truncated"),
    ("1 error inside 200", 200, {"id": "gen-1"} | error(502, "Upstream"), "retry", "server_error"),
    ("2 no choices", 200, {"id": "gen-1"}, "retry", "no_choices"),
    ("2 choices null", 200, answer() | {"choices": None}, "retry", "no_choices"),
    ("3 choices empty", 200, answer(), "retry", "empty_choices"),
    ("4 finish error", 200, answer(choice("error")), "retry", "finish_error"),
    ("5 native null", 200, answer(choice(native_finish_reason=None)), "ok", "complete"),
    ("7 error in the choice", 200, answer(PARTIAL), "retry", "server_error"),
    ("8 blank lines first", 200, "\n\n \n" + orjson.dumps(said(content="a")).decode(), "ok",
     "complete"),
    ("8 comment lines first", 200, ": OPENROUTER PROCESSING\n\n: x\n"
     + orjson.dumps(said(content="a")).decode(), "ok", "complete"),
    ("8 nothing but comments", 200, ": OPENROUTER PROCESSING\n\n:", "retry", "empty_body"),
    ("10 cut body", 200, '{"id": "gen-1", "choices": [{"mess', "retry", "unparsable_body"),
    ("10 empty body", 200, "", "retry", "empty_body"),
    ("13 cut in reasoning", 200, said("length", content=None, reasoning=" The user", tool_calls=[]),
     "ok", "truncated"),
    ("17 tool block in reasoning", 200, said(content=None, reasoning=TOOL_TEXT), "ok", "complete"),
    ("20 tool block in content", 200, said(content=TOOL_TEXT), "ok", "complete"),
    ("21 content ends in im_end", 200, said(content="hi<|im_end|>"), "ok", "complete"),
    ("22 loop in reasoning", 200, said(content=None, reasoning="!!!!!!!!"), "ok", "complete"),
    ("23 content filter", 200, answer(choice("content_filter")), "reject", "content_filter"),
    ("26 can only afford", 402, error(402, "can only afford 30104",
     metadata={"previous_errors": []}), "stop", "out_of_credits"),
    ("27 upstream 429", 429, error(429, "Provider returned error", metadata=POOL), "retry",
     "rate_limited"),
    ("30 reasoning missing", 400, error(400, "[Moonshot AI] thinking is enabled but ..."), "reject",
     "bad_request"),
    ("tool calls", 200, said("tool_calls", content=None, tool_calls=[CALL]), "ok", "complete"),
    ("content in parts", 200, said(content=[{"type": "text", "text": "a"}]), "ok", "complete"),
    ("only the end token", 200, said(content=""), "ok", "complete"),
    ("nothing, not billed", 200, said(content="") | {"usage": None}, "retry", "empty_answer"),
    ("finish null", 200, answer(choice(None)), "retry", "no_finish_reason"),
    ("error as text", 200, {"error": "busy"}, "retry", "error_without_code"),
    ("bad key", 401, error(401, "No auth credentials found"), "stop", "unauthorized"),
    ("credits", 402, error(402, "Insufficient credits"), "stop", "out_of_credits"),
    ("in-flight hold", 402, error(402, **IN_FLIGHT), "pause", "in_flight_budget"),
    ("in-flight by type", 402, error(402, metadata={"error_type": "in_flight_budget_exhausted"}),
     "pause", "in_flight_budget"),
    ("larger than the budget", 402, error(402, availability={"code": "weight_exceeds_budget"},
     **IN_FLIGHT), "stop", "request_exceeds_budget"),
    ("402 key limit", 402, error(402, metadata=KEY_LIMIT), "stop", "key_limit"),
    ("403 key limit", 403, error(403, metadata=KEY_LIMIT), "stop", "key_limit"),
    ("403 limit in words", 403, error(403, "Key limit exceeded (total)"), "stop", "key_limit"),
    ("403 moderation", 403, error(403, "flagged", metadata=FLAGGED), "reject", "moderation"),
    ("403 other", 403, error(403, "Only management keys"), "reject", "forbidden"),
    ("403 page", 403, CLOUDFLARE, "retry", "blocked"),
    ("404", 404, error(404, "No endpoints found"), "reject", "not_found"),
    ("408", 408, error(408), "retry", "timeout"),
    ("409", 409, error(409), "retry", "conflict"),
    ("413", 413, error(413), "reject", "too_large"),
    ("422", 422, error(422), "reject", "unprocessable"),
    ("425", 425, error(425), "retry", "too_early"),
    ("429 page", 429, "slow down", "retry", "rate_limited"),
    ("500", 500, error(500), "retry", "server_error"),
    ("502 page", 502, "<html>", "retry", "server_error"),
    ("503", 503, error(503), "retry", "overloaded"),
    ("522 page", 522, CLOUDFLARE, "retry", "server_error"),
    ("524 without error", 524, {"message": "timeout"}, "retry", "server_error"),
    ("529", 529, error(529), "retry", "overloaded"),
    ("context by type", 400, error(400, metadata={"error_type": "context_length_exceeded"}),
     "reject", "context_length"),
    ("context in words", 400, error(400, "maximum context length is 8192"), "reject",
     "context_length"),
    ("type over code", 502, error(502, metadata={"error_type": "provider_overloaded"}), "retry",
     "overloaded"),
    ("type as code", 200, error("rate_limit_exceeded"), "retry", "rate_limited"),
    ("new form", 200, {"error": {"http_status": 503, "error_type": "provider_overloaded"}},
     "retry", "overloaded"),
    ("payment by type", 200, error(None, error_type="payment_required"), "stop", "out_of_credits"),
    ("refusal", 400, error(400, metadata={"error_type": "refusal"}), "reject", "refusal"),
    ("retryable 404", 404, error(404, availability={"retryable": True}), "retry", "not_found"),
    ("hopeless 502", 502, error(502, availability={"retryable": False}), "reject", "server_error"),
    ("money is not retryable", 402, error(402, availability={"retryable": True}), "stop",
     "out_of_credits"),
    ("teapot", 418, error(418), "reject", "unknown_shape"),
    ("redirect page", 302, "<html>", "reject", "unknown_shape"),
    ("redirect object", 302, {"to": "x"}, "reject", "unknown_shape"),
    ("a list", 200, [1], "reject", "unknown_shape"),
    ("choices an object", 200, answer() | {"choices": {"a": 1}}, "reject", "unknown_shape"),
    ("choice a string", 200, answer("hello"), "reject", "unknown_shape"),
    ("new finish reason", 200, answer(choice("paused")), "reject", "unknown_shape"),
    ("finish reason a list", 200, answer(choice(["stop"])), "reject", "unknown_shape"),
    ("no message", 200, answer({"finish_reason": "stop", "text": "a"}), "reject", "unknown_shape"),
    ("picture in content", 200, said(content=[{"type": "image_url"}]), "reject", "unknown_shape"),
    ("reasoning an object", 200, said(content="a", reasoning={"a": 1}), "reject", "unknown_shape"),
    ("calls an object", 200, said(content="a", tool_calls={"a": 1}), "reject", "unknown_shape"),
    ("call without a name", 200, said(content="a", tool_calls=[{"id": "x"}]), "reject",
     "unknown_shape"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_every_known_payload_has_its_class(status: int, body: Any, kind: str, reason: str) -> None:
    outcome = judge(status, body)
    assert (outcome.kind, outcome.reason) == (kind, reason)
    assert (outcome.reply is not None) == (kind == "ok")
    if reason == "unknown_shape":
        assert outcome.raw


def told(*entries: Any) -> dict[str, Any]:
    return answer(choice(logprobs={"content": list(entries)}))


def test_pieces_are_texts_or_the_bytes_that_are_none() -> None:
    entries = [
        {"token": " a", "bytes": [32, 97], "logprob": -0.1, "top_logprobs": []},
        {"token": "b", "bytes": None, "logprob": 0},
        {"token": "c"},
        {"token": "\\xf0", "bytes": [240]},
        {"token": "\ufffd", "bytes": [239, 191, 189]},
        {"token": "", "bytes": []},
        {"token": "token_id:7", "bytes": [32, 97]},
    ]
    outcome = judge(200, told(*entries))
    assert outcome.reply is not None
    assert outcome.reply.pieces == (" a", "b", "c", (240,), "\ufffd", "", "token_id:7")


@pytest.mark.parametrize(
    "logprobs",
    [
        None, [], {}, "x", 7, {"content": None}, {"content": {}}, {"content": "ab"},
        {"content": 3}, {"content": []}, {"content": [None]}, {"content": ["a"]},
        {"content": [{}]}, {"content": [{"token": None, "bytes": [97]}]},
        {"content": [{"token": "a", "bytes": [256]}]}, {"content": [{"token": "a", "bytes": 5}]},
        {"content": [{"token": "a", "bytes": ["b"]}]}, {"content": [{"token": "a", "bytes": "b"}]},
        {"content": [{"token": "a", "bytes": [1e9]}]}, {"tokens": ["a"], "token_logprobs": [0]},
        {"content": [{"token": "a"}, {"token": 1}]}, {"content": [{"token": "a", "bytes": [-1]}]},
    ],
)  # fmt: skip
def test_logprobs_of_another_form_lose_no_answer(logprobs: Any) -> None:
    outcome = judge(200, answer(choice(logprobs=logprobs)))
    assert outcome.reply is not None
    assert (outcome.reply.content, outcome.reply.pieces) == ("hello", None)


def test_an_answer_keeps_what_the_endpoint_said_to_the_letter() -> None:
    message = {"content": " hi<|im_end|>", "reasoning": "\n\nhm", "tool_calls": [CALL]}
    body = answer(choice("tool_calls", message=message, native_finish_reason="eos"))
    body["choices"][0]["token_ids"] = [5, 6]
    outcome = judge(200, body)
    assert outcome.reply is not None
    assert outcome.reply.content == " hi<|im_end|>"
    assert outcome.reply.reasoning == "\n\nhm"
    assert outcome.reply.tool_calls == (CALL,)
    assert outcome.reply.native_finish_reason == "eos"
    assert outcome.reply.true_ids == (5, 6)
    assert (outcome.reply.provider, outcome.reply.generation_id) == ("Moonshot AI", "gen-1")
    assert outcome.reply.model == "moonshotai/kimi-k2.5-0127"
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (10, 5)
    assert outcome.cost_usd == 0.25


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "a"},
                                {"type": "reasoning.encrypted", "data": "x"},
                                {"type": "reasoning.text", "text": "b"}]}, "ab"),
        ({"reasoning": "", "reasoning_details": [], "reasoning_content": "c"}, "c"),
        ({}, None),
    ],
)  # fmt: skip
def test_reasoning_is_read_from_all_three_fields(message: dict[str, Any], reasoning: str) -> None:
    outcome = judge(200, said(content="x", **message))
    assert outcome.reply is not None
    assert outcome.reply.reasoning == reasoning


def test_parts_of_content_are_joined_with_nothing_between() -> None:
    outcome = judge(200, said(content=[{"type": "text", "text": "a "}, "b"]))
    assert outcome.reply is not None
    assert outcome.reply.content == "a b"


@pytest.mark.parametrize(
    ("usage", "usd"),
    [
        ({"cost": 0.5}, 0.5),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.036}}, 0.036),
        ({"cost": 0.1, "is_byok": False, "cost_details": {"upstream_inference_cost": 9}}, 0.1),
        ({"cost": None, "is_byok": True, "cost_details": None}, 0.0),
        (None, 0.0),
    ],
)
def test_the_providers_bill_counts_only_under_byok(usage: Any, usd: float) -> None:
    assert judge(200, answer(choice(), usage=usage)).cost_usd == usd


def test_counts_that_were_not_reported_are_unknown_not_zero() -> None:
    outcome = judge(200, answer(choice(), usage={"prompt_tokens": None, "completion_tokens": -1}))
    assert outcome.kind == "ok"
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (None, None)


def test_a_failed_attempt_keeps_its_cost() -> None:
    assert judge(200, answer(choice("error"))).cost_usd == 0.25
    assert judge(200, answer(choice("new"))).cost_usd == 0.25


@pytest.mark.parametrize(
    ("headers", "extra", "wait_s"),
    [
        ({"Retry-After": "89"}, {}, 89.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, {}, 40.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 -0000"}, {}, 0.0),
        ({"retry-after": "soon"}, {}, None),
        ({}, {"availability": {"retry_after": 7}}, 7.0),
        ({"retry-after": "-1"}, {}, None),
        ({}, {}, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(
    headers: dict[str, str], extra: dict[str, Any], wait_s: float | None
) -> None:
    assert judge(429, error(429, **extra), headers, now_s=60.0).retry_after_s == wait_s


def test_an_unknown_shape_is_kept_whole() -> None:
    body = orjson.dumps(answer(choice("paused"), note="x" * 5000)).decode()
    assert judge(200, body).raw == body


def test_what_the_provider_said_stands_in_the_detail() -> None:
    outcome = judge(429, error(429, "Provider returned error", metadata=POOL))
    assert outcome.detail == "429: Provider returned error: slow down"


def test_a_body_cut_after_it_was_billed_is_maybe_billed() -> None:
    assert judge(200, '{"id":').maybe_billed
    assert lost("deadline", "", maybe_billed=True).maybe_billed
    assert lost("connect", "", maybe_billed=False).kind == "retry"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "choices", "message", "usage", "code", "metadata", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(logprobs=st.one_of(JSON, st.fixed_dictionaries({"content": JSON})))
def test_no_logprobs_at_all_lose_an_answer(logprobs: Any) -> None:
    reply = classify(200, {}, json.dumps(answer(choice(logprobs=logprobs)))).reply
    assert reply is not None
    assert reply.content == "hello"


@given(
    entries=st.lists(
        st.fixed_dictionaries({"token": st.one_of(st.text(), JSON)}, optional={"bytes": JSON})
    )
)
def test_no_tokens_of_another_form_lose_an_answer(entries: list[Any]) -> None:
    reply = classify(200, {}, json.dumps(told(*entries))).reply
    assert reply is not None
    assert reply.pieces is None or len(reply.pieces) == len(entries)


@given(status=st.sampled_from([200, 204, 302, 400, 402, 403, 429, 500]), value=JSON)
def test_no_json_at_all_makes_it_stumble(status: int, value: Any) -> None:
    try:
        body = orjson.dumps(value).decode()
    except TypeError:  # integers beyond 64 bits
        return
    assert classify(status, {}, body).kind in ("ok", "retry", "pause", "stop", "reject")


@given(text=st.text(max_size=40))
def test_no_text_at_all_makes_it_stumble(text: str) -> None:
    assert classify(200, {}, text).kind in ("retry", "reject")


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (503, "null", "retry", "overloaded"),
        (429, "[1]", "retry", "rate_limited"),
        (500, '"Internal Server Error"', "retry", "server_error"),
        (401, "null", "stop", "unauthorized"),
        (402, {"error": {"message": "in-flight budget reached"}}, "pause", "in_flight_budget"),
        (200, {"error": {"error": {"code": 429, "message": "x"}}}, "retry", "rate_limited"),
        (200, {"error": {"code": 429.0}}, "retry", "rate_limited"),
        (200, {"error": {"status": 429}}, "retry", "rate_limited"),
        (200, {"error": {"message": "Rate limit exceeded"}}, "retry", "rate_limited"),
        (200, {"error": {"code": "insufficient_quota"}}, "stop", "out_of_credits"),
        (200, {"error": {"code": "invalid_api_key"}}, "stop", "unauthorized"),
        (200, {"error": {"code": "9" * 5000}}, "retry", "error_without_code"),
        (400, {"error": {"code": "content_filter"}}, "reject", "moderation"),
        (400, {"error": {"message": "considered high risk"}}, "reject", "moderation"),
        (400, {"error": {"message": "context_length_exceeded"}}, "reject", "context_length"),
        (400, {"error": {"metadata": {"raw": "context length"}}}, "reject", "context_length"),
    ],
)  # fmt: skip
def test_errors_in_odd_dress_keep_their_class(
    status: int, body: Any, kind: str, reason: str
) -> None:
    outcome = judge(status, body)
    assert (outcome.kind, outcome.reason) == (kind, reason)


def test_a_paid_answer_is_kept_whatever_its_json_is_like() -> None:
    text = orjson.dumps(answer(choice("STOP", message={"content": "HERE"}))).decode()
    for broken, content in (("a\\ud83d", "a\ufffd"), ("a\tb\x01", "a\tb\x01"), ("😀", "😀")):
        outcome = classify(200, {}, text.replace("HERE", broken))
        assert outcome.reply is not None
        assert (outcome.reply.content, outcome.reply.finish_reason) == (content, "stop")
        assert orjson.dumps(outcome.reply.content)
    assert classify(200, {}, text.replace("{", '{"logprob": NaN, ', 1)).reply is not None


def test_counts_in_quotes_are_counts_and_absurd_ones_are_none() -> None:
    usage = {"prompt_tokens": "12", "completion_tokens": 1e300, "cost": "0.25"}
    outcome = judge(200, answer(choice(), usage=usage))
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (12, None)
    assert outcome.cost_usd == 0.25


def test_reasoning_among_the_contents_parts_is_reasoning() -> None:
    parts = [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "yes"}]
    outcome = judge(200, said(content=parts))
    assert outcome.reply is not None
    assert (outcome.reply.reasoning, outcome.reply.content) == ("hm", "yes")


def test_a_refusal_without_words_is_no_answer() -> None:
    outcome = judge(200, said(content=None, refusal="I cannot help with that"))
    assert (outcome.kind, outcome.reason) == ("reject", "refusal")
