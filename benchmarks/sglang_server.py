"""A real SGLang on the CPU, with a drafter or capturing; eyas.drafter.served asks it.

Runs out of an environment of its own (.venv-sglang, made by `make test-sglang`), with the stand-ins
of benchmarks/sglang_cpu on its path. Drafts are chains, weights float32.
Source: SGLang 0.5.23 launch flags.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from eyas.drafter.served import IN_FLIGHT
from eyas.errors import EyasError

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-sglang/bin/python"
STAND_INS = ROOT / "benchmarks/sglang_cpu"
START_S = 600
STOP_S = 20
MAX_RUNNING = IN_FLIGHT
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
