"""Be an endpoint of OpenRouter's form over any answering function.

Source: shared/facts/kimi_openrouter.md section 6 (bodies, errors, the other addresses).
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eyas.generation.prices import cost_usd, usd_per_token
from eyas.settings import Prices

ROOT = "/api/v1"
_ROLES = ("system", "user", "assistant", "tool")
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAnswer:
    """What the answering function says."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...]


class RefusalError(Exception):
    """A request that cannot be answered; becomes an error body."""

    def __init__(self, code: int, message: str, error_type: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.error_type = error_type


@dataclass(slots=True)
class Ledger:
    """What was asked, answered and charged: the truth that a client's books are compared with."""

    requests: int = 0
    usd: float = 0.0
    generations: dict[str, dict[str, Any]] = field(default_factory=dict)


Answer = Callable[[dict[str, Any]], Awaitable[LocalAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shop:
    """What the addresses share."""

    answer: Answer
    prices: Prices
    model_name: str
    provider_name: str
    context_length: int | None
    ledger: Ledger


def build_app(
    answer: Answer,
    prices: Prices,
    model_name: str,
    provider_name: str,
    *,
    context_length: int | None = None,
) -> Starlette:
    """Return the application; its ledger is `app.state.ledger`."""
    shop = _Shop(
        answer=answer,
        prices=prices,
        model_name=model_name,
        provider_name=provider_name,
        context_length=context_length,
        ledger=Ledger(),
    )

    def endpoint(work: Callable[[_Shop, Request], Awaitable[Any]]) -> Any:
        async def respond(request: Request) -> Response:
            return await _respond(work, shop, request)

        return respond

    app = Starlette(
        routes=[
            Route(f"{ROOT}/chat/completions", endpoint(_complete), methods=["POST"]),
            Route(f"{ROOT}/key", endpoint(_key)),
            Route(f"{ROOT}/models", endpoint(_models)),
            Route(f"{ROOT}/models/{{author}}/{{slug}}/endpoints", endpoint(_endpoints)),
            Route(f"{ROOT}/generation", endpoint(_generation)),
        ],
        exception_handlers={HTTPException: _no_such_address},
    )
    app.state.ledger = shop.ledger
    return app


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


async def _respond(
    work: Callable[[_Shop, Request], Awaitable[Any]], shop: _Shop, request: Request
) -> Response:
    """Run one address's work; the only place that turns any fault into an error body."""
    try:
        return _json(200, await work(shop, request))
    except RefusalError as error:
        return _error(error)
    except Exception as error:
        log.exception("request failed")
        return _error(RefusalError(500, f"{type(error).__name__}: {error}", "server"))


async def _no_such_address(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    return _error(RefusalError(code, f"{request.method} {request.url.path}: not served here"))


def _error(error: RefusalError) -> Response:
    metadata = {"error_type": error.error_type} if error.error_type else {}
    body = {"code": error.code, "message": error.message, "metadata": metadata}
    return _json(error.code, {"error": body})


def _json(status: int, value: Any) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


async def _complete(shop: _Shop, request: Request) -> dict[str, Any]:
    shop.ledger.requests += 1
    started_s = time.monotonic()
    try:
        value = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, f"body: not JSON ({error})") from None
    body = check_request(value, shop.model_name)
    answer = await shop.answer(body)
    generation_id = f"gen-{uuid.uuid4().hex}"
    reply = _completion(shop, generation_id, answer)
    if body.get("return_token_ids"):
        reply["choices"][0]["token_ids"] = list(answer.token_ids)
    _enter(shop, reply, latency_s=time.monotonic() - started_s)
    return reply


def _completion(shop: _Shop, generation_id: str, answer: LocalAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content,
        "refusal": None,
        "reasoning": answer.reasoning,
    }
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    usd = cost_usd(
        shop.prices,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
    )
    return {
        "id": generation_id,
        "provider": shop.provider_name,
        "model": shop.model_name,
        "object": "chat.completion",
        "created": int(time.time()),
        "choices": [
            {
                "index": 0,
                "finish_reason": answer.finish_reason,
                "native_finish_reason": answer.finish_reason,
                "logprobs": None,
                "message": message,
            }
        ],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "cost": usd,
            "is_byok": False,
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _enter(shop: _Shop, reply: dict[str, Any], *, latency_s: float) -> None:
    """Enter an answer into the books."""
    usage, choice = reply["usage"], reply["choices"][0]
    shop.ledger.usd += usage["cost"]
    shop.ledger.generations[reply["id"]] = {
        "id": reply["id"],
        "model": reply["model"],
        "provider_name": reply["provider"],
        "created": reply["created"],
        "tokens_prompt": usage["prompt_tokens"],
        "tokens_completion": usage["completion_tokens"],
        "native_tokens_prompt": usage["prompt_tokens"],
        "native_tokens_completion": usage["completion_tokens"],
        "native_tokens_reasoning": 0,
        "total_cost": usage["cost"],
        "usage": usage["cost"],
        "is_byok": False,
        "finish_reason": choice["finish_reason"],
        "native_finish_reason": choice["native_finish_reason"],
        "latency": round(latency_s * 1000),
        "cancelled": False,
        "streamed": False,
    }


async def _key(shop: _Shop, _request: Request) -> dict[str, Any]:
    usd = round(shop.ledger.usd, 9)
    return {
        "data": {
            "label": shop.provider_name,
            "limit": None,
            "limit_remaining": None,
            "limit_reset": None,
            "usage": usd,
            "usage_daily": usd,
            "usage_weekly": usd,
            "usage_monthly": usd,
            "byok_usage": 0,
            "is_free_tier": False,
        }
    }


async def _models(shop: _Shop, _request: Request) -> dict[str, Any]:
    return {"data": [_model(shop)]}


async def _endpoints(shop: _Shop, request: Request) -> dict[str, Any]:
    name = f"{request.path_params['author']}/{request.path_params['slug']}"
    if name not in (shop.model_name, f"{shop.provider_name}/{shop.model_name}"):
        raise RefusalError(404, f"model {name} is not served here")
    model = _model(shop)
    entry = {
        "name": f"{shop.provider_name} | {shop.model_name}",
        "provider_name": shop.provider_name,
        "tag": shop.provider_name,
        "quantization": "unknown",
        "context_length": shop.context_length,
        "max_completion_tokens": None,
        "pricing": model["pricing"],
        "supported_parameters": model["supported_parameters"],
        "status": 0,
    }
    return {"data": {"id": model["id"], "name": model["name"], "endpoints": [entry]}}


def _model(shop: _Shop) -> dict[str, Any]:
    return {
        "id": shop.model_name,
        "canonical_slug": shop.model_name,
        "name": shop.model_name,
        "context_length": shop.context_length,
        "pricing": {
            "prompt": usd_per_token(shop.prices.prompt_usd_per_mtok),
            "completion": usd_per_token(shop.prices.completion_usd_per_mtok),
        },
        "supported_parameters": ["max_tokens", "seed", "temperature", "tools", "top_p"],
    }


async def _generation(shop: _Shop, request: Request) -> dict[str, Any]:
    generation_id = request.query_params.get("id")
    if not generation_id:
        raise RefusalError(400, "id: expected a generation id in the query")
    if generation_id not in shop.ledger.generations:
        raise RefusalError(404, f"generation {generation_id} not found")
    return {"data": shop.ledger.generations[generation_id]}
