"""Walk a new user's path through fresh clones: every command, what it printed, and its seconds.

Run, run again, change a budget, sweep two values, compare two states on a page, trace, push, clone
elsewhere, pull, and see that nothing is left to do. Commands are what README and docs say, typed in
a shell with the clone's own environment; what each must show is checked. A folder that exists is
gone on with: commands that have ended well are not repeated. Prints a transcript, then a JSON line.
Run: python benchmarks/newcomer.py DIR [--experiment tiny]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eyas.files import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
GIT = "git -c user.name=new -c user.email=new@example.org"
FRESH = "git remote remove origin"  # a colleague's clone, not ours


class Step(NamedTuple):
    """A command of the path, where it is typed, and a text that it must print."""

    title: str
    place: str  # folder below DIR
    command: str
    shows: str = ""


def path_of(experiment: str | None) -> list[Step]:
    """Return the path; an experiment is chosen in conf/, as README says."""
    chosen, data = "", "default"
    if experiment:
        data = experiment
        chosen = f" && sed -i 's/experiment: null/experiment: {experiment}/' conf/config.yaml"
    budget = f"conf/datasets/{data}.yaml"
    code = rf"/^code:/,/budget_tokens/ s/budget_tokens: [0-9]*/budget_tokens: {_budget(budget)}/"
    kept = "git add -A && " + GIT + " commit -qm"
    return [
        Step("clone", ".", f"git clone -q {ROOT} eyas && cd eyas && {FRESH}{chosen}"),
        Step("install", "eyas", "make install"),
        Step("run", "eyas", "make run", "lossless on"),
        Step("run again", "eyas", "make run", "Data and pipelines are up to date."),
        Step("keep it", "eyas", f"{kept} 'First run'"),
        Step("change a budget", "eyas", f"sed -i '{code}' {budget} && git diff --stat", budget),
        Step("run what is stale", "eyas", "make run", "Running stage 'generate@code'"),
        Step("keep it too", "eyas", f"{kept} 'Smaller budget of code'"),
        Step("what changed", "eyas", "dvc params diff HEAD~1 && dvc metrics diff HEAD~1"),
        Step(
            *("sweep two values", "eyas"),
            "python -m eyas.stages.sweep --multirun train=small train.lr=1e-4,3e-4",
            "2 of 2 jobs",
        ),
        Step("compare", "eyas", "eyas report --compare HEAD~1 .", "reports/compare.html"),
        Step("trace", "eyas", "eyas lineage models/export", "USD/Mtok"),
        Step("name a remote", "eyas", "make remote TO=$PWD/../team", ""),
        Step("push", "eyas", "make push", "pushed"),
        Step("clone elsewhere", ".", f"git clone -q eyas colleague && cd colleague && {FRESH}"),
        Step("install there", "colleague", "make install"),
        Step("name the remote there", "colleague", "make remote TO=$PWD/../team"),
        Step("pull", "colleague", "make pull", "fetched"),
        Step("nothing to do", "colleague", "dvc repro", "Data and pipelines are up to date."),
    ]


def _budget(path: str) -> int:
    """Return about a third of the budget that the data set `code` has."""
    text = (ROOT / path).read_text(encoding="utf-8").split("\ncode:")[1]
    return int(text.split("budget_tokens: ")[1].split(",")[0]) * 3 // 8


def typed(step: Step, home: Path) -> tuple[int, float, str]:
    """Type a step's command; return its exit code, seconds, and what it printed."""
    folder = home / step.place
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    env["PATH"] = f"{folder / '.venv/bin'}:{_without_ours(env['PATH'])}"
    began_s = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=folder,
        env=env | {"COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, time.monotonic() - began_s, done.stdout


def _without_ours(path: str) -> str:
    ours = str(Path(sys.prefix) / "bin")
    return ":".join(part for part in path.split(":") if part != ours)


def walk(steps: Sequence[Step], home: Path, tail: int) -> dict[str, float]:
    """Type every step that has not ended well yet; return the seconds of each.

    Raises: SystemExit at the first that fails or does not print what it must.
    """
    log = home / "walked.json"
    walked: dict[str, float] = read_json(log) if log.is_file() else {}
    for step in steps:
        if step.title in walked:
            continue
        code, took_s, printed = typed(step, home)
        lines = printed.rstrip().splitlines()
        print(f"\n# {step.title}: {took_s:.1f} s\n$ {step.command}", *lines[-tail:], sep="\n")
        if code or step.shows not in printed:
            sys.exit(f"{step.title}: exit code {code}, expected 0 and '{step.shows}' in its output")
        walked[step.title] = round(took_s, 1)
        write_json(log, walked)
    return walked


def main() -> None:
    """Print the transcript, then the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experiment", help="another than the default run, as in conf/experiment")
    parser.add_argument("--until", help="the title of the last step to take")
    parser.add_argument("--tail", type=int, default=25, help="last lines shown of each command")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    steps = path_of(options.experiment)
    titles = [step.title for step in steps]
    if options.until and options.until not in titles:
        parser.error(f"--until: expected one of {titles}, got '{options.until}'")
    last = titles.index(options.until) + 1 if options.until else len(steps)
    walked = walk(steps[:last], options.folder.resolve(), options.tail)
    print(json.dumps({"experiment": options.experiment or "default", "seconds": walked}))


if __name__ == "__main__":
    main()
