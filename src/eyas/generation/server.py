"""Carry a shop over HTTP with any answering function: the local endpoint.

Source: shared/facts/kimi_openrouter.md section 6. The rehearsal has a faster server, simulator.py.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eyas.generation import shop as books
from eyas.generation.pieces import write_pieces
from eyas.generation.shop import ROOT, LocalAnswer, RefusalError, Seller, Shop

log = logging.getLogger("eyas")

Answer = Callable[[dict[str, Any]], Awaitable[LocalAnswer]]


def build_app(answer: Answer, model_name: str, seller: Seller) -> Starlette:
    """Return the application; its ledger is `app.state.ledger`."""
    shop = Shop(model_name=model_name, sellers=(seller,))

    async def complete(request: Request) -> dict[str, Any]:
        return await _complete(shop, answer, request)

    async def key(_request: Request) -> dict[str, Any]:
        return books.key_data(shop)

    async def models(_request: Request) -> dict[str, Any]:
        return books.models_data(shop)

    async def endpoints(request: Request) -> dict[str, Any]:
        return books.endpoints_data(shop, "{author}/{slug}".format(**request.path_params))

    async def generation(request: Request) -> dict[str, Any]:
        return books.generation_data(shop, request.query_params.get("id"))

    async def ledger(_request: Request) -> dict[str, Any]:
        return books.ledger_data(shop)

    app = Starlette(
        routes=[
            Route(f"{ROOT}/chat/completions", _guarded(complete), methods=["POST"]),
            Route(f"{ROOT}/key", _guarded(key)),
            Route(f"{ROOT}/models", _guarded(models)),
            Route(f"{ROOT}/models/{{author}}/{{slug}}/endpoints", _guarded(endpoints)),
            Route(f"{ROOT}/generation", _guarded(generation)),
            Route(f"{ROOT}/ledger", _guarded(ledger)),
        ],
        exception_handlers={HTTPException: _no_such_address},
    )
    app.state.ledger = shop.ledger
    return app


def _guarded(work: Callable[[Request], Awaitable[Any]]) -> Any:
    """Wrap one address's work; the only place that turns any fault into an error body."""

    async def respond(request: Request) -> Response:
        try:
            return _json(200, await work(request))
        except RefusalError as error:
            return _error(error)
        except Exception as error:
            log.exception("request failed")
            return _error(RefusalError(500, f"{type(error).__name__}: {error}", "server"))

    return respond


async def _no_such_address(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    return _error(RefusalError(code, f"{request.method} {request.url.path}: not served here"))


def _error(error: RefusalError) -> Response:
    return _json(error.code, books.error_data(error))


def _json(status: int, value: Any) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


async def _complete(shop: Shop, answer: Answer, request: Request) -> dict[str, Any]:
    shop.ledger.requests += 1
    started_s = time.monotonic()
    try:
        value = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, f"body: not JSON ({error})") from None
    body = books.check_request(value, shop.model_name)
    answered = await answer(body)
    reply = books.completion(shop.model_name, shop.sellers[0], answered)
    if body.get("return_token_ids"):
        reply["choices"][0]["token_ids"] = list(answered.token_ids)
    if answered.token_bytes:
        reply["choices"][0]["logprobs"] = write_pieces(answered.token_bytes)
    books.enter(shop.ledger, reply, latency_s=time.monotonic() - started_s)
    return reply
