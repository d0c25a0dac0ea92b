"""Every name in the README exists, and its commands run in a copy of the repository."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

README = Path("README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.+)$", README, flags=re.MULTILINE)
NOT_RUN = {
    "make run": "tests/conftest.py runs what it runs, less the installation",
    "make test": "it is running",
    "make ui": "a server that does not end",
    "export OPENROUTER_API_KEY=...": "a real key",
    "make rehearse": "ten minutes; tests/generation/test_simulator.py asks the same market",
    "eyas report --compare HEAD~1 .": "the copy has one commit; tests/desk/test_compare.py",
    "dvc exp run -S train.lr=1e-4": "tests/test_repro.py runs its like",
    "dvc exp run -S experiment=tiny": "the copy is the tiny experiment already",
    "make remote TO=/mnt/team/eyas": "installs into the copy's environment; tests/test_share.py",
    "make push": "as above",
    "make pull": "as above",
}
Shell = Callable[[str], subprocess.CompletedProcess[str]]
MADE_BY_A_RUN = ("models/", "data/", "reports/", "var/", "metrics/", ".venv")


def test_the_readme_is_at_most_250_lines() -> None:
    assert README.count("\n") <= 250


def test_every_file_it_links_or_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    named = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:md|yaml|toml))`", README)
    for name in links + named:
        assert Path(name).exists() or name.startswith(MADE_BY_A_RUN), name


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", Path("Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets | {"it"}


def test_every_stage_of_the_pipeline_is_in_its_table() -> None:
    for stage in yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]:
        assert re.search(rf"^\| {stage}(@ds)? \|", README, flags=re.MULTILINE), stage


def test_every_option_it_names_is_in_the_parameters() -> None:
    tree = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    tree["datasets"]["DS"] = next(iter(tree["datasets"].values()))
    sections = "|".join(tree)
    for name in re.findall(rf"`((?:{sections})(?:\.\w+)+)`", README):
        value = tree
        for key in name.split("."):
            assert key in value, name
            value = value[key]


def test_commands_that_are_not_run_still_stand_in_it() -> None:
    assert set(NOT_RUN) <= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in NOT_RUN])
def test_its_other_commands_run(shell: Shell, tmp_path: Path, command: str) -> None:
    result = shell(command.replace("/mnt/team", str(tmp_path)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
