"""Decide what a rehearsal endpoint says: lengths, delays, providers, faults. Pure: seeds decide.

Source: shared/facts/generation.md section 3.2 (length and speed distributions),
shared/facts/kimi_openrouter.md sections 6.3 and 7 (the faults' bodies).
"""

import dataclasses
import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from eyas.generation.shop import LocalAnswer, RefusalError, Seller
from eyas.settings import Prices

_WORDS = "the answer follows from what was asked and each step can be checked by hand because "
_TEXT = _WORDS * 2000
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProvider:
    """One provider: prices, place in the market, and how many requests it carries at once."""

    name: str
    share: float  # of the requests that may go to it
    prompt_usd_per_mtok: float
    completion_usd_per_mtok: float
    quantization: str
    context_length: int
    max_completion_tokens: int
    tokens_per_s: float | None  # of one request; null: the delay alone
    capacity: int | None  # requests at once, then 429; null: any number
    broken: str | None  # a fault that it answers every request with


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLength:
    """Lognormal completion lengths of the requests whose max_tokens is at most `max_tokens`."""

    max_tokens: int
    median_tokens: float
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """A burst: the requests `first` to `first + count - 1` meet one fault."""

    first: int
    count: int
    fault: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A market that behaves as one would meet it, in time divided by `time_scale`."""

    model: str
    seed: int
    time_scale: float
    limit_usd: float | None  # of the key
    hold_usd: float | None  # price of all running requests at their max_tokens, at most
    delay_mean_s: float  # before the first token; lognormal
    delay_sigma: float
    reasoning_share: float  # of a completion's tokens
    tool_call_share: float  # of the replies, where tools are given
    providers: tuple[SimulatedProvider, ...]
    lengths: tuple[ReplyLength, ...]
    faults: dict[str, float]  # fault -> share of the requests
    storms: tuple[Storm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes over the wire in place of an answer, or to an answer on its way."""

    status: int = 200
    headers: Mapping[str, str] | None = None
    body: Any = None  # str: sent as it is; anything else: as JSON
    act: str = "say"  # say | cut (mid-body) | hang | drip (blank lines first) | one of `alter`
    billed: bool = False


def _error(code: int, message: str, *, status: int | None = None, **metadata: Any) -> Fault:
    body = {"error": {"code": code, "message": message, "metadata": metadata}}
    return Fault(status=code if status is None else status, body=body)


_HEAD = {"id": "gen-0", "provider": "?", "model": "?", "object": "chat.completion"}
_PAGE = "<!DOCTYPE html><html><head><title>{} | openrouter.ai</title></head></html>"
FAULTS: Mapping[str, Fault] = {
    "rate_limited": _error(
        429, "Provider returned error", raw="slow down", error_type="rate_limit_exceeded"
    ),
    "overloaded": _error(503, "no capacity", error_type="provider_overloaded"),
    "server_error": _error(502, "Provider returned error", error_type="provider_unavailable"),
    "gateway": Fault(status=524, body=_PAGE.format("524: A timeout occurred")),
    "blocked": Fault(status=403, body=_PAGE.format("Attention required")),
    "timeout": _error(408, "Request timed out"),
    "error_in_200": _error(502, "Upstream error", status=200),
    "no_choices": Fault(body=_HEAD),
    "empty_choices": Fault(body=_HEAD | {"choices": []}),
    "finish_error": Fault(
        body=_HEAD | {"choices": [{"finish_reason": "error", "message": {"content": "par"}}]}
    ),
    "content_filter": Fault(
        body=_HEAD
        | {
            "choices": [{"finish_reason": "content_filter", "message": {"content": ""}}],
            "usage": {"prompt_tokens": 1296, "completion_tokens": 0, "cost": 0},
        }
    ),
    "unknown_shape": Fault(body=_HEAD | {"choices": {"message": "a mapping"}}),
    "not_found": _error(404, "No endpoints found for this model"),
    "bad_request": _error(400, "Provider returned error", raw="invalid tool schema"),
    "moderation": _error(403, "flagged", reasons=["violence"], flagged_input="..."),
    "context_length": _error(400, "maximum context length is 262144 tokens"),
    "unauthorized": _error(401, "No auth credentials found"),
    "out_of_credits": _error(
        402, "This request requires more credits, or fewer max_tokens. You can only afford 30104"
    ),
    "key_limit": _error(403, "Key limit exceeded", limit_source="openrouter_key_limit"),
    "in_flight": _error(402, "in-flight budget", limit_source="openrouter_in_flight_budget"),
    "truncated_body": Fault(act="truncate", billed=True),
    "no_usage": Fault(act="no_usage", billed=True),
    "leaked_end": Fault(act="leak", billed=True),
    "blank_lines": Fault(act="drip", billed=True),
    "cut": Fault(act="cut", billed=True),
    "hang": Fault(act="hang", billed=True),
}


def check_simulation(simulation: Simulation) -> None:
    """Refuse what cannot be simulated.

    Raises: ValueError naming the field.
    """
    named = {*simulation.faults, *(storm.fault for storm in simulation.storms)}
    named |= {provider.broken for provider in simulation.providers if provider.broken}
    if unknown := sorted(named - set(FAULTS)):
        raise ValueError(f"fault '{unknown[0]}': expected one of {', '.join(sorted(FAULTS))}")
    if not simulation.providers or not simulation.lengths:
        raise ValueError("providers, lengths: expected at least one of each")
    if simulation.time_scale <= 0 or sum(simulation.faults.values()) > 1:
        raise ValueError("time_scale: expected > 0; faults: expected shares of at most 1 together")


def sellers_of(simulation: Simulation) -> tuple[Seller, ...]:
    """Return the providers as the shop lists them."""
    return tuple(
        Seller(
            name=provider.name,
            prices=Prices(
                prompt_usd_per_mtok=provider.prompt_usd_per_mtok,
                completion_usd_per_mtok=provider.completion_usd_per_mtok,
            ),
            context_length=provider.context_length,
            max_completion_tokens=provider.max_completion_tokens,
            quantization=provider.quantization,
        )
        for provider in simulation.providers
    )


def dice_of(simulation: Simulation, *about: object) -> random.Random:
    """Return the dice of one question: equal ones fall alike."""
    return random.Random(hashlib.sha256(repr((simulation.seed, *about)).encode()).digest())


def fault_at(simulation: Simulation, number: int, dice: random.Random) -> Fault | None:
    """Return what befalls the `number`-th request (from 0), or None."""
    for storm in simulation.storms:
        if storm.first <= number < storm.first + storm.count:
            headers = storm.retry_after_s and {"Retry-After": f"{storm.retry_after_s:g}"}
            return dataclasses.replace(FAULTS[storm.fault], headers=headers or None)
    roll = dice.random()
    for name, share in simulation.faults.items():
        roll -= share
        if roll < 0:
            return FAULTS[name]
    return None


def eligible(
    providers: Sequence[SimulatedProvider], wish: Mapping[str, Any], max_tokens: int
) -> list[int]:
    """Return the indices of the providers that a request's `provider` object lets through.

    Raises: RefusalError 404 if none is left, as OpenRouter answers.
    """
    price = wish.get("max_price") or {}
    left = [
        i
        for i, provider in enumerate(providers)
        if (not wish.get("only") or provider.name in wish["only"])
        and provider.name not in (wish.get("ignore") or ())
        and (not wish.get("quantizations") or provider.quantization in wish["quantizations"])
        and provider.prompt_usd_per_mtok <= float(price.get("prompt", math.inf))
        and provider.completion_usd_per_mtok <= float(price.get("completion", math.inf))
        and provider.max_completion_tokens >= max_tokens
    ]
    if not left:
        raise RefusalError(404, "No endpoints found that can handle the requested parameters")
    ordered = [i for name in wish.get("order") or () for i in left if providers[i].name == name]
    return ordered[:1] or left


def count_prompt(body: Mapping[str, Any]) -> int:
    """Return a count of prompt tokens: a token for each four characters of text and tools."""
    chars = sum(len(str(message.get("content") or "")) for message in body["messages"])
    tools = len(orjson.dumps(body["tools"])) if body.get("tools") else 0
    return max(1, (chars + tools) // _CHARS_PER_TOKEN)


def draw_answer(
    simulation: Simulation, body: Mapping[str, Any], dice: random.Random
) -> LocalAnswer:
    """Return a reply of a drawn length; one that reaches max_tokens ends with `length`."""
    max_tokens = int(body.get("max_tokens") or simulation.lengths[-1].max_tokens)
    fits = (length for length in simulation.lengths if length.max_tokens >= max_tokens)
    length = next(fits, simulation.lengths[-1])
    drawn = max(1, round(length.median_tokens * math.exp(dice.gauss(0, length.sigma))))
    tokens = min(drawn, max_tokens)
    thought = min(int(tokens * simulation.reasoning_share), tokens - 1)
    calls = body.get("tools") and dice.random() < simulation.tool_call_share
    return LocalAnswer(
        content=_text(tokens - thought),
        reasoning=_text(thought) if thought else None,
        tool_calls=(_call(body["tools"][0]),) if calls else (),
        finish_reason="length" if drawn > max_tokens else "tool_calls" if calls else "stop",
        prompt_tokens=count_prompt(body),
        completion_tokens=tokens,
        reasoning_tokens=thought,
    )


def draw_delay_s(
    simulation: Simulation, tokens_per_s: float | None, tokens: int, dice: random.Random
) -> float:
    """Return the seconds until an answer is complete, time scale applied."""
    sigma = simulation.delay_sigma
    first_s = simulation.delay_mean_s * math.exp(dice.gauss(0, sigma) - sigma * sigma / 2)
    speed = tokens_per_s and tokens_per_s * dice.uniform(0.75, 1.25)
    return (first_s + (tokens / speed if speed else 0.0)) / simulation.time_scale


def alter(act: str, reply: dict[str, Any]) -> bytes:
    """Return an answer's body, spoilt where the act says so: no_usage | leak | truncate | drip."""
    if act == "no_usage":
        return orjson.dumps({key: value for key, value in reply.items() if key != "usage"})
    if act == "leak":
        reply["choices"][0]["message"]["content"] += "<|im_end|>"
    body = orjson.dumps(reply)
    if act == "truncate":
        return body[: len(body) // 2]
    return b"\n\n: OPENROUTER PROCESSING\n\n" + body if act == "drip" else body


def _text(tokens: int) -> str:
    chars = tokens * _CHARS_PER_TOKEN
    whole, rest = divmod(chars, len(_TEXT))
    return _TEXT * whole + _TEXT[:rest]


def _call(tool: Mapping[str, Any]) -> dict[str, Any]:
    name = str(tool.get("function", {}).get("name"))
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}
