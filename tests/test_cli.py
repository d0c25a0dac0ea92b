import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas import cli
from eyas.desk.params import compose
from eyas.files import write_text

ROOT = Path.cwd()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree("conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_params_are_written_and_then_in_step(folder: Path) -> None:
    run = CliRunner().invoke
    assert run(cli.app, ["params", "--check"]).exit_code == 1
    assert "written" in run(cli.app, ["params"]).output
    assert "in step" in run(cli.app, ["params", "--check"]).output
    assert (folder / "params.yaml").read_text(encoding="utf-8") == compose()


def test_overrides_are_composed_and_told_as_drift_later(folder: Path) -> None:
    run = CliRunner().invoke
    assert run(cli.app, ["params", "train.lr=0.5"]).exit_code == 0
    drift = run(cli.app, ["params", "--check"])
    assert drift.exit_code == 1
    assert "-  lr: 0.5" in drift.output


def test_help_names_every_command() -> None:
    output = CliRunner().invoke(cli.app, ["--help"]).output
    assert all(
        name in output for name in ("params", "plan", "serve", "status", "summary", "verify")
    )


def test_verify_without_a_store_names_the_manifest(folder: Path) -> None:
    write_text(folder / "params.yaml", compose())
    result = CliRunner().invoke(cli.app, ["verify"])
    assert result.exit_code == 1
    assert "manifest.json" in f"{result.output}{result.exception}"


def test_an_error_of_the_user_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eyas", "params"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert str(caught.value).startswith("eyas: error: conf/config.yaml: no such file")
