"""The local endpoint: its answers over a stand-in model, its process over stand-in programs."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from providers import RULES

from eyas.desk import local_endpoint
from eyas.desk.local_endpoint import LocalTarget, answering, bind, serve, serving
from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.generation.outcomes import classify
from eyas.generation.shop import RefusalError
from eyas.records import Prompt, Response, Sample
from eyas.settings import Prices
from eyas.tokens.audit import truth_metrics
from eyas.tokens.codecs import ReplyParts, load_codec
from eyas.tokens.rebuild import rebuild_response

TARGET = LocalTarget(
    folder="models/target",
    codec="chatml",
    model_name="m",
    prices=Prices(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=1.0),
    slots=2,
    threads=1,
)
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


class StandInCodec:
    """One id a character; 0 ends a turn."""

    stop_ids: tuple[int, ...] = (0,)
    special_ids: frozenset[int] = frozenset({0})
    markup_ids: frozenset[int] = frozenset()
    vocab_size = 256

    def render_prompt(self, messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        if messages[0]["content"] == "odd":
            raise EyasError("chat template: refuses these messages")
        return [*messages[0]["content"].encode(), *(9 for _ in tools)]

    def normalise(self, reply: ReplyParts) -> ReplyParts:
        raise AssertionError

    def reply_ids(self, reply: ReplyParts, finish_reason: str) -> list[int]:
        raise AssertionError

    def parse_reply(self, ids: Sequence[int]) -> ReplyParts:
        text = bytes(i for i in ids if i).decode()
        calls = ({"id": "c", "function": {"name": "f", "arguments": "{}"}},) if "!" in text else ()
        return ReplyParts(content=text, tool_calls=calls)

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])

    def id_of(self, token: bytes) -> int | None:
        raise NotImplementedError

    def markup_fault(self, ids: Sequence[int], *, is_cut: bool) -> str | None:
        raise NotImplementedError

    def has_special_text(self, text: str) -> bool:
        return False


class StandInSampler:
    """Repeats the prompt."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.closed = False

    def submit(self, prompt_ids: list[int], **settings: Any) -> "Future[Any]":
        self.asked.append(settings)
        future: Future[Any] = Future()
        ids = [*prompt_ids, 0]
        future.set_result(SimpleNamespace(ids=ids, finish_reason="stop"))
        return future

    def close(self) -> None:
        self.closed = True


def ask(body: dict[str, Any], sampler: StandInSampler | None = None) -> Any:
    answer = answering(StandInCodec(), sampler or StandInSampler(), 100, "r1")

    async def wait() -> Any:
        return await answer(body)

    return asyncio.run(wait())


def test_the_answer_is_the_targets_reply_with_its_counts_and_ids() -> None:
    sampler = StandInSampler()
    settings = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    answer = ask(HELLO | settings, sampler)
    assert (answer.content, answer.finish_reason) == ("hello", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (5, 6)
    assert answer.token_ids == (*b"hello", 0)
    assert sampler.asked == [
        {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop_ids": (0,)}
    ]


def test_the_bytes_of_every_token_are_told_where_they_are_asked_for() -> None:
    assert ask(HELLO | {"logprobs": True}).token_bytes == (b"h", b"e", b"l", b"l", b"o", b"\0")
    assert ask(HELLO).token_bytes == ()


def test_zero_is_a_temperature_and_what_is_missing_has_a_default() -> None:
    sampler = StandInSampler()
    ask(HELLO | {"temperature": 0.0, "seed": -4}, sampler)
    ask(HELLO, sampler)
    assert (sampler.asked[0]["temperature"], sampler.asked[0]["seed"]) == (0.0, 4)
    assert (sampler.asked[1]["temperature"], sampler.asked[1]["top_p"]) == (1.0, 1.0)
    assert sampler.asked[1]["max_new_tokens"] == 95


def test_a_tool_call_is_told_by_the_finish_reason() -> None:
    answer = ask({"messages": [{"role": "user", "content": "now!"}], "tools": [{}]})
    assert answer.finish_reason == "tool_calls"
    assert answer.prompt_tokens == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_revision": "r2"}, "served here is r1"),
        ({"max_tokens": 96}, "maximum context length is 100 tokens, the prompt has 5"),
        ({"messages": [{"content": "x" * 100}]}, "maximum context length"),
        ({"messages": [{"content": "odd"}]}, "chat template: refuses"),
    ],
)
def test_what_the_target_cannot_answer_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusalError, match=words) as caught:
        ask(HELLO | change)
    assert caught.value.code == 400
    ask(HELLO | {"target_revision": "r1", "max_tokens": 95})


def test_a_port_in_use_is_told_with_a_hint() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            EyasError, match=rf"127\.0\.0\.1:{port}: cannot listen .*\n  hint: .*port"
        ):
            bind(port)


def make_folder(folder: Path) -> None:
    write_json(folder / "config.json", {"max_position_embeddings": 100})
    write_json(folder / "eyas_target.json", {"revision": "r1"})


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return orjson.loads(response.read())


def test_serving_in_this_process_answers_and_closes_the_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    sampler, ports = StandInSampler(), []
    servers: list[uvicorn.Server] = []
    real = uvicorn.Server.run

    def run(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        servers.append(server)
        real(server, sockets)

    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "models/target")
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(local_endpoint, "_load_sampler", lambda _: sampler)
    monkeypatch.setattr(local_endpoint, "load_codec", lambda *_: StandInCodec())
    thread = threading.Thread(target=serve, args=(TARGET, 0), kwargs={"ready": ports.append})
    thread.start()
    while not servers or not servers[0].started:
        time.sleep(0.01)
    [model] = get(f"http://127.0.0.1:{ports[0]}/api/v1/models")["data"]
    assert (model["id"], model["context_length"]) == ("m", 100)
    servers[0].should_exit = True
    thread.join(10)
    assert sampler.closed


def params(**endpoint: Any) -> Params:
    connection = {"url": None, "api_key_env": None, "timeout_s": 1, "attempts": 1, "slots": 3}
    runtime = {
        "tracking": "off",
        "threads": 2,
        "store": "var",
        "concurrency": {"short": 1},
        "connection": connection,
        "train": {"checkpoint_every_s": 1, "log_every_steps": 1},
    }
    prices = {"prompt_usd_per_mtok": 1, "completion_usd_per_mtok": 2}
    base = {"name": "local", "model": "m", "provider": {}, "prices": prices}
    return Params({"endpoint": base | endpoint, "target": {"codec": "chatml"}, "runtime": runtime})


def test_eyas_serve_takes_the_target_from_the_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []

    def fake(target: LocalTarget, port: int, *, ready: Any) -> None:
        served.append((target, port))
        ready(port)

    monkeypatch.setattr(local_endpoint, "serve", fake)
    local_endpoint.serve_from_params(params(), port=8800)
    [(target, port)] = served
    assert (target.model_name, target.slots, target.threads, port) == ("m", 3, 2, 8800)
    assert capsys.readouterr().out == "m: http://127.0.0.1:8800/api/v1\n"


def test_an_endpoint_that_is_elsewhere_cannot_be_served() -> None:
    with pytest.raises(EyasError, match="endpoint 'openrouter': expected prices"):
        local_endpoint.serve_from_params(params(name="openrouter", prices=None), port=1)


def test_the_child_reads_its_target_and_tells_its_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(target: LocalTarget, port: int, *, ready: Any) -> None:
        assert (target, port) == (TARGET, 0)
        ready(4321)
        raise EyasError("no model")

    line = orjson.dumps(TARGET).decode()
    monkeypatch.setattr(sys, "stdin", io.StringIO(line + "\n"))
    monkeypatch.setattr(local_endpoint, "_exit_with_parent", lambda: None)
    monkeypatch.setattr(local_endpoint, "serve", fake)
    with pytest.raises(SystemExit, match="no model"):
        local_endpoint.main()
    assert capsys.readouterr().out == "eyas-ready 4321\n"


WAITS = "import os\nprint('noise\\neyas-ready 4321', flush=True)\nwhile os.read(0, 99): pass"
DIES = "import sys; sys.exit('first line\\nOut of memory')"
STUBBORN = "import time\nprint('eyas-ready 1', flush=True)\ntime.sleep(60)"
LEAVES = "print('eyas-ready 1', flush=True); raise SystemExit('killed by the system')"


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> list[subprocess.Popen[str]]:
    """Let `serving` start `code`; return the processes it starts."""
    started: list[subprocess.Popen[str]] = []
    real = local_endpoint._process

    def process(*arguments: Any) -> subprocess.Popen[str]:
        started.append(real(*arguments))
        return started[-1]

    monkeypatch.setattr(local_endpoint, "_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setattr(local_endpoint, "_process", process)
    return started


def test_the_process_is_ended_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    started = stand_in(monkeypatch, WAITS)
    with serving(TARGET) as url:
        assert url == "http://127.0.0.1:4321/api/v1"
        assert started[0].poll() is None
    assert started[0].poll() == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, EyasError])
def test_the_process_is_ended_by_an_exception_too(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    started = stand_in(monkeypatch, WAITS)
    with pytest.raises(error, match=r"^x$"), serving(TARGET):
        raise error("x")
    assert started[0].poll() == 0


def test_a_process_that_dies_first_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, DIES)
    words = (
        "ended with code 1 before it was ready: first line / Out of memory\n  hint: `eyas serve`"
    )
    with pytest.raises(EyasError, match=words), serving(TARGET):
        pass


def test_a_process_that_dies_in_between_explains_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started = stand_in(monkeypatch, LEAVES)
    words = "20 rows failed\n  the local endpoint has ended: killed by the system"
    with pytest.raises(EyasError, match=words), serving(TARGET):
        started[0].wait()
        raise EyasError("20 rows failed")


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_endpoint, "_PATIENCE_S", 0.02)
    started = stand_in(monkeypatch, STUBBORN)
    with serving(TARGET):
        pass
    assert started[0].poll() == -signal.SIGKILL


def test_when_the_parent_is_killed_the_endpoint_ends_by_itself() -> None:
    child = (
        "import os, time; from eyas.desk.local_endpoint import _exit_with_parent\n"
        "print(f'eyas-ready {os.getpid()}', flush=True); _exit_with_parent()"
    )
    parent = (
        "import sys, time; from eyas.desk import local_endpoint as e\n"
        f"e._command = lambda: [sys.executable, '-c', {child!r}]\n"
        f"target = e.fill(e.LocalTarget, {asdict(TARGET)!r}, 'target')\n"
        "with e.serving(target) as url:\n"
        "    print(url, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split(":")[2].split("/")[0])
        os.kill(pid, 0)
        process.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Tell whether a process runs; an orphan may stay as a zombie where nobody reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def random_target(tmp_path: Path) -> Path:
    """Return the folder of a small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from eyas.tokens.tokenizers import train_tokenizer

    folder = tmp_path / "target"
    texts = ["hello world, what is the answer to this question?"] * 4
    size = train_tokenizer(texts, folder, vocab_size=300, max_length=128)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    write_json(folder / "eyas_target.json", {"revision": "r1"})
    return folder


@pytest.mark.slow
def test_a_real_target_in_a_real_process_answers_the_same_seed_the_same(
    random_target: Path,
) -> None:
    body = HELLO | {"model": "m", "max_tokens": 12, "seed": 5, "return_token_ids": True}
    with serving(replace(TARGET, folder=str(random_target))) as url:
        first, second = (post(f"{url}/chat/completions", body) for _ in range(2))
        assert get(f"{url}/key")["data"]["usage"] == pytest.approx(2 * first["usage"]["cost"])
    assert first["choices"] == second["choices"]
    ids = first["choices"][0]["token_ids"]
    assert len(ids) == first["usage"]["completion_tokens"] <= 12


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, orjson.dumps(body), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return orjson.loads(response.read())


@pytest.mark.slow
def test_sampled_spellings_come_through_the_endpoint_to_the_token(random_target: Path) -> None:
    codec = load_codec("chatml", random_target)
    prompt = Prompt(
        id="p", dataset="d", upstream_id="u", messages=tuple(HELLO["messages"]), tools=(),
        prompt_tokens=0, partition="short", licence="MIT",
    )  # fmt: skip
    told = {"model": "m", "max_tokens": 24, "return_token_ids": True, "logprobs": True}
    rebuilt = []
    with serving(replace(TARGET, folder=str(random_target))) as url:
        for seed in range(12):
            body = orjson.dumps(post(f"{url}/chat/completions", HELLO | told | {"seed": seed}))
            outcome = classify(200, {}, body.decode())
            reply = outcome.reply
            assert reply is not None
            assert reply.pieces is not None
            response = Response(
                id="p", fingerprint="f", sample=seed, model="m", provider="local",
                generation_id=reply.generation_id, reasoning=None, content=reply.content,
                tool_calls=(), finish_reason=reply.finish_reason, native_finish_reason=None,
                prompt_tokens=outcome.prompt_tokens or 0,
                completion_tokens=outcome.completion_tokens or 0,
                cost_usd=0.0, latency_s=0.0, attempts=1, source="local", sampling={}, usage={},
                true_ids=reply.true_ids, pieces=reply.pieces,
            )  # fmt: skip
            rebuilt.append(rebuild_response(prompt, response, codec, RULES))
    taken = [one for one in rebuilt if one.evidence and one.evidence.refused == ""]
    assert len(taken) >= 10  # a random target may end in more loose bytes than a character has
    assert all(isinstance(one.result, Sample) for one in taken)
    assert truth_metrics(taken)["identical_share"] == 1.0
    assert truth_metrics(taken)["text_identical_share"] < 0.5  # it spells at random
