"""Decide what an error of the chat API means: wait, try again, stop, or give the row up.

Source: shared/facts/kimi_openrouter.md section 6.3, shared/facts/generation.md section 3.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

# A row with one of these is not asked again: the endpoint would say the same, or has been paid.
FINAL = frozenset(
    {"content_filter", "context_length", "moderation", "refusal", "too_large", "unknown_shape"}
)
OVERLOAD = frozenset({"rate_limited", "overloaded"})  # send less; costs a row no attempt

_OF_STATUS = {
    400: ("reject", "bad_request"),
    401: ("stop", "unauthorized"),
    402: ("stop", "out_of_credits"),
    403: ("reject", "forbidden"),
    404: ("reject", "not_found"),
    408: ("retry", "timeout"),
    409: ("retry", "conflict"),
    413: ("reject", "too_large"),
    422: ("reject", "unprocessable"),
    425: ("retry", "too_early"),
    429: ("retry", "rate_limited"),
    503: ("retry", "overloaded"),
    529: ("retry", "overloaded"),
}
_OF_TYPE = {
    "content_filter": ("reject", "moderation"),
    "content_policy_violation": ("reject", "moderation"),
    "context_length_exceeded": ("reject", "context_length"),
    "insufficient_quota": ("stop", "out_of_credits"),
    "invalid_api_key": ("stop", "unauthorized"),
    "max_tokens_exceeded": ("reject", "bad_request"),
    "provider_overloaded": ("retry", "overloaded"),
    "provider_unavailable": ("retry", "server_error"),
    "rate_limit_exceeded": ("retry", "rate_limited"),
    "refusal": ("reject", "refusal"),
    "server": ("retry", "server_error"),
    "timeout": ("retry", "timeout"),
}
_MONEY = ("limit", "budget", "credit")
_FILTERED = ("content_filter", "content filter", "considered high risk", "content policy")


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do about an error, and the class it is counted under."""

    kind: str  # retry | pause | stop | reject
    reason: str
    retry_after_s: float | None = None


def fault_of(status: int, error: Mapping[str, Any]) -> Fault:
    """Judge an `error` object, or with an empty one the bare status.

    The error's own type and code count before the status, `availability.retryable` before both;
    but money and the key are judged first: no provider's hint may keep a run alive without them.
    """
    inner = _mapping(error.get("error"))  # some wrap it twice
    error = {**inner, **{key: value for key, value in error.items() if key != "error"}}
    metadata = _mapping(error.get("metadata"))
    availability = _mapping(error.get("availability")) or _mapping(metadata.get("availability"))
    error_type = _type(metadata, error)
    code = _code(status, error)
    wait_s = _seconds(availability.get("retry_after"))
    if code in (401, 402, 403) or error_type == "payment_required":
        kind, reason = _access_fault(code, error, metadata, availability)
    elif error_type in _OF_TYPE:
        kind, reason = _OF_TYPE[error_type]
    else:
        kind, reason = _status_fault(code, error, str(metadata.get("raw") or ""))
    if kind in ("retry", "reject") and reason not in FINAL:
        retryable = availability.get("retryable")
        if isinstance(retryable, bool):
            kind = "retry" if retryable else "reject"
    return Fault(kind, reason, wait_s)


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Return the seconds that Retry-After asks for, given in seconds or as a date.

    Header names are lower case; `now_s` is Unix time.
    """
    text = headers.get("retry-after", "").strip()
    seconds = _seconds(text)
    if seconds is not None or not text:
        return seconds
    try:
        moment = parsedate_to_datetime(text)
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, zoned.timestamp() - now_s)
    except (ValueError, OverflowError):
        return None


def _access_fault(
    code: int,
    error: Mapping[str, Any],
    metadata: Mapping[str, Any],
    availability: Mapping[str, Any],
) -> tuple[str, str]:
    """Tell a hold that passes (402 in flight) from an empty account, a key's limit, moderation."""
    source = str(metadata.get("limit_source") or "")
    signs = " ".join(
        str(part or "")
        for part in (
            source,
            metadata.get("error_type") or error.get("error_type"),
            availability.get("code"),
            error.get("message"),
        )
    ).lower()
    if code == 401:
        return "stop", "unauthorized"
    if code == 403:
        if source or any(f"{word} exceeded" in signs for word in _MONEY):
            return "stop", "key_limit"
        if "content_policy" in signs or metadata.get("reasons") or "flagged_input" in metadata:
            return "reject", "moderation"
        return "reject", "forbidden"
    if "weight_exceeds_budget" in signs:
        return "stop", "request_exceeds_budget"
    if "in_flight" in signs or "in-flight" in signs or "in flight" in signs:
        return "pause", "in_flight_budget"
    return "stop", "key_limit" if "key_limit" in signs else "out_of_credits"


def _status_fault(code: int, error: Mapping[str, Any], raw: str) -> tuple[str, str]:
    message = f"{error.get('message') or ''} {error.get('code') or ''} {raw}".lower()
    if code == 400 and ("context length" in message or "context_length" in message):
        return "reject", "context_length"
    if code == 400 and any(sign in message for sign in _FILTERED):
        return "reject", "moderation"
    if 200 <= code < 300 and ("rate limit" in message or "too many requests" in message):
        return "retry", "rate_limited"
    if code in _OF_STATUS:
        return _OF_STATUS[code]
    if code >= 500:
        return "retry", "server_error"
    if 200 <= code < 300:
        return "retry", "error_without_code"
    return "reject", "unknown_shape"


def _code(status: int, error: Mapping[str, Any]) -> int:
    for value in (error.get("code"), error.get("http_status"), error.get("status")):
        text = "" if isinstance(value, bool) else str(value).removesuffix(".0")
        if len(text) == 3 and text.isascii() and text.isdecimal() and 400 <= int(text) < 600:
            return int(text)
    return status


def _type(metadata: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    names = [metadata.get("error_type"), *(error.get(k) for k in ("error_type", "code", "type"))]
    known = (*_OF_TYPE, "payment_required")
    return next((name for name in names if isinstance(name, str) and name in known), "")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _seconds(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if 0 <= seconds < 86_400 else None
