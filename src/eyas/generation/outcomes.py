"""Decide from status, headers and body what became of a request.

HTTP 200 does not mean success: an error may stand in the body, in a choice, or as a finish reason.
What has no known shape is its own class, recorded whole, never guessed.
Source: shared/facts/kimi_openrouter.md sections 6 and 7 (client bug reports, each a test case).
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from eyas.generation.faults import Fault, fault_of, retry_after_s
from eyas.generation.pieces import read_pieces
from eyas.records import Piece

FINISHED = ("stop", "length", "tool_calls")
_DETAIL_CHARS = 500
_ABSURD = 1e12  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete answer, as the endpoint gave it."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    native_finish_reason: str | None
    generation_id: str
    provider: str
    model: str
    true_ids: tuple[int, ...] | None  # local endpoint only
    pieces: tuple[Piece, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What to do: `ok` keep | `retry` | `pause` all | `stop` the run | `reject` this row."""

    kind: str
    reason: str  # the class that is counted
    detail: str = ""
    retry_after_s: float | None = None
    reply: Reply | None = None  # of `ok` only
    usage: Mapping[str, Any] | None = None  # as reported; None if absent
    cost_usd: float = 0.0
    maybe_billed: bool = False  # sent, and no answer came back
    raw: str | None = None  # the whole body of an unknown shape
    provider: str = ""  # who failed, where it is told
    generation_id: str = ""  # where it is known: what GET /generation is asked for

    @property
    def prompt_tokens(self) -> int | None:
        """Return the prompt tokens billed; None if nothing was reported."""
        return _count(self.usage, "prompt_tokens")

    @property
    def completion_tokens(self) -> int | None:
        """Return the completion tokens billed; None if nothing was reported."""
        return _count(self.usage, "completion_tokens")


class _UnknownShapeError(Exception):
    """A body that fits no form known here; says which part."""


def classify(status: int, headers: Mapping[str, str], body: str, *, now_s: float = 0.0) -> Outcome:
    """Classify one HTTP answer; `now_s` (Unix time) resolves a Retry-After that is a date."""
    lowered = {name.lower(): value for name, value in headers.items()}
    wait_s = retry_after_s(lowered, now_s)
    text = strip_keep_alive(body)
    try:
        value = _parse(text)
    except (ValueError, RecursionError) as error:
        return _unparsable(status, text, str(error), wait_s)
    try:
        outcome = _classify_json(status, value, wait_s)
        return outcome if outcome.reply else dataclasses.replace(outcome, provider=_who(value))
    except _UnknownShapeError as error:
        usage = value.get("usage") if isinstance(value, dict) else None
        return Outcome(
            kind="reject",
            reason="unknown_shape",
            detail=f"HTTP {status}: {error}",
            usage=usage if isinstance(usage, dict) else None,
            cost_usd=cost_of(usage),
            raw=body,
        )


def _parse(text: str) -> Any:
    """Parse as strictly as JSON is, else as kindly as Python does: the answer has been paid for.

    A reply cut inside an emoji holds half a surrogate pair, a careless server writes raw control
    characters or NaN; what has no UTF-8 becomes U+FFFD, so that the journal can hold it.
    Raises: ValueError.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        value = json.loads(text, strict=False)
        kind = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return json.loads(kind.decode("utf-16", "replace"))


def lost(reason: str, detail: str, *, maybe_billed: bool, generation_id: str = "") -> Outcome:
    """Return the outcome of a request that brought no whole HTTP answer."""
    return Outcome(
        kind="retry",
        reason=reason,
        detail=detail,
        maybe_billed=maybe_billed,
        generation_id=generation_id,
    )


def strip_keep_alive(body: str) -> str:
    """Drop the blank lines and SSE comments that a slow endpoint sends before its JSON."""
    text = body.lstrip("\ufeff \t\r\n")
    while text.startswith(":"):
        text = text.partition("\n")[2].lstrip()
    return text


def cost_of(usage: Any) -> float:
    """Return the dollars of a `usage`; the provider's own bill counts only under BYOK."""
    if not isinstance(usage, dict):
        return 0.0
    details = usage.get("cost_details")
    upstream = details.get("upstream_inference_cost") if isinstance(details, dict) else None
    return _number(usage.get("cost")) + (_number(upstream) if usage.get("is_byok") else 0.0)


def _unparsable(status: int, text: str, error: str, wait_s: float | None) -> Outcome:
    detail = f"HTTP {status}: {error}: {text[:_DETAIL_CHARS]}"
    if 200 <= status < 300:
        reason = "unparsable_body" if text else "empty_body"
        return Outcome(kind="retry", reason=reason, detail=detail, maybe_billed=True)
    if status == 403:  # no API error: Cloudflare's own page
        return Outcome(kind="retry", reason="blocked", detail=detail, retry_after_s=wait_s)
    fault = fault_of(status, {})
    raw = text if fault.reason == "unknown_shape" else None
    return _failed(fault, f"HTTP {status}: {text[:_DETAIL_CHARS]}", wait_s, None, raw)


def _classify_json(status: int, value: Any, wait_s: float | None) -> Outcome:
    if not isinstance(value, dict):
        if not 200 <= status < 300:
            return _of_status(status, value, wait_s, None)
        raise _UnknownShapeError(f"the body is a {type(value).__name__}, not an object")
    usage = value.get("usage")
    if value.get("error"):
        return _from_error(status, value["error"], wait_s, usage)
    if not 200 <= status < 300:
        return _of_status(status, value, wait_s, usage)
    choices = value.get("choices")
    if choices is None:
        return _retry("no_choices", f"keys {sorted(value)}", usage)
    if not isinstance(choices, list):
        raise _UnknownShapeError(f"choices is a {type(choices).__name__}")
    if not choices:
        return _retry("empty_choices", "choices: []", usage)
    return _from_choice(status, value, choices[0], wait_s)


def _of_status(status: int, value: Any, wait_s: float | None, usage: Any) -> Outcome:
    fault, text = fault_of(status, {}), json.dumps(value)
    raw = text if fault.reason == "unknown_shape" else None
    return _failed(fault, f"HTTP {status}: {text[:_DETAIL_CHARS]}", wait_s, usage, raw)


def _from_error(status: int, error: Any, wait_s: float | None, usage: Any) -> Outcome:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    fault = fault_of(status, fields)
    raw = json.dumps(error) if fault.reason == "unknown_shape" else None
    wait_s = wait_s if wait_s is not None else fault.retry_after_s
    return _failed(fault, _words(fields), wait_s, usage, raw)


def _from_choice(status: int, value: dict[str, Any], choice: Any, wait_s: float | None) -> Outcome:
    usage = value.get("usage")
    if not isinstance(choice, dict):
        raise _UnknownShapeError(f"choices[0] is a {type(choice).__name__}")
    if choice.get("error"):
        return _from_error(status, choice["error"], wait_s, usage)
    match _finish(choice):
        case "error":
            return _retry("finish_error", "finish_reason 'error'", usage)
        case "content_filter":
            detail = "finish_reason 'content_filter'"
            return _failed(Fault("reject", "content_filter"), detail, None, usage)
        case None:
            return _retry("no_finish_reason", "finish_reason null", usage)
        case reason if reason not in FINISHED:
            raise _UnknownShapeError(f"finish_reason {reason!r}")
    reply = _reply(value, choice)
    if _is_refusal(choice["message"], reply):
        return _failed(Fault("reject", "refusal"), str(choice["message"]["refusal"]), None, usage)
    known = usage if isinstance(usage, dict) else None
    silent = not (reply.content or reply.reasoning or reply.tool_calls)
    if silent and not _count(known, "completion_tokens"):
        return _retry("empty_answer", f"finish_reason '{reply.finish_reason}', no text", usage)
    reason = "truncated" if reply.finish_reason == "length" else "complete"
    return Outcome(kind="ok", reason=reason, reply=reply, usage=known, cost_usd=cost_of(usage))


def _reply(value: dict[str, Any], choice: dict[str, Any]) -> Reply:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise _UnknownShapeError(f"message is a {type(message).__name__}")
    native, ids = choice.get("native_finish_reason"), choice.get("token_ids")
    return Reply(
        content=_content(message.get("content")),
        reasoning=_reasoning(message),
        tool_calls=_tool_calls(message.get("tool_calls")),
        finish_reason=str(_finish(choice)),
        native_finish_reason=None if native is None else str(native),
        generation_id=str(value.get("id") or ""),
        provider=str(value.get("provider") or ""),
        model=str(value.get("model") or ""),
        true_ids=tuple(ids) if isinstance(ids, list) else None,
        pieces=read_pieces(choice),
    )


def _finish(choice: dict[str, Any]) -> Any:
    reason = choice.get("finish_reason")
    return reason.lower() if isinstance(reason, str) else reason


def _is_refusal(message: dict[str, Any], reply: Reply) -> bool:
    said = reply.content or reply.reasoning or reply.tool_calls
    return bool(message.get("refusal")) and not said


def _content(value: Any) -> str | None:
    """Return the text; parts are joined with nothing between, as chat templates join them."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    parts = [part for part in parts if not _thinks(part)]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise _UnknownShapeError("content has a part that is no text")
        texts.append(text)
    return "".join(texts)


def _reasoning(message: dict[str, Any]) -> str | None:
    """Return the reasoning from whichever of the three fields holds it."""
    content = message.get("content")
    within = content if isinstance(content, list) else []
    thought = [_text_of(part) for part in within if _thinks(part)]
    details = message.get("reasoning_details")
    parts = [d for d in details if isinstance(d, dict)] if isinstance(details, list) else []
    texts = [d.get("text") for d in parts if d.get("type") == "reasoning.text"]
    joined = "".join(text for text in texts if isinstance(text, str))
    fields = (message.get("reasoning"), joined, message.get("reasoning_content"), "".join(thought))
    for value in fields:
        if value and not isinstance(value, str):
            raise _UnknownShapeError(f"reasoning is a {type(value).__name__}")
        if value:
            return value
    return None


def _thinks(part: Any) -> bool:
    """Tell whether a part of the content is reasoning."""
    return isinstance(part, dict) and str(part.get("type")).startswith(("reasoning", "thinking"))


def _text_of(part: dict[str, Any]) -> str:
    text = part.get("text") or part.get("thinking") or part.get("reasoning")
    return text if isinstance(text, str) else ""


def _tool_calls(value: Any) -> tuple[dict[str, Any], ...]:
    calls = value or []
    if not isinstance(calls, list):
        raise _UnknownShapeError(f"tool_calls is a {type(calls).__name__}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _UnknownShapeError("a tool call without function.name")
    return tuple(calls)


def _who(value: Any) -> str:
    """Return the provider that an error, or a failed answer, names; empty if none."""
    if not isinstance(value, dict):
        return ""
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    error = value.get("error") or (first.get("error") if isinstance(first, dict) else None)
    metadata = error.get("metadata") if isinstance(error, dict) else None
    named = metadata.get("provider_name") if isinstance(metadata, dict) else None
    return str(named or value.get("provider") or "")


def _failed(
    fault: Fault, detail: str, wait_s: float | None, usage: Any, raw: str | None = None
) -> Outcome:
    return Outcome(
        kind=fault.kind,
        reason=fault.reason,
        detail=detail,
        retry_after_s=wait_s,
        usage=usage if isinstance(usage, dict) else None,
        cost_usd=cost_of(usage),
        raw=raw,
    )


def _retry(reason: str, detail: str, usage: Any) -> Outcome:
    return _failed(Fault("retry", reason), detail, None, usage)


def _words(error: Mapping[str, Any]) -> str:
    """Return an error's code, message and what the provider itself said, cut to a line or two."""
    metadata = error.get("metadata")
    inner = metadata.get("raw") if isinstance(metadata, dict) else None
    parts = [error.get("code"), error.get("message"), inner]
    return ": ".join(str(part) for part in parts if part)[:_DETAIL_CHARS]


def _count(usage: Mapping[str, Any] | None, name: str) -> int | None:
    value = _number(usage.get(name), none=-1.0) if usage else -1.0
    return int(value) if 0 <= value < _ABSURD else None


def _number(value: Any, none: float = 0.0) -> float:
    """Return a number, also one in quotes; `none` for anything else, NaN and infinity included."""
    try:
        number = none if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return none
    return number if math.isfinite(number) else none
