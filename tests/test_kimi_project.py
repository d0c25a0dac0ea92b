"""The Kimi project as it stands in conf/: it composes, and DVC draws it."""

import shutil
import subprocess
from pathlib import Path

import kimi
import pytest

from eyas.desk.params import Params, check, compose

SETS = {
    *("a1_deepswekimi", "b1_glaive", "b2_opencodeinstruct", "b3_magicoder", "b4_mixturethoughts"),
    *("b5_openthoughts", "b6_ultrachat", "b7_sharegpt", "b8_sweagent"),
}


@pytest.fixture(scope="module")
def text() -> str:
    return compose(["experiment=kimi_k2_5"])


@pytest.fixture(scope="module")
def params(text: str) -> Params:
    return check(text)


def test_one_word_switches_target_endpoint_data_and_limits(params: Params) -> None:
    assert params.value("target.codec") == "kimi_k2_5"
    assert params.value("endpoint.prices") is None
    assert set(params.value("datasets")) == set(params.value("merge.sources")) == SETS
    assert params.value("partition.short.max_tokens") == 10_240
    assert params.value("partition.long.max_tokens") == 16_384
    assert params.value("runtime.concurrency") == {"short": 2000, "long": 500}


def test_at_reduced_size_the_states_are_computed_here(params: Params, tmp_path: Path) -> None:
    assert params.value("extract.backend") == "sglang"
    shutil.copytree("conf", tmp_path / "conf")
    for file in {file for _, file, *_ in kimi.SETS.values()}:
        (tmp_path / f"{file}.jsonl").touch()
    kimi.write_experiment(tmp_path, tmp_path / "target", tmp_path, port=1)
    small = check(compose(["experiment=kimi_rehearsal"], tmp_path / "conf"))
    assert small.value("extract.backend") == "transformers"
    assert set(small.value("datasets")) == SETS


@pytest.mark.slow
def test_dvc_draws_nine_sets_that_meet_in_one_mixture(text: str, tmp_path: Path) -> None:
    shutil.copy2("dvc.yaml", tmp_path)
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    command = "git init -q . && dvc init -q && dvc dag --dot"
    drawn = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    edges = {tuple(line.strip(" ;").replace('"', "").split(" -> ")) for line in drawn.splitlines()}
    assert {(f"validate@{name}", "merge") for name in SETS} <= edges
    assert {("merge", "extract"), ("extract", "train"), ("train", "export")} <= edges
