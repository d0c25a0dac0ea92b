"""What an endpoint of OpenRouter's form says and charges, whichever server carries it. Pure.

Source: shared/facts/kimi_openrouter.md section 6 (bodies of the answer and of the other addresses).
"""

import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.generation.prices import cost_usd, usd_per_token
from eyas.settings import Prices

ROOT = "/api/v1"
_ROLES = ("system", "user", "assistant", "tool")
_PARAMETERS = ["max_tokens", "seed", "temperature", "tools", "top_p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seller:
    """A provider of the model."""

    name: str
    prices: Prices
    context_length: int | None = None
    max_completion_tokens: int | None = None
    quantization: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAnswer:
    """What was answered, before it has a price."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...] = ()
    token_bytes: tuple[bytes, ...] = ()  # of each token, where they were asked for
    reasoning_tokens: int = 0


class RefusalError(Exception):
    """A request that cannot be answered; becomes an error body."""

    def __init__(self, code: int, message: str, error_type: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.error_type = error_type


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What was asked, answered and charged: the truth that a client's books are compared with."""

    requests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    usd: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    sold: Counter[bytes] = field(default_factory=Counter)  # digest of a body -> times answered
    generations: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """The model, who sells it, and the books."""

    model_name: str
    sellers: tuple[Seller, ...]
    limit_usd: float | None = None  # of the key
    ledger: Ledger = field(default_factory=Ledger)


def check_request(value: Any, model_name: str) -> dict[str, Any]:
    """Return a request body that can be answered.

    Raises: RefusalError 400 naming the field.
    """
    if not isinstance(value, dict):
        raise RefusalError(400, "body: expected a JSON object")
    if value.get("model") != model_name:
        raise RefusalError(400, f"{value.get('model')} is not a valid model ID")
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusalError(400, "messages: expected at least one")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise RefusalError(400, f"messages[{i}].role: expected {'|'.join(_ROLES)}, got {role}")
    if value.get("stream"):
        raise RefusalError(400, "stream: only false is served here")
    if not isinstance(value.get("tools") or [], list):
        raise RefusalError(400, "tools: expected a list")
    _check_number(value, "max_tokens", low=1, high=1 << 24, whole=True)
    _check_number(value, "temperature", low=0, high=2)
    _check_number(value, "top_p", low=0, high=1)
    _check_number(value, "seed", low=-(1 << 63), high=(1 << 63) - 1, whole=True)
    return value


def _check_number(
    value: dict[str, Any], name: str, *, low: float, high: float, whole: bool = False
) -> None:
    number = value.get(name)
    if number is None:
        return
    kinds = int if whole else int | float
    if isinstance(number, bool) or not isinstance(number, kinds) or not low <= number <= high:
        kind = "a whole number" if whole else "a number"
        raise RefusalError(400, f"{name}: expected {kind} from {low} to {high}, got {number!r}")


def completion(model_name: str, seller: Seller, answer: LocalAnswer) -> dict[str, Any]:
    """Return the body of an answer with its price."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content,
        "refusal": None,
        "reasoning": answer.reasoning,
    }
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "native_finish_reason": answer.finish_reason,
        "logprobs": None,
        "message": message,
    }
    return {
        "id": f"gen-{uuid.uuid4().hex}",
        "provider": seller.name,
        "model": model_name,
        "object": "chat.completion",
        "created": int(time.time()),
        "choices": [choice],
        "usage": counts
        | {
            "total_tokens": sum(counts.values()),
            "cost": cost_usd(seller.prices, **counts),
            "is_byok": False,
            "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        },
    }


def enter(ledger: Ledger, reply: Mapping[str, Any], *, latency_s: float) -> None:
    """Enter an answer into the books."""
    usage, choice = reply["usage"], reply["choices"][0]
    ledger.usd += usage["cost"]
    ledger.prompt_tokens += usage["prompt_tokens"]
    ledger.completion_tokens += usage["completion_tokens"]
    ledger.generations[reply["id"]] = {
        "id": reply["id"],
        "model": reply["model"],
        "provider_name": reply["provider"],
        "created": reply["created"],
        "tokens_prompt": usage["prompt_tokens"],
        "tokens_completion": usage["completion_tokens"],
        "native_tokens_prompt": usage["prompt_tokens"],
        "native_tokens_completion": usage["completion_tokens"],
        "native_tokens_reasoning": usage["completion_tokens_details"]["reasoning_tokens"],
        "total_cost": usage["cost"],
        "usage": usage["cost"],
        "is_byok": False,
        "finish_reason": choice["finish_reason"],
        "native_finish_reason": choice["native_finish_reason"],
        "latency": round(latency_s * 1000),
        "cancelled": False,
        "streamed": False,
    }


def key_data(shop: Shop) -> dict[str, Any]:
    """Return the body of GET /key."""
    usd = round(shop.ledger.usd, 9)
    limit = shop.limit_usd
    return {
        "data": {
            "label": shop.sellers[0].name,
            "limit": limit,
            "limit_remaining": None if limit is None else round(limit - usd, 9),
            "limit_reset": None,
            "usage": usd,
            "usage_daily": usd,
            "usage_weekly": usd,
            "usage_monthly": usd,
            "byok_usage": 0,
            "is_free_tier": False,
        }
    }


def models_data(shop: Shop) -> dict[str, Any]:
    """Return the body of GET /models."""
    return {"data": [_model(shop)]}


def endpoints_data(shop: Shop, name: str) -> dict[str, Any]:
    """Return the body of GET /models/{author}/{slug}/endpoints.

    Raises: RefusalError 404 for another model.
    """
    if name not in (shop.model_name, f"{shop.sellers[0].name}/{shop.model_name}"):
        raise RefusalError(404, f"model {name} is not served here")
    model = _model(shop)
    entries = [
        {
            "name": f"{seller.name} | {shop.model_name}",
            "provider_name": seller.name,
            "tag": seller.name,
            "quantization": seller.quantization,
            "context_length": seller.context_length,
            "max_completion_tokens": seller.max_completion_tokens,
            "pricing": _pricing(seller),
            "supported_parameters": _PARAMETERS,
            "status": 0,
        }
        for seller in shop.sellers
    ]
    return {"data": {"id": model["id"], "name": model["name"], "endpoints": entries}}


def generation_data(shop: Shop, generation_id: str | None) -> dict[str, Any]:
    """Return the body of GET /generation.

    Raises: RefusalError for an id that is missing or not in the books.
    """
    if not generation_id:
        raise RefusalError(400, "id: expected a generation id in the query")
    if generation_id not in shop.ledger.generations:
        raise RefusalError(404, f"generation {generation_id} not found")
    return {"data": shop.ledger.generations[generation_id]}


def ledger_data(shop: Shop) -> dict[str, Any]:
    """Return the books in short; an address that only this server has, for tests and benchmarks."""
    ledger = shop.ledger
    return {
        "data": {
            "requests": ledger.requests,
            "answered": len(ledger.generations),
            "in_flight": ledger.in_flight,
            "most_in_flight": ledger.most_in_flight,
            "prompt_tokens": ledger.prompt_tokens,
            "completion_tokens": ledger.completion_tokens,
            "usd": round(ledger.usd, 9),
            "repeated": sum(ledger.sold.values()) - len(ledger.sold),
            "refusals": dict(ledger.refusals),
        }
    }


def error_data(error: RefusalError) -> dict[str, Any]:
    """Return the body of an error."""
    metadata = {"error_type": error.error_type} if error.error_type else {}
    return {"error": {"code": error.code, "message": error.message, "metadata": metadata}}


def _model(shop: Shop) -> dict[str, Any]:
    first = shop.sellers[0]
    return {
        "id": shop.model_name,
        "canonical_slug": shop.model_name,
        "name": shop.model_name,
        "context_length": first.context_length,
        "pricing": _pricing(first),
        "supported_parameters": _PARAMETERS,
    }


def _pricing(seller: Seller) -> dict[str, str]:
    return {
        "prompt": usd_per_token(seller.prices.prompt_usd_per_mtok),
        "completion": usd_per_token(seller.prices.completion_usd_per_mtok),
    }
