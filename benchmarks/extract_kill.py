"""Kill an extraction with two workers again and again, and compare its store with a quiet one's.

The victim is the stage's own process or one of its workers, at random; a run whose worker was
killed goes on, a run that was killed is started again. Target and samples are random.

Works in a temporary folder. Prints one JSON line; exits 1 if the stores differ.

Run: python benchmarks/extract_kill.py [--kills 10]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.desk.params import compose
from eyas.files import write_json
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.states.store import verify

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2
LENGTH = 600
VOCABULARY = 512
MANIFEST = "data/hidden_states/manifest.json"


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--shards", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eyas-extract-kill-") as name:
        quiet, stormy = Path(name, "quiet"), Path(name, "stormy")
        for folder, workers in ((quiet, 1), (stormy, WORKERS)):
            prepare(folder, given.shards, workers)
        if start(quiet).wait():
            sys.exit(f"the undisturbed run failed:\n{(quiet / 'log').read_text('utf-8')}")
        killed, starts = storm(stormy, given.kills)
        faults = verify(stormy / MANIFEST, stormy / "var/states")
        equal = contents(stormy) == contents(quiet)
    line = {"what": "extraction killed", "workers": WORKERS, "shards": given.shards}
    line |= {"kills": sum(killed.values()), "killed": killed, "starts": starts}
    met = equal and not faults
    print(json.dumps(line | {"faults": len(faults), "equal": equal, "met": met}))
    sys.exit(not met)


def prepare(folder: Path, num_shards: int, workers: int) -> None:
    """Lay out a random target, one sample a shard, and the parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    target = folder / "models/target"
    LlamaForCausalLM(config).save_pretrained(target)
    about = {"name": "random", "codec": "chatml", "revision": "r0", "source": {}}
    write_json(target / "eyas_target.json", about)
    samples = [
        Sample(
            id=f"{number:032x}",
            dataset="random",
            input_ids=tuple(torch.randint(VOCABULARY, (LENGTH,)).tolist()),
            spans=((LENGTH // 2, LENGTH),),
            temperature=0.7,
            provider="local",
            flags=(),
            completion_tokens_billed=None,
        )
        for number in range(num_shards)
    ]
    write_samples(folder / "data/mixture/train.parquet", samples[1:])
    write_samples(folder / "data/mixture/val.parquet", samples[:1])
    knobs = [f"extract.shard_tokens={LENGTH}", "runtime.tracking=off", "runtime.threads=1"]
    text = compose([*knobs, f"runtime.extract.workers={workers}"], ROOT / "conf")
    (folder / "params.yaml").write_text(text, encoding="utf-8")


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the stage as DVC does."""
    options = ["-cd", ".", "-cn", "params", "hydra.run.dir=.", "hydra.output_subdir=null"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "eyas.stages.extract", *options],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdout=log,
            stderr=log,
        )


def storm(folder: Path, kills: int) -> tuple[dict[str, int], int]:
    """Kill so often, then let it end; return the kills by victim, and how often it was started."""
    dice, killed, starts = random.Random(0), {"stage": 0, "worker": 0}, 0
    while True:
        run, starts = start(folder), starts + 1
        while run.poll() is None and sum(killed.values()) < kills:
            number = len(list(folder.glob("var/states/*/shard-*.json")))
            while run.poll() is None and number == len(
                list(folder.glob("var/states/*/shard-*.json"))
            ):
                time.sleep(0.02)
            time.sleep(dice.uniform(0, 0.6))  # a shard takes about as long
            kind = dice.choice(list(killed))
            if victim := process_of(run, kind):
                victim.kill()
                killed[kind] += 1
                if kind == "stage":
                    run.wait()
        code = run.wait()
        if code == 0 and sum(killed.values()) < kills:
            sys.exit(f"all shards were made after {killed}: raise --shards")
        if code == 0:
            return killed, starts
        if code > 0 and starts > sum(killed.values()):  # a start ended that nobody killed
            sys.exit(f"the stage failed:\n{(folder / 'log').read_text('utf-8')}")


def process_of(run: subprocess.Popen[bytes], kind: str) -> psutil.Process | None:
    """Return the process of the stage, or of a worker that still runs; None where it has ended."""
    try:
        stage = psutil.Process(run.pid)
        if kind == "stage":
            return stage
        children = [p for p in stage.children() if "spawn_main" in " ".join(p.cmdline())]
    except psutil.NoSuchProcess:
        return None
    return children[0] if children else None


def contents(folder: Path) -> dict[str, bytes]:
    """Return the manifest, and every shard and its description."""
    files = [*folder.glob("var/states/*/shard-*.safetensors"), folder / MANIFEST]
    files += folder.glob("var/states/*/shard-*.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


if __name__ == "__main__":
    main()
