"""A real SGLang on the CPU, with a drafter or capturing: started, asked for replies, stopped.

Runs out of an environment of its own (.venv-sglang, made by `make test-sglang`), with the stand-ins
of benchmarks/sglang_cpu on its path. Drafts are chains, weights float32.
Source: SGLang 0.5.23 launch flags; docs: `meta_info` of POST /generate, GET /server_info.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-sglang/bin/python"
STAND_INS = ROOT / "benchmarks/sglang_cpu"
START_S = 600
STOP_S = 20
MAX_RUNNING = 16
MAX_TOKENS = 16_384  # places of the cache, all requests together
_LOG_LINES = 15
# Two attentions by name: given as one flag, SGLang finds no AMX kernels and takes a backend that
# knows no drafts. The log interval makes /server_info count every step.
_FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    "--prefill-attention-backend=intel_amx",
    "--decode-attention-backend=intel_amx",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--mem-fraction-static=0.5",
    "--skip-server-warmup",
    "--decode-log-interval=1",
    "--speculative-algorithm=EAGLE3",
    f"--max-running-requests={MAX_RUNNING}",
    f"--max-total-tokens={MAX_TOKENS}",
    "--host=127.0.0.1",
)
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # two threads that spin on two busy cores wait for each other
    "OMP_WAIT_POLICY": "passive",
    "PYTHONPATH": str(STAND_INS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the server answered; no verification where the prefill was enough."""

    ids: tuple[int, ...]
    verifications: int


@contextlib.contextmanager
def serving(
    flags: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Generator[str]:
    """Run a server with these flags besides the usual ones, and give its address.

    Raises: EyasError with the end of the log if it does not come up.
    """
    if not PYTHON.is_file():
        raise EyasError(f"{PYTHON}: no such file", hint="run `make test-sglang`, which installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "sglang.launch_server", f"--port={port}", *flags, *_FLAGS],
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url, process, log)
        yield url
    finally:
        _stop(process)


def drafting(target: Path, drafter: Path, num_drafts: int) -> list[str]:
    """Return the flags for chains of `num_drafts`."""
    return [
        f"--model-path={target}",
        f"--speculative-draft-model-path={drafter}",
        "--speculative-eagle-topk=1",
        f"--speculative-num-steps={num_drafts}",
        f"--speculative-num-draft-tokens={num_drafts + 1}",  # the last committed token is one
    ]


def capturing(target: Path, layers: Sequence[int]) -> list[str]:
    """Return the flags for the capture of hidden states; EYAS_STORE must name the store."""
    return [
        f"--model-path={target}",
        "--enable-return-hidden-states",
        "--enable-return-aux-hidden-states",
        "--return-aux-hidden-state-layer-ids",
        *map(str, layers),
        "--disable-radix-cache",
        "--chunked-prefill-size=-1",
    ]


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    state = "ended" if process.poll() is not None else f"gave no answer for {START_S} s"
    raise EyasError("\n".join([f"the server {state}; the end of its log:", *end]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children, which share its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def ask_all(
    url: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> list[Reply]:
    """Send all prompts as ids, at most as many at once as the server runs; replies in order."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stop_ids),
    }

    def ask(ids: Sequence[int]) -> Reply:
        body = {"input_ids": list(ids), "sampling_params": sampling}
        return reply_of(_fetch(f"{url}/generate", body))

    with ThreadPoolExecutor(MAX_RUNNING) as pool:
        return list(pool.map(ask, prompts))


def reply_of(answer: dict[str, Any]) -> Reply:
    """Return ids and counts; the counts are left out of an answer without a verification."""
    meta = answer["meta_info"]
    return Reply(
        ids=tuple(answer["output_ids"]),
        verifications=meta.get("spec_verify_ct", 0),
    )


def server_info(url: str) -> dict[str, Any]:
    """Return the server's settings, and its counts under `internal_states`."""
    return _fetch(f"{url}/server_info", None)


def _fetch(url: str, body: object) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise EyasError(f"{url}: HTTP {error.code}: {error.read(500).decode()}") from None
