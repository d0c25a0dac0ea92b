"""Count what MLflow holds after processes that collide, are killed, and go on.

`fresh`: six processes start at once on a database that is not there yet, each records a stage.
`killed`: in a clone where the pipeline has run, `dvc repro` is killed twice and then ends, a sweep
of four jobs runs two at once, is killed and goes on. Both tell runs by kind and status, what is
left over, and whether the database is whole. Prints one JSON line each.

Run: python benchmarks/tracking.py [--clone FOLDER] [--overrides experiment=tiny]
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROCESSES = 6
STAGE = """
import sys
from eyas.desk import tracking
from eyas.desk.params import Params
from eyas.desk.stage import Report
params = Params({"target": {"name": "tiny"}})
tracking.record(f"stage{sys.argv[1]}", params, Report(summary="", metrics={"n": 1}), started_s=1.0)
"""
SWEEP = ("train.lr=1e-4,3e-4", "train.seed=0,1", "runtime.threads=1")
TWO_AT_ONCE = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
RUNS = """
select r.status, (select value from tags where run_uuid = r.run_uuid and key = 'pipeline.key'),
  (select value from tags where run_uuid = r.run_uuid and key = 'mlflow.parentRunId')
from runs r where r.lifecycle_stage = 'active'
"""


def audit(database: Path) -> dict[str, Any]:
    """Return the runs by kind, doubles, orphans, and what SQLite says of its file."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(RUNS).fetchall()
        known = {row[0] for row in connection.execute("select run_uuid from runs")}
        whole = connection.execute("pragma integrity_check").fetchone()[0]
    keys = Counter(key for _, key, _ in rows)
    return {
        "parents": sum(parent is None for *_, parent in rows),
        "children": sum(parent is not None for *_, parent in rows),
        "doubles": sum(count - 1 for count in keys.values()),
        "orphans": sum(parent is not None and parent not in known for *_, parent in rows),
        "unfinished_or_failed": sum(status != "FINISHED" for status, *_ in rows),
        "integrity": whole,
    }


def fresh() -> dict[str, Any]:
    """Let six processes record their first run at the same moment."""
    with tempfile.TemporaryDirectory() as name:
        began_s = time.monotonic()
        started = [
            subprocess.Popen(
                [sys.executable, "-c", STAGE, str(i)], cwd=name, stderr=subprocess.PIPE, text=True
            )
            for i in range(PROCESSES)
        ]
        said = [process.communicate()[1] for process in started]
        found = audit(Path(name, "var/mlflow.db"))
        seconds = round(time.monotonic() - began_s, 1)
        warned = sum(bool(text) for text in said)
        return {
            "what": "fresh",
            "processes": PROCESSES,
            "warned": warned,
            "wall_s": seconds,
        } | found


def killed(clone: Path, overrides: list[str]) -> dict[str, Any]:
    """Kill `dvc repro` twice and a sweep once, let each end, and count."""
    before = audit(clone / "var/mlflow.db")
    sweep = [sys.executable, "-m", "eyas.stages.sweep", "--multirun", *overrides, *SWEEP]
    repro = ["dvc", "repro", "-f", "-s", "train", "export", "evaluate"]
    codes = [
        run(repro, clone, kill_after_s=6.0),
        run(repro, clone, kill_after_s=16.0),
        run(repro, clone),
        run([*sweep, *TWO_AT_ONCE], clone, kill_after_s=20.0),
        run([*sweep, *TWO_AT_ONCE], clone),
    ]
    found = audit(clone / "var/mlflow.db")
    new = {f"new_{k}": v - before[k] for k, v in found.items() if isinstance(v, int)}
    return {"what": "killed", "exit_codes": codes, "integrity": found["integrity"]} | new


def run(command: list[str], folder: Path, kill_after_s: float | None = None) -> int:
    """Run a command, killing it with SIGKILL after a while if asked; return its exit code."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    try:
        return process.wait(timeout=kill_after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        return process.wait()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clone", type=Path, help="a clone in which the pipeline has run")
    parser.add_argument("--overrides", nargs="*", default=["experiment=tiny"])
    arguments = parser.parse_args()
    print(json.dumps(fresh()), flush=True)
    if arguments.clone:
        print(json.dumps(killed(arguments.clone, arguments.overrides)))


if __name__ == "__main__":
    main()
