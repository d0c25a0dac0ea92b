"""A sweep as a user types it, in a real copy of the repository (tiny target)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from eyas.desk.digests import folder_digest

Shell = Callable[[str], CompletedProcess[str]]
SWEEP = "python -m eyas.stages.sweep --multirun train.lr=1e-4,3e-4 runtime.threads=1"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def table_of(text: str) -> str:
    return text[text.index("\nSweep ") :]


def test_a_sweep_leaves_the_pipeline_alone_and_goes_on_where_it_was(
    tiny_repository: Path, shell: Shell
) -> None:
    outs = [tiny_repository / name for name in ("models", "data", "metrics", "reports")]
    before = [folder_digest(folder) for folder in outs], shell("dvc status").stdout
    swept = shell(SWEEP)
    assert swept.returncode == 0, swept.stdout[-3000:] + swept.stderr[-3000:]
    assert ([folder_digest(folder) for folder in outs], shell("dvc status").stdout) == before
    rows = re.findall(r"^ +\d +(\d\.\d\d) .* (train\.lr=\S+)$", swept.stdout, re.MULTILINE)
    assert sorted(name for _, name in rows) == ["train.lr=0.0001", "train.lr=0.0003"]
    assert [tau for tau, _ in rows] == sorted((tau for tau, _ in rows), reverse=True)
    assert f"dvc exp run -S {rows[0][1]}" in swept.stdout
    files = tiny_repository.glob("var/sweeps/jobs/*/job.json")
    records = [json.loads(path.read_text()) for path in files]
    ran = [record["ran"] for record in records if record["promote"].endswith(("0001", "0003"))]
    assert ran == [["train", "export", "evaluate"]] * 2
    again = shell(SWEEP).stdout
    assert table_of(again) == table_of(swept.stdout)
    assert again.count("is finished already") == 2


def test_a_combination_that_cannot_run_is_told_and_the_others_go_on(shell: Shell) -> None:
    swept = shell("python -m eyas.stages.sweep --multirun generate.temperature=0.7,1.1")
    assert swept.returncode == 1
    assert re.search(r"^ +1 +\d\.\d\d .* generate\.temperature=0\.7$", swept.stdout, re.MULTILINE)
    assert "failed  generate.temperature=1.1" in swept.stdout
    assert "runtime.sweep.budget_tokens" in swept.stdout  # where Hydra logs
    assert "Traceback" not in swept.stdout + swept.stderr


def test_the_drafter_of_the_pipeline_tells_its_lineage(shell: Shell) -> None:
    told = shell("eyas lineage models/export")
    assert told.returncode == 0, told.stderr
    words = " ".join(told.stdout.split())
    assert "a dvc.lock that is not committed yet" in words
    assert re.search(r"^chat +local +24 ", told.stdout, re.MULTILINE)
    assert " lr 0.0002," in words
    assert max(map(len, told.stdout.splitlines())) <= 80
