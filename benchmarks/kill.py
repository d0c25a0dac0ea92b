"""Kill `dvc repro` in generate, extract and train, run it again, and compare the drafter's weights.

Works in a throw-away copy of this repository with a server of its own, so that the server's ledger
counts the requests of all runs together. Prints one JSON line.

Run: python benchmarks/kill.py --reference models/drafter/drafter.safetensors
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from eyas.files import read_json, read_jsonl, sha256_of

PORT = 8899
SIGNS = {
    "generate@chat": "var/journal/chat/responses.jsonl",
    "extract": "var/states/*/*.safetensors",
    "train": "var/checkpoints/*/checkpoint.safetensors",
}


def repro(folder: Path, environment: dict[str, str], *targets: str) -> subprocess.Popen[bytes]:
    """Start `dvc repro` in a process group of its own."""
    log = (folder / "repro.log").open("ab")
    return subprocess.Popen(
        ["dvc", "repro", *targets], cwd=folder, env=environment, stdout=log, stderr=log
    )


def kill_in(folder: Path, environment: dict[str, str], stage: str, delay_s: float) -> None:
    """Start a run and SIGKILL DVC `delay_s` after the stage has left its first trace."""
    run = repro(folder, environment)
    while not any(folder.glob(SIGNS[stage])):
        if run.poll() is not None:
            sys.exit(f"dvc repro ended ({run.returncode}) before {stage} began: {folder}/repro.log")
        time.sleep(0.1)
    time.sleep(delay_s)
    run.send_signal(signal.SIGKILL)
    run.wait()
    print(f"killed in {stage}", file=sys.stderr)


def requests_served(port: int) -> int:
    """Ask the server's ledger how many requests it has answered or begun."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/ledger") as reply:
        return int(json.load(reply)["data"]["requests"])


def prompts_of(folder: Path) -> int:
    """Count the prompts of all data sets that are sent."""
    return sum(
        read_json(path)["prompts"]
        for path in (folder / "metrics").glob("generate-*.json")
        if not path.stem.endswith("trajectories")
    )


def main() -> None:
    """Run the three kills and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True, help="weights of a quiet run")
    parser.add_argument("--delay-s", type=float, default=3.0)
    options = parser.parse_args()
    root, folder = Path.cwd(), Path(tempfile.mkdtemp(prefix="eyas-kill-"))
    subprocess.run(["git", "clone", "-q", str(root), str(folder)], check=True)
    config = folder / "conf/endpoint/local.yaml"
    url = f"url: http://127.0.0.1:{PORT}/api/v1"
    config.write_text(config.read_text(encoding="utf-8").replace("url: null", url), "utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    if repro(folder, environment, "target").wait() != 0:
        sys.exit(f"the target could not be built: {folder}/repro.log")
    server = subprocess.Popen(["eyas", "serve", "--port", str(PORT)], cwd=folder, env=environment)
    try:
        for stage in SIGNS:
            kill_in(folder, environment, stage, options.delay_s)
        code = repro(folder, environment).wait()
        served = requests_served(PORT)
    finally:
        server.terminate()
    issued = sum(len(list(read_jsonl(p))) for p in folder.glob("var/journal/*/issued.jsonl"))
    weights = folder / "models/drafter/drafter.safetensors"
    line = {
        "kills": list(SIGNS),
        "exit_code": code,
        "prompts": prompts_of(folder),
        "requests_issued": issued,
        "requests_served": served,
        "weights_equal": sha256_of(weights) == sha256_of(options.reference),
        "folder": str(folder),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
