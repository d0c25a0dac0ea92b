"""The address of the shared states, from DVC's own configuration."""

import subprocess
from pathlib import Path

import pytest

from eyas.desk.remote import states_remote
from eyas.errors import EyasError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run("git init -q . && dvc init -q")
    return tmp_path


def run(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=True)


def test_the_states_lie_in_the_default_remote(project: Path) -> None:
    run("dvc remote add -q -d team ../there")
    assert states_remote() == (f"{project.parent}/there/states", {})
    assert states_remote("/mnt/other") == ("/mnt/other", {})


def test_an_object_store_is_reached_as_dvc_reaches_it(project: Path) -> None:
    run(
        "dvc remote add -q -d team s3://bucket/eyas/ && "
        "dvc remote modify -q team endpointurl http://127.0.0.1:9 && "
        "dvc remote modify -q --local team profile lab"
    )
    options = {"endpoint_url": "http://127.0.0.1:9", "profile": "lab"}
    assert states_remote() == ("s3://bucket/eyas/states", options)
    assert states_remote("/mnt/other") == ("/mnt/other", {})


@pytest.mark.usefixtures("project")
def test_no_remote_is_told_with_the_command_that_names_one() -> None:
    with pytest.raises(EyasError, match=r"no default remote\n.*make remote TO="):
        states_remote()
