"""What `dvc repro` and `dvc exp run` rerun, in a real copy of the repository (tiny target)."""

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Shell = Callable[[str], CompletedProcess[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def stages_run(result: CompletedProcess[str]) -> set[str]:
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return set(re.findall(r"Running stage '([^']+)'", result.stdout))


def test_a_second_repro_runs_nothing(shell: Shell) -> None:
    result = shell("dvc repro")
    assert stages_run(result) == set()
    assert "up to date" in result.stdout
