"""Capture and train in turns over a disk of fixed size, and compare with the stored run.

Three runs of extract and train over one mixture and the same windows: all shards kept; window by
window; window by window, killed as often as asked. The target is tiny and trained here, the mixture
is the project's own texts. The store's folder is measured every 5 ms, with the room of deleted
shards that the stage still maps.

Works in a temporary folder. Prints one JSON line; exits 1 if a bit differs, the bound is broken, or
a kill came after the end.

Run: python benchmarks/window.py [--tokens 24000] [--windows 4] [--epochs 2] [--kills 4]
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from workspace import sample_of

from eyas.desk.params import compose
from eyas.files import read_json, sha256_of
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.states.tiny import project_texts
from eyas.tokens.tokenizers import encode_texts

ROOT = Path(__file__).resolve().parents[1]
SHARD_TOKENS = 256
TOKEN_BYTES = 1028  # 4 + 4 states of 128 in bf16
FRAMES = 1.1  # headers, and windows of whole shards
OPTIONS = ("-cd", ".", "-cn", "params", "hydra.run.dir=.", "hydra.output_subdir=null")
EVERY_S = 0.005
STARTS_S = 5.0  # a stage imports torch before it works


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=24_000)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--target-steps", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=4)
    given = parser.parse_args()
    window_gb = FRAMES * given.tokens * TOKEN_BYTES / given.windows / 1e9
    settings = [f"extract.window_gb={window_gb}", f"train.epochs={given.epochs}"]
    with tempfile.TemporaryDirectory(prefix="eyas-window-") as name:
        folder = Path(name)
        prepare(folder, given.target_steps, given.tokens, settings)
        stored = Run(folder, keep=True)
        bounded = Run(folder, keep=False)
        usual_s = bounded.train["wall_s"] / (given.kills + 1)
        killed = Run(folder, keep=False, kills=given.kills, usual_s=usual_s)
    bound = round(window_gb * 1e9) + bounded.extract["kept_bytes"]
    train = bounded.train
    line: dict[str, object] = {"what": "window", "windows": bounded.extract["windows"]}
    line |= {"epochs": given.epochs, "tokens": train["tokens"], "bound_bytes": bound}
    line |= {"peak_bytes": bounded.peak_bytes, "peak_bytes_killed": killed.peak_bytes}
    line |= {"stored_bytes": stored.peak_bytes, "captured_tokens": train["captured_tokens"]}
    line |= {"capture_share": round(train["capture_s"] / train["wall_s"], 3)}
    line |= {"kills": killed.kills, "weights_equal": bounded.digest == stored.digest}
    line |= {"weights_equal_killed": killed.digest == stored.digest}
    peak = max(bounded.peak_bytes, killed.peak_bytes)
    met = bounded.digest == killed.digest == stored.digest and peak <= bound
    met = met and killed.kills == given.kills
    print(json.dumps(line | {"met": met}))
    sys.exit(not met)


def prepare(folder: Path, steps: int, tokens: int, settings: list[str]) -> None:
    """Train the target, write the mixture and the parameters."""
    for name in ("data/sources", "README.md", "docs"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    knobs = ["experiment=tiny", f"target.source.steps={steps}", "runtime.tracking=off"]
    knobs += ["runtime.threads=1", f"extract.shard_tokens={SHARD_TOKENS}", *settings]
    text = compose(knobs, ROOT / "conf")
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    if start(folder, "target").wait():
        sys.exit((folder / "log").read_text("utf-8"))
    rows = [row for row in encode_texts(folder / "models/target", project_texts(ROOT)) if row[8:]]
    samples: list[Sample] = []
    while sum(len(s.input_ids) for s in samples) < tokens:
        ids = rows[len(samples) % len(rows)][:SHARD_TOKENS]
        samples.append(sample_of(len(samples), ids))
    write_samples(folder / "data/mixture/train.parquet", samples[8:])
    write_samples(folder / "data/mixture/val.parquet", samples[:8])


def start(folder: Path, stage: str, *options: str) -> subprocess.Popen[bytes]:
    """Start a stage as DVC does."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"eyas.stages.{stage}", *OPTIONS, *options],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdout=log,
            stderr=log,
        )


class Run:
    """Extract and train into an empty store."""

    def __init__(self, folder: Path, *, keep: bool, kills: int = 0, usual_s: float = 0.0) -> None:
        self.peak_bytes, self.kills, dice = 0, 0, random.Random(0)
        knob = f"runtime.extract.keep_windows={str(keep).lower()}"
        for name in ("var/states", "var/checkpoints", "models/drafter"):
            subprocess.run(["rm", "-rf", folder / name], check=True)
        for stage in ("extract", *["train"] * (kills + 1)):
            process, deadline_s = start(folder, stage, knob), float("inf")
            if stage == "train" and self.kills < kills:
                deadline_s = time.monotonic() + STARTS_S + dice.uniform(0.3, 1.0) * usual_s
            code = self._watch(folder, process, deadline_s)
            if code == -9:
                self.kills += 1
            elif code:
                sys.exit((folder / "log").read_text("utf-8"))
            elif stage == "train":
                break
        self.extract: dict[str, int] = read_json(folder / "metrics/extract.json")
        self.train: dict[str, float] = read_json(folder / "metrics/train.json")
        self.digest = sha256_of(folder / "models/drafter/drafter.safetensors")

    def _watch(self, folder: Path, process: subprocess.Popen[bytes], deadline_s: float) -> int:
        while process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, room_of(folder / "var/states", process.pid))
            if time.monotonic() > deadline_s:
                process.kill()
            time.sleep(EVERY_S)
        return process.wait()


def room_of(store: Path, pid: int) -> int:
    """Return the bytes of a folder's files, and of those deleted that a process still maps."""
    size = 0
    for path in store.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
        lines = Path(f"/proc/{pid}/maps").read_text("utf-8").splitlines()
        for line in lines:
            if "shard-" in line and line.endswith("(deleted)"):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                size += end - begin
    return size


if __name__ == "__main__":
    main()
