import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas import cli
from eyas.desk.params import compose
from eyas.files import sha256_of, write_json, write_text

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
    names = {"params", "options", "plan", "serve", "status", "store", "summary", "verify"}
    names |= {"import", "report", "lineage"}
    assert names == {line.split()[0] for line in output.partition("Commands:")[2].splitlines()[1:]}


def test_a_codec_without_a_simulation_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--codec", "chatml"])
    assert "--codec counts for --simulate only" in str(result.exception)


def test_options_of_one_section_are_printed() -> None:
    output = CliRunner().invoke(cli.app, ["options", "runtime.train"]).output
    assert output.startswith("## runtime.train\n")
    assert output.count("## ") == 1


def test_states_are_shared_with_the_place_that_is_named(folder: Path) -> None:
    meta = {
        "key": "k",
        "target_name": "t",
        "target_revision": "r",
        "template": "chatml",
        "layers": [1, 3, 4],
        "layer_axis": "layer outputs",
        "hidden_size": 6,
        "codec": "bf16",
        "compute_dtype": "float32",
        "final": "post_norm",
    }
    shard = folder / "var/states/k/shard-00000.safetensors"
    write_text(shard, "not read here")
    about = {"name": shard.name, "tokens": 1, "size_bytes": 13, "sha256": sha256_of(shard)}
    manifest = {"format": 1, "meta": meta, "shards": [about], "samples": []}
    write_json(folder / "data/hidden_states/manifest.json", manifest)
    write_text(folder / "params.yaml", compose())
    subprocess.run(["bash", "-c", "git init -q . && dvc init -q"], check=True)
    told = [CliRunner().invoke(cli.app, ["store", way, "there"]).output for way in ("push", "pull")]
    assert "push there: 1 shards copied (0.00 GB), 0 were there" in told[0]
    assert "pull there: 0 shards copied (0.00 GB), 1 were there" in told[1]
    assert (folder / f"there/{sha256_of(shard)}.safetensors").read_bytes() == shard.read_bytes()


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
