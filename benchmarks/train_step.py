"""Measure the training step beside SpecForge's and speculators': time, memory, and gradients.

Reads: --config (JSON sizes) and maybe --data (a batch file). Writes: JSON lines. A line a project:
tokens per CPU-second of one thread, and peak memory above the level before its first step. All run
in turns, each in a process of its own on one core; theirs in .venv-peers, in float32. First line,
in float32: our loss and gradients against SpecForge's under its rows and divisor.

Run: make .venv-peers/.ready; python benchmarks/train_step.py --config FILE [--data FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = ROOT / ".venv-peers/bin/python"
PEERS = ("specforge", "speculators")
TOLERANCE = 1e-5
MEMORY_BAR = 0.5
FLOOR_BAR = 0.6
BARS = {  # tokens per CPU-second over those of the faster peer
    "float32": {"small": 2.0, "long": 2.0, "masked": 2.5, "smol": 1.7},
    "bfloat16": {"long": 4.0, "masked": 4.0, "smol": 4.0},
}


class Worker:
    """A project's step in a process of its own."""

    def __init__(self, name: str, options: list[str]) -> None:
        self.name = name
        python = sys.executable if name == "eyas" else str(PEERS_PYTHON)
        path = [str(ROOT / "benchmarks")] + ([str(ROOT / "src")] if name == "eyas" else [])
        settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        settings |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, "-m", "peers.worker", name, *options],
            env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Return the answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ValueError(
                f"{self.name}: expected an answer to {do}, the worker ended; see above"
            )
        return json.loads(answer)

    def close(self) -> None:
        """End it: its input ends."""
        self._process.communicate(timeout=60)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dtype", choices=tuple(BARS), default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    args = parser.parse_args()
    if not PEERS_PYTHON.is_file():
        raise SystemExit(f"{PEERS_PYTHON}: not there. hint: make .venv-peers/.ready")
    for line in measure(args):
        print(json.dumps(line), flush=True)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for the gradients, and one for each project."""
    options = ["--config", str(args.config)] + (["--data", str(args.data)] if args.data else [])
    if args.dtype == "float32":
        with started(("eyas", "specforge"), options) as workers:
            yield compare(workers["eyas"], workers["specforge"])
    with started(("eyas", *PEERS), options, args.dtype) as workers:
        yield from race(args, workers)


@contextmanager
def started(
    names: Sequence[str], options: list[str], dtype: str = "float32"
) -> Generator[dict[str, Worker]]:
    """Yield a worker for each name; ours computes in `dtype`."""
    with ExitStack() as stack:
        workers = {}
        for name in names:
            own = dtype if name == "eyas" else "float32"
            workers[name] = Worker(name, [*options, "--dtype", own])
            stack.callback(workers[name].close)
        yield workers


def compare(ours: Worker, specforge: Worker) -> dict[str, Any]:
    """Return the largest relative difference of a gradient (norm over norm) and of the loss."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / worker.name for worker in (ours, specforge)]
        losses = [
            worker.ask("gradients", path=str(path))["loss"]
            for worker, path in zip((ours, specforge), paths, strict=True)
        ]
        got, expected = (load_file(path) for path in paths)
    if set(got) != set(expected):
        raise ValueError(f"gradients: expected of {sorted(expected)}, got of {sorted(got)}")
    errors = {
        name: float((got[name].double() - want.double()).norm() / want.double().norm())
        for name, want in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(losses[0] - losses[1]) / abs(losses[1])
    return {
        "what": "gradients",
        "loss": losses[0],
        "loss_relative_error": loss_error,
        "worst_gradient": worst,
        "worst_relative_error": errors[worst],
        "tensors": len(errors),
        "bar": TOLERANCE,
        "met": max(loss_error, errors[worst]) <= TOLERANCE,
    }


def race(args: argparse.Namespace, workers: dict[str, Worker]) -> Iterator[dict[str, Any]]:
    """Yield each project's speed and memory, ours last, with its ratios and bars."""
    peaks = {name: worker.ask("advance", count=1)["peak_mb"] for name, worker in workers.items()}
    cpu_s: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            cpu_s[name] += worker.ask("advance", count=args.steps)["cpu_s"]
    facts = workers["eyas"].ask("floor")
    rates = {name: facts["tokens"] / statistics.median(times) for name, times in cpu_s.items()}
    for name in (*PEERS, "eyas"):
        line = {"what": "step", "project": name, "config": args.config.stem}
        line |= {"dtype": args.dtype if name == "eyas" else "float32"}
        line |= {"tokens_per_cpu_s": round(rates[name], 1), "peak_mb": round(peaks[name], 1)}
        line |= {"best": round(facts["tokens"] / min(cpu_s[name]), 1)}
        yield line | (verdict(args, rates, peaks, facts) if name == "eyas" else {})


def verdict(
    args: argparse.Namespace,
    rates: dict[str, float],
    peaks: dict[str, float],
    facts: dict[str, float],
) -> dict[str, Any]:
    """Return our ratios: to the faster peer, to its memory, and to the products' time."""
    faster = max(PEERS, key=lambda name: rates[name])
    bar = BARS[args.dtype].get(args.config.stem)
    line = {
        "faster_peer": faster,
        "ratio": round(rates["eyas"] / rates[faster], 2),
        "memory_ratio": round(peaks["eyas"] / peaks[faster], 3),
        "gflop": round(facts["gflop"], 1),
        "gemm_gflop_per_s": round(facts["gflop_per_s"], 1),
        "share_of_floor": round(facts["floor_s"] * rates["eyas"] / facts["tokens"], 3),
    }
    if bar is None:
        return line
    floor_met = args.dtype != "float32" or line["share_of_floor"] >= FLOOR_BAR
    met = line["ratio"] >= bar and line["memory_ratio"] <= MEMORY_BAR and floor_met
    return line | {"bar": bar, "memory_bar": MEMORY_BAR, "floor_bar": FLOOR_BAR, "met": met}


if __name__ == "__main__":
    main()
