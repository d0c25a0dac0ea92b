"""Run one project's step in a process of its own, on commands from standard input.

Reads: a JSON object a line: `{"do": "advance", "count": 4}` or `{"do": "gradients", "path": FILE}`.
Writes: a JSON object a line on standard output; gradients as safetensors.
Run: PYTHONPATH=benchmarks python -m peers.worker NAME --config FILE [--data FILE] [--dtype TYPE]
"""

import argparse
import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from peers.batch import Step, made_up, read_batch, read_config
from peers.floor import floor


def main() -> None:
    """Answer commands until the input ends; whatever a project prints goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("eyas", "specforge", "speculators"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        config = read_config(args.config)
        batch = read_batch(args.data) if args.data else made_up(config)
        make = importlib.import_module(f"peers.{args.name}_step").Step
        step: Step = make(config, batch, args.dtype)
        for line in sys.stdin:
            match json.loads(line):
                case {"do": "advance", "count": count}:
                    answer = advance(step, count)
                case {"do": "gradients", "path": path}:
                    answer = gradients(step, path)
                case {"do": "floor"}:
                    answer = floor(config, batch, args.dtype) | {"tokens": batch.tokens}
                case other:
                    raise ValueError(f"worker: expected advance, gradients or floor, got {other}")
            print(json.dumps(answer), file=answers, flush=True)


def advance(step: Step, count: int) -> dict[str, Any]:
    """Do so many steps; return CPU seconds of each, and the peak above the level before them."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
    before_mb = _memory_mb("VmRSS")
    cpu_s = []
    for _ in range(count):
        started_s = time.process_time()
        step.advance()
        cpu_s.append(time.process_time() - started_s)
    return {"cpu_s": cpu_s, "peak_mb": _memory_mb("VmHWM") - before_mb}


def gradients(step: Step, path: str) -> dict[str, Any]:
    """Write the gradients under SpecForge's convention, clear them, and return the loss."""
    loss = step.gradients()
    parameters = step.parameters()
    save_file({k: v.grad for k, v in parameters.items() if v.grad is not None}, path)
    for parameter in parameters.values():
        parameter.grad = None
    return {"loss": loss}


def _memory_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status: expected a line {field}, got none")


if __name__ == "__main__":
    main()
