"""A loopback endpoint that answers as a test tells it to, and the records it needs."""

import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eyas.records import Prompt, row_id

Script = Callable[[dict[str, Any], int], Awaitable[tuple[int, dict[str, str], str | bytes]]]


@dataclass
class Scripted:
    """Bodies and headers received, and the function that answers the n-th request."""

    script: Script
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def respond(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        status, headers, text = await self.script(body, len(self.bodies))
        return Response(text, status_code=status, headers=headers, media_type="application/json")


@contextlib.contextmanager
def serving_app(app: Any) -> Generator[str]:
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture
def serve_app() -> Iterator[Callable[[Any], str]]:
    """Return a function that serves an application and returns its base URL."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(serving_app(app))


@pytest.fixture
def scripted(serve_app: Callable[[Any], str]) -> Callable[[Script], Scripted]:
    """Return a function that serves a script."""

    def start(script: Script) -> Scripted:
        endpoint = Scripted(script)
        path = "/api/v1/chat/completions"
        app = Starlette(routes=[Route(path, endpoint.respond, methods=["POST"])])
        endpoint.url = serve_app(app)
        return endpoint

    return start


@pytest.fixture
def make_prompts() -> Callable[[int], list[Prompt]]:
    """Return a function that makes n prompts of 10 tokens."""

    def make(count: int) -> list[Prompt]:
        rows = [({"role": "user", "content": f"question {i}"},) for i in range(count)]
        return [
            Prompt(
                id=row_id("chat", str(i), messages),
                dataset="chat",
                upstream_id=str(i),
                messages=messages,
                tools=(),
                prompt_tokens=10,
                partition="short",
                licence="MIT",
            )
            for i, messages in enumerate(rows)
        ]

    return make


@pytest.fixture
def ok_body() -> Callable[..., str]:
    """Return a function that makes the text of a good answer."""

    def make(content: str = "yes", *, completion_tokens: int = 5, finish: str = "stop") -> str:
        usage = {"prompt_tokens": 10, "completion_tokens": completion_tokens, "cost": 0.001}
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "finish_reason": finish, "message": message}
        value = {"id": "gen-1", "provider": "P", "model": "m-1", "choices": [choice]}
        return orjson.dumps(value | {"usage": usage}).decode()

    return make
