"""Serve a simulated market at thousands of requests a second: the endpoint of a rehearsal.

Run: eyas serve --simulate conf/simulation/default.yaml. aiohttp carries it, because its C parser
serves several times what uvicorn's pure one does, and a connection can be cut in mid-body.
"""

import asyncio
import dataclasses
import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from eyas.generation import shop as books
from eyas.generation.prices import cost_usd
from eyas.generation.shop import ROOT, LocalAnswer, RefusalError, Shop
from eyas.generation.simulation import (
    FAULTS,
    Fault,
    Simulation,
    alter,
    dice_of,
    draw_answer,
    draw_delay_s,
    eligible,
    fault_at,
    sellers_of,
)

_HANG_S = 86_400.0
_REFUSAL_S = 0.05
_MAX_BODY_BYTES = 64 << 20
SHOP = web.AppKey("shop", Shop)


Recount = Callable[[Mapping[str, Any], LocalAnswer], LocalAnswer]  # body, answer


@dataclass(slots=True)
class _Market:
    simulation: Simulation
    shop: Shop
    loads: list[int]  # requests in flight, a provider each
    recount: Recount | None  # gives an answer other counts than a token for four characters
    held_usd: float = 0.0  # price of all running requests at their max_tokens
    cached: dict[bytes, dict[str, Any]] = field(default_factory=dict)  # body -> reply


def build_simulator(simulation: Simulation, recount: Recount | None = None) -> web.Application:
    """Return the application; its shop is `app[SHOP]`."""
    shop = Shop(
        model_name=simulation.model,
        sellers=sellers_of(simulation),
        limit_usd=simulation.limit_usd,
    )
    market = _Market(simulation, shop, [0] * len(simulation.providers), recount)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app[SHOP] = shop

    async def complete(request: web.Request) -> web.StreamResponse:
        return await _complete(market, request)

    async def endpoints(request: web.Request) -> web.StreamResponse:
        name = "{author}/{slug}".format(**request.match_info)
        return _told(lambda: books.endpoints_data(shop, name))

    async def generation(request: web.Request) -> web.StreamResponse:
        return _told(lambda: books.generation_data(shop, request.query.get("id")))

    async def key(_request: web.Request) -> web.StreamResponse:
        return _json(200, books.key_data(shop))

    async def models(_request: web.Request) -> web.StreamResponse:
        return _json(200, books.models_data(shop))

    async def ledger(_request: web.Request) -> web.StreamResponse:
        return _json(200, books.ledger_data(shop))

    app.router.add_post(f"{ROOT}/chat/completions", complete)
    app.router.add_get(f"{ROOT}/models/{{author}}/{{slug}}/endpoints", endpoints)
    app.router.add_get(f"{ROOT}/generation", generation)
    app.router.add_get(f"{ROOT}/key", key)
    app.router.add_get(f"{ROOT}/models", models)
    app.router.add_get(f"{ROOT}/ledger", ledger)
    return app


async def serve_simulation(
    simulation: Simulation, listener: Any, recount: Recount | None = None
) -> None:
    """Serve on a bound socket until cancelled."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # cut connections are its task
    app = build_simulator(simulation, recount)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=4096).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _complete(market: _Market, request: web.Request) -> web.StreamResponse:
    ledger = market.shop.ledger
    number, ledger.requests = ledger.requests, ledger.requests + 1
    ledger.in_flight += 1
    ledger.most_in_flight = max(ledger.most_in_flight, ledger.in_flight)
    try:
        raw = await request.read()
        return await _answer(market, request, raw, number)
    except RefusalError as error:
        ledger.refusals[str(error.code)] += 1
        return _json(error.code, books.error_data(error))
    finally:
        ledger.in_flight -= 1


async def _answer(
    market: _Market, request: web.Request, raw: bytes, number: int
) -> web.StreamResponse:
    simulation = market.simulation
    body = _read(raw, simulation.model)
    caching = request.headers.get("X-OpenRouter-Cache") == "true"
    if caching and (kept := market.cached.get(raw)):
        return _out_of_cache(kept)
    dice = dice_of(simulation, number)  # another try is another chance
    choice = _provider(market, body, dice)
    provider = simulation.providers[choice]
    fault = FAULTS[provider.broken] if provider.broken else fault_at(simulation, number, dice)
    if fault is None and _is_full(market, choice):
        fault = FAULTS["rate_limited"]
    if fault and fault.act == "say":
        await asyncio.sleep(_REFUSAL_S / simulation.time_scale)
        return _say(market, fault, provider.name)
    reply = await _sell(market, body, choice)
    if isinstance(reply, web.Response):
        return reply
    market.shop.ledger.sold[hashlib.sha256(raw).digest()] += 1
    if caching:
        market.cached[raw] = reply
    return await _deliver(request, reply, fault.act if fault else "say")


async def _sell(
    market: _Market, body: Mapping[str, Any], choice: int
) -> dict[str, Any] | web.Response:
    """Answer and bill; or refuse where the money does not suffice."""
    simulation, seller = market.simulation, market.shop.sellers[choice]
    dice = dice_of(simulation, body.get("seed"), body["messages"])  # equal requests, equal replies
    answered = draw_answer(simulation, body, dice)
    answered = market.recount(body, answered) if market.recount else answered
    speed = simulation.providers[choice].tokens_per_s
    delay_s = draw_delay_s(simulation, speed, answered.completion_tokens, dice)
    held_usd = cost_usd(
        seller.prices,
        prompt_tokens=answered.prompt_tokens,
        completion_tokens=int(body.get("max_tokens") or 0),
    )
    if refusal := _no_money(market, held_usd):
        return _say(market, refusal, seller.name)
    market.loads[choice] += 1
    market.held_usd += held_usd
    try:
        await asyncio.sleep(delay_s)
    finally:
        market.loads[choice] -= 1
        market.held_usd -= held_usd
        reply = books.completion(simulation.model, seller, answered)  # billed, wanted or not
        books.enter(market.shop.ledger, reply, latency_s=delay_s)
    return reply


async def _deliver(request: web.Request, reply: dict[str, Any], act: str) -> web.StreamResponse:
    """Bring an answer over, whole or as the fault has it."""
    if act == "hang":
        await asyncio.sleep(_HANG_S)
    text = alter(act, reply)
    headers = {"X-Generation-Id": reply["id"]}
    if act == "cut":
        return await _cut(request, text, headers)
    return web.Response(body=text, content_type="application/json", headers=headers)


def _out_of_cache(reply: dict[str, Any]) -> web.Response:
    """Return an answer once more: free, without counts, and naming the one that was billed."""
    usage = reply["usage"] | {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    body = reply | {"id": f"gen-{uuid.uuid4().hex}", "usage": usage | {"cost": 0.0}}
    return _json(200, body, {"X-OpenRouter-Cache-Source-Id": reply["id"]})


def _read(raw: bytes, model: str) -> dict[str, Any]:
    try:
        return books.check_request(orjson.loads(raw), model)
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, f"body: not JSON ({error})") from None


def _provider(market: _Market, body: Mapping[str, Any], dice: Any) -> int:
    providers, wish = market.simulation.providers, body.get("provider") or {}
    left = eligible(providers, wish, int(body.get("max_tokens") or 0))
    if wish.get("allow_fallbacks", True):  # a full one is passed by, unless all are full
        left = [i for i in left if not _is_full(market, i)] or left
    return dice.choices(left, [providers[i].share for i in left])[0]


def _is_full(market: _Market, choice: int) -> bool:
    capacity = market.simulation.providers[choice].capacity
    return capacity is not None and market.loads[choice] >= capacity


def _no_money(market: _Market, more_usd: float) -> Fault | None:
    """Refuse as OpenRouter does: an empty key for good, a hold that passes with Retry-After."""
    shop, hold_usd = market.shop, market.simulation.hold_usd
    if shop.limit_usd is not None and shop.ledger.usd + more_usd > shop.limit_usd:
        return FAULTS["out_of_credits"]
    if hold_usd is not None and market.held_usd + more_usd > hold_usd:
        wait_s = max(1.0, 5.0 / market.simulation.time_scale)
        return dataclasses.replace(FAULTS["in_flight"], headers={"Retry-After": f"{wait_s:g}"})
    return None


def _say(market: _Market, fault: Fault, provider: str) -> web.Response:
    market.shop.ledger.refusals[str(fault.status)] += 1
    headers = dict(fault.headers or {})
    if isinstance(fault.body, str):
        return web.Response(text=fault.body, status=fault.status, headers=headers)
    body = fault.body
    if "error" in body:
        error = body["error"]
        body = {"error": error | {"metadata": error["metadata"] | {"provider_name": provider}}}
    return _json(fault.status, body, headers)


async def _cut(request: web.Request, text: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**headers, "Content-Length": str(len(text))})
    await response.prepare(request)
    await response.write(text[: len(text) // 2])
    if request.transport:
        request.transport.close()
    return response


def _told(work: Any) -> web.Response:
    try:
        return _json(200, work())
    except RefusalError as error:
        return _json(error.code, books.error_data(error))


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(value),
        status=status,
        content_type="application/json",
        headers=headers,
    )
