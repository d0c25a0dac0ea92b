"""A run whose answers cost money, shared through a folder and through an S3 server on loopback."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, Any]]:
    """Return what benchmarks/share.py found, by kind of remote; S3 where its packages are."""
    kinds = ["folder"]
    if all(importlib.util.find_spec(name) for name in ("dvc_s3", "localbucket")):
        kinds.append("s3")
    command = [sys.executable, "benchmarks/share.py", "--remotes", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line["remote"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(params=["folder", "s3"])
def shared(facts: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the facts of one kind."""
    if request.param not in facts:
        pytest.skip("dvc-s3 and localbucket (requirements/dev.lock) are not installed")
    return facts[request.param]


def test_a_fresh_clone_pulls_and_has_nothing_to_do(shared: dict[str, Any]) -> None:
    assert shared["stages_after_pull"] == []
    assert shared["second_push_copies"] is False
    assert shared["s3_repeated_push"] == []
    # DVC reads the lists of its folders several times; no object with data is fetched twice
    assert all(".dir" in request for request in shared["s3_repeated_pull"])


def test_what_lies_in_the_remote_holds_no_key_and_no_path(shared: dict[str, Any]) -> None:
    assert shared["remote_bytes"] > 1_000_000
    assert (shared["control"], shared["files_with_key_or_path"]) == (["planted"], [])


def test_answers_bought_once_serve_everyone(shared: dict[str, Any]) -> None:
    assert shared["stages_after_change"] == ["compose", "train"]
    assert shared["requests_after_change"] == 0
    assert shared["kept"] == shared["held_before_raise"] < shared["held_after_raise"]
    more = shared["held_after_raise"] - shared["held_before_raise"]
    assert shared["requests_after_raise"] == shared["market_requests"] == more
    assert shared["market_repeated"] == 0


def test_a_clone_without_its_pull_buys_nothing(shared: dict[str, Any]) -> None:
    assert shared["forgetful_is_told"] is True
