"""Serve the local target behind OpenRouter's chat API, in this process or in one of its own.

Reads: models/target, one line of JSON on standard input. Run: eyas serve [--port 8800].
`serving` starts `python -m eyas.desk.local_endpoint` and ends it; that process also ends by itself
when its standard input closes, so a killed parent leaves nothing behind.
"""

import asyncio
import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import orjson

from eyas.desk.params import Params, fill
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.generation.server import Answer, build_app
from eyas.generation.shop import ROOT, LocalAnswer, RefusalError, Seller
from eyas.settings import Endpoint, Prices, Runtime
from eyas.tokens.codecs import Codec, load_codec

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from eyas.states.sampler import Generated

TARGET = Path("models/target")
PROVIDER = "local"
_HOST = "127.0.0.1"
_READY = "eyas-ready "
_DEFAULT_MAX_TOKENS = 256
_TAIL_LINES = 8
_PATIENCE_S = 10.0  # for its end
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTarget:
    """What is served, and with how much of the machine."""

    folder: str
    codec: str
    model_name: str
    prices: Prices
    slots: int  # rows decoded together by one thread
    threads: int


class Sampler(Protocol):
    """What the endpoint asks of states.sampler."""

    def submit(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Iterable[int],
    ) -> "Future[Generated]":
        """Queue a request."""
        ...


def local_target(endpoint: Endpoint, codec: str, runtime: Runtime) -> LocalTarget:
    """Return what the parameters say is served here.

    Raises: EyasError if they describe an endpoint that is somewhere else.
    """
    if endpoint.prices is None or runtime.connection.slots < 1:
        raise EyasError(
            f"endpoint '{endpoint.name}': expected prices and runtime.connection.slots >= 1",
            hint="only endpoint=local is served from this machine",
        )
    return LocalTarget(
        folder=str(TARGET),
        codec=codec,
        model_name=endpoint.model,
        prices=endpoint.prices,
        slots=runtime.connection.slots,
        threads=runtime.threads or os.cpu_count() or 1,
    )


def target_revision(folder: Path = TARGET) -> str:
    """Return the identity of the target's weights.

    Raises: EyasError if there is no target.
    """
    return str(read_json(folder / "eyas_target.json", hint="run `dvc repro target`")["revision"])


def serve_from_params(params: Params, *, port: int) -> None:
    """Serve on 127.0.0.1:`port` until Ctrl-C.

    Raises: EyasError if the port is in use or the target is missing.
    """
    endpoint = params.section("endpoint", Endpoint)
    codec = params.section("target.codec", str)
    target = local_target(endpoint, codec, params.knob("runtime", Runtime))
    address = f"http://{_HOST}:{port}{ROOT}"
    serve(target, port, ready=lambda _: sys.stdout.write(f"{target.model_name}: {address}\n"))


def serve(target: LocalTarget, port: int, *, ready: Callable[[int], object]) -> None:
    """Bind, load, call `ready` with the port (0: a free one is taken), and serve."""
    import uvicorn

    listener = bind(port)
    with listener, contextlib.closing(_load_sampler(target)) as sampler:
        app = target_app(target, load_codec(target.codec, Path(target.folder)), sampler)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=120
        )
        listener.listen(2048)
        ready(listener.getsockname()[1])
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended
            uvicorn.Server(config).run(sockets=[listener])


def bind(port: int) -> socket.socket:
    """Return a bound socket.

    Raises: EyasError if the port is in use.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
    except OSError as error:
        listener.close()
        raise EyasError(
            f"{_HOST}:{port}: cannot listen ({error.strerror})",
            hint="another server has this port; take a free one with --port",
        ) from None
    return listener


def target_app(target: LocalTarget, codec: Codec, sampler: Sampler) -> "Starlette":
    """Return the endpoint's application over a codec and a sampler."""
    folder = Path(target.folder)
    config = read_json(folder / "config.json", hint="run `dvc repro target`")
    context_length = int(config.get("text_config", config)["max_position_embeddings"])
    answer = answering(codec, sampler, context_length, target_revision(folder))
    seller = Seller(name=PROVIDER, prices=target.prices, context_length=context_length)
    return build_app(answer, target.model_name, seller)


def answering(codec: Codec, sampler: Sampler, context_length: int, revision: str) -> Answer:
    """Return the function that answers a checked request body with the target's own reply."""

    async def answer(body: dict[str, Any]) -> LocalAnswer:
        if body.get("target_revision") not in (None, revision):
            raise RefusalError(400, f"target_revision: served here is {revision}")
        prompt_ids = _render(codec, body)
        room = context_length - len(prompt_ids)
        max_tokens = body.get("max_tokens") or min(_DEFAULT_MAX_TOKENS, room)
        if max_tokens > room or room < 1:
            raise RefusalError(
                400,
                f"maximum context length is {context_length} tokens, the prompt has "
                f"{len(prompt_ids)} and max_tokens is {max_tokens}",
                "context_length_exceeded",
            )
        future = sampler.submit(
            prompt_ids,
            max_new_tokens=max_tokens,
            temperature=_given(body, "temperature", 1.0),
            top_p=_given(body, "top_p", 1.0),
            seed=abs(_given(body, "seed", random.getrandbits(31))),
            stop_ids=codec.stop_ids,
        )
        generated = await asyncio.wrap_future(future)
        parts = codec.parse_reply(generated.ids)
        return LocalAnswer(
            content=parts.content,
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
            finish_reason="tool_calls" if parts.tool_calls else generated.finish_reason,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(generated.ids),
            token_ids=tuple(generated.ids),
            token_bytes=tuple(map(codec.bytes_of, generated.ids)) if body.get("logprobs") else (),
        )

    return answer


@contextlib.contextmanager
def serving(target: LocalTarget) -> Generator[str]:
    """Start the endpoint in a process of its own, yield its base URL, end it.

    Raises: EyasError with the process's last words if it ends before it should.
    """
    with tempfile.TemporaryFile("w+") as errors, _process(target, errors) as process:
        try:
            yield f"http://{_HOST}:{_await_ready(process, errors)}{ROOT}"
        except EyasError as error:
            if process.poll() is None:
                raise
            raise EyasError(f"{error}\n  the local endpoint has ended: {_tail(errors)}") from error
        finally:
            _end(process)


def _process(target: LocalTarget, errors: IO[str]) -> subprocess.Popen[str]:
    """Start the process in a session of its own: Ctrl-C in the terminal must not reach it."""
    environment = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(target.threads)}
    process = subprocess.Popen(
        _command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=os.environ | environment,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already; `_await_ready` says why
        process.stdin.write(orjson.dumps(asdict(target)).decode() + "\n")
        process.stdin.flush()
    return process


def _command() -> list[str]:
    return [sys.executable, "-m", "eyas.desk.local_endpoint"]


def _await_ready(process: subprocess.Popen[str], errors: IO[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_READY):
            return int(line.removeprefix(_READY))
    code = process.wait()
    raise EyasError(
        f"local endpoint: ended with code {code} before it was ready: {_tail(errors)}",
        hint="`eyas serve` starts it alone",
    )


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return " / ".join(errors.read().strip().splitlines()[-_TAIL_LINES:]) or "it said nothing"


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _render(codec: Codec, body: Mapping[str, Any]) -> list[int]:
    try:
        return codec.render_prompt(body["messages"], body.get("tools") or [])
    except EyasError as error:
        raise RefusalError(400, str(error)) from None


def _given(body: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if body.get(name) is None else body[name]


def _load_sampler(target: LocalTarget) -> Any:
    from eyas.states.sampler import BatchedSampler
    from eyas.states.target import fast_dtype, load_model

    model = load_model(Path(target.folder), dtype=fast_dtype())
    return BatchedSampler(model, slots=target.slots, threads=target.threads)


def _exit_with_parent() -> None:
    """End when standard input does: the parent closed it, or is gone."""
    while os.read(0, 4096):  # the bare handle: a lock on sys.stdin would spoil a normal exit
        pass
    os._exit(0)


def main() -> None:
    """Serve as a child of `serving`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    target: LocalTarget = fill(LocalTarget, orjson.loads(sys.stdin.readline()), "local target")
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        serve(target, 0, ready=lambda port: sys.stdout.write(f"{_READY}{port}\n"))
    except (EyasError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
