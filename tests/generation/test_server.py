"""The endpoint, asked as a client of OpenRouter would ask."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from eyas.generation.outcomes import classify
from eyas.generation.server import build_app
from eyas.generation.shop import LocalAnswer, RefusalError, Seller
from eyas.settings import Prices

PRICES = Prices(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=2.0)
GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def answer(body: dict[str, Any]) -> LocalAnswer:
    match body["messages"][0]["content"]:
        case "refuse":
            raise RefusalError(400, "too long", "context_length_exceeded")
        case "break":
            raise RuntimeError("broken")
        case "call":
            calls: tuple[dict[str, Any], ...] = (CALL,)
        case _:
            calls = ()
    return LocalAnswer(
        content="hello",
        reasoning=None,
        tool_calls=calls,
        finish_reason="tool_calls" if calls else "stop",
        prompt_tokens=1_000_000,
        completion_tokens=500_000,
        token_ids=(7, 2),
        token_bytes=(b"hel", b"\xf0\x9f") if body["messages"][0]["content"] == "texts" else (),
    )


@pytest.fixture
def app() -> Starlette:
    return build_app(answer, "m", Seller(name="local", prices=PRICES, context_length=2048))


@pytest.fixture
async def web(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x/api/v1") as client:
        yield client


async def test_an_answer_has_openrouters_shape(web: httpx.AsyncClient, app: Starlette) -> None:
    response = await web.post("/chat/completions", json=GOOD)
    value = response.json()
    assert response.status_code == 200
    assert value["id"].startswith("gen-")
    assert (value["provider"], value["model"], value["object"]) == ("local", "m", "chat.completion")
    [choice] = value["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "hello", "refusal": None, "reasoning": None
    }  # fmt: skip
    assert choice["finish_reason"] == choice["native_finish_reason"] == "stop"
    assert "token_ids" not in choice
    assert value["usage"] == {
        "prompt_tokens": 1_000_000,
        "completion_tokens": 500_000,
        "total_tokens": 1_500_000,
        "cost": 2.0,
        "is_byok": False,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert (app.state.ledger.requests, app.state.ledger.usd) == (1, 2.0)


async def test_the_clients_own_classification_takes_it(web: httpx.AsyncClient) -> None:
    body = GOOD | {"messages": [{"role": "user", "content": "call"}], "return_token_ids": True}
    response = await web.post("/chat/completions", json=body)
    outcome = classify(response.status_code, response.headers, response.text)
    assert outcome.reply is not None
    assert outcome.reply.tool_calls == (CALL,)
    assert outcome.reply.true_ids == (7, 2)
    assert outcome.cost_usd == 2.0


async def test_token_texts_are_given_as_engines_give_them(web: httpx.AsyncClient) -> None:
    body = GOOD | {"messages": [{"role": "user", "content": "texts"}]}
    response = await web.post("/chat/completions", json=body)
    assert response.json()["choices"][0]["logprobs"]["content"] == [
        {"token": "hel", "bytes": [104, 101, 108]},
        {"token": "\ufffd", "bytes": [240, 159]},
    ]
    outcome = classify(response.status_code, response.headers, response.text)
    assert outcome.reply is not None
    assert outcome.reply.pieces == ("hel", (240, 159))
    assert (await web.post("/chat/completions", json=GOOD)).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "other is not a valid model ID"),
        ({"messages": []}, "messages: expected at least one"),
        ({"messages": [{"role": "king"}]}, r"messages[0].role: expected system|user"),
        ({"messages": ["hi"]}, r"messages[0].role"),
        ({"stream": True}, "stream: only false"),
        ({"tools": {"a": 1}}, "tools: expected a list"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number from 1"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature: expected a number from 0 to 2, got 'hot'"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": 0.5}, "seed"),
    ],
)
async def test_a_bad_body_is_refused_with_its_field(
    web: httpx.AsyncClient, change: dict[str, Any], words: str
) -> None:
    response = await web.post("/chat/completions", json=GOOD | change)
    assert response.status_code == response.json()["error"]["code"] == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("text", ["", "{", "[]"])
async def test_a_body_that_is_no_object_is_refused(web: httpx.AsyncClient, text: str) -> None:
    response = await web.post("/chat/completions", content=text)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("body: ")


async def test_a_refusal_and_a_fault_of_the_answering_function_become_errors(
    web: httpx.AsyncClient, app: Starlette
) -> None:
    for word, code, kind in (("refuse", 400, "reject"), ("break", 500, "retry")):
        body = GOOD | {"messages": [{"role": "user", "content": word}]}
        response = await web.post("/chat/completions", json=body)
        assert response.status_code == code
        assert classify(code, {}, response.text).kind == kind
    assert app.state.ledger.usd == 0
    assert app.state.ledger.requests == 2


async def test_the_key_and_each_generation_tell_what_was_charged(web: httpx.AsyncClient) -> None:
    assert (await web.get("/key")).json()["data"]["usage"] == 0
    ids = [(await web.post("/chat/completions", json=GOOD)).json()["id"] for _ in range(2)]
    assert (await web.get("/key")).json()["data"]["usage"] == 4.0
    record = (await web.get("/generation", params={"id": ids[0]})).json()["data"]
    assert (record["id"], record["total_cost"], record["provider_name"]) == (ids[0], 2.0, "local")
    assert record["native_tokens_completion"] == 500_000


async def test_unknown_generations_addresses_and_methods_are_errors(web: httpx.AsyncClient) -> None:
    for path, code in (("/generation?id=gen-0", 404), ("/generation", 400), ("/nowhere", 404)):
        response = await web.get(path)
        assert response.status_code == response.json()["error"]["code"] == code
    assert (await web.get("/chat/completions")).json()["error"]["code"] == 405


async def test_the_model_its_prices_and_its_endpoints_are_listed(web: httpx.AsyncClient) -> None:
    [model] = (await web.get("/models")).json()["data"]
    assert (model["id"], model["context_length"]) == ("m", 2048)
    assert model["pricing"] == {"prompt": "0.000001", "completion": "0.000002"}
    [endpoint] = (await web.get("/models/local/m/endpoints")).json()["data"]["endpoints"]
    assert endpoint["pricing"] == model["pricing"]
    assert endpoint["provider_name"] == "local"
    assert (await web.get("/models/a/b/endpoints")).status_code == 404
