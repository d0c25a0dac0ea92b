"""The client against a loopback endpoint, and against none."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.generation import client as module
from eyas.generation.client import Client, read_key
from eyas.generation.outcomes import Outcome

Start = Callable[[Any], Any]
KEY = "sk-or-secret-0123"


async def ask(url: str, *, key: str | None = None, timeout_s: float = 5.0) -> Outcome:
    async with Client(url, key=key, connections=4, timeout_s=timeout_s) as client:
        return await client.ask(b'{"model": "m"}')


async def test_a_good_answer_comes_back_classified(
    scripted: Start, ok_body: Callable[..., str]
) -> None:
    async def script(_body: Any, _n: int) -> tuple[int, dict[str, str], str]:
        return 200, {}, "\n\n" + ok_body("hé")

    endpoint = scripted(script)
    outcome = await ask(endpoint.url, key=KEY)
    assert outcome.reply is not None
    assert outcome.reply.content == "hé"
    assert endpoint.bodies == [{"model": "m"}]
    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"
    assert endpoint.headers[0]["content-type"] == "application/json"


async def test_without_a_key_no_authorization_is_sent(
    scripted: Start, ok_body: Callable[..., str]
) -> None:
    async def script(_body: Any, _n: int) -> tuple[int, dict[str, str], str]:
        return 200, {}, ok_body()

    endpoint = scripted(script)
    await ask(endpoint.url + "/")
    assert "authorization" not in endpoint.headers[0]


async def test_a_key_that_the_endpoint_echoes_is_blanked(scripted: Start) -> None:
    async def script(_body: Any, _n: int) -> tuple[int, dict[str, str], str]:
        return 401, {}, f'{{"error": {{"code": 401, "message": "bad key {KEY}"}}}}'

    outcome = await ask(scripted(script).url, key=KEY)
    assert outcome.kind == "stop"
    assert outcome.detail == "401: bad key [key]"


async def test_headers_reach_the_classification(scripted: Start) -> None:
    async def script(_body: Any, _n: int) -> tuple[int, dict[str, str], str]:
        return 429, {"Retry-After": "89"}, ""

    assert (await ask(scripted(script).url)).retry_after_s == 89.0


async def test_a_request_that_hangs_ends_at_its_deadline_and_may_be_billed(scripted: Start) -> None:
    async def script(_body: Any, _n: int) -> tuple[int, dict[str, str], str]:
        await asyncio.sleep(5)
        return 200, {}, ""

    outcome = await ask(scripted(script).url, timeout_s=0.03)
    assert (outcome.kind, outcome.reason, outcome.maybe_billed) == ("retry", "deadline", True)


async def test_an_endpoint_that_is_not_there_was_not_billed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/api/v1"
        outcome = await ask(url)
    assert (outcome.kind, outcome.reason, outcome.maybe_billed) == ("retry", "connect", False)


Raw = Callable[[bytes], Awaitable[str]]


@pytest.fixture
async def raw_server() -> Any:
    """Return a function that starts a server which sends given bytes and hangs up."""
    servers: list[asyncio.Server] = []

    async def start(answer: bytes) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(answer)
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(handle, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"no http at all\r\n\r\n",
    ],
    ids=["hang-up", "cut body", "cut chunk", "false gzip", "no http"],
)
async def test_a_connection_lost_once_sent_may_be_billed(raw_server: Raw, answer: bytes) -> None:
    outcome = await ask(await raw_server(answer))
    assert (outcome.kind, outcome.reason) == ("retry", "connection_lost")
    assert outcome.maybe_billed


@pytest.mark.parametrize("url", ["openrouter.ai/api", "ftp://x/y", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(EyasError, match=r"runtime\.connection\.url: expected http"):
        Client(url, key=None, connections=1, timeout_s=1)


def test_a_missing_key_is_told_by_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", " \n")
    with pytest.raises(EyasError, match="EYAS_TEST_KEY: expected the API key, got nothing"):
        read_key("EYAS_TEST_KEY")
    assert read_key(None) is None


def test_a_key_is_stripped_and_an_odd_one_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", f"{KEY}\n")
    assert read_key("EYAS_TEST_KEY") == KEY
    monkeypatch.setenv("EYAS_TEST_KEY", f"{KEY} é")
    with pytest.raises(EyasError) as caught:
        read_key("EYAS_TEST_KEY")
    assert KEY not in str(caught.value)


def test_a_proxy_of_the_environment_is_used_but_never_for_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.test:3128")
    monkeypatch.setenv("no_proxy", "inside.test")
    proxy = module._proxy("https", "openrouter.ai")
    assert proxy is not None
    assert str(proxy.url) == "http://proxy.test:3128"
    assert module._proxy("https", "inside.test") is None
    assert module._proxy("https", "127.0.0.1") is None
