import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.desk import digests, tracking
from eyas.desk.params import Params, flatten
from eyas.desk.stage import Report
from eyas.files import write_json, write_jsonl

STARTED_S = 1_700_000_000.0
TREE = {
    "select": None,
    "runtime": {"threads": 2},
    "target": {"name": "tiny"},
    "train": {"lr": 0.0002, "epochs": 3},
    "merge": {"sources": ["chat", "code"]},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    return tmp_path


def git(*arguments: str) -> str:
    user = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", *user, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def params(**changes: Any) -> Params:
    result = Params(TREE | changes)
    result.section("train", dict[str, float])
    return result


def report(**metrics: float) -> Report:
    return Report(summary="", metrics=metrics)


def client_here() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{Path('var/mlflow.db').resolve()}")


def all_runs() -> list[Any]:
    """Return every run that is not deleted, parents first."""
    client = client_here()
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    return sorted(runs, key=lambda run: "mlflow.parentRunId" in run.data.tags)


def history(run: Any, metric: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client_here().get_metric_history(run.info.run_id, metric)]


def test_importing_it_imports_no_mlflow() -> None:
    code = "import sys, eyas.desk.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_failure_is_a_warning_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("database is locked\nand more")

    monkeypatch.setattr(tracking, "_open", broken)
    with caplog.at_level(logging.WARNING, logger="eyas"):
        tracking.record("train", params(), report(), started_s=STARTED_S)
    (said,) = caplog.messages
    assert "train: done, but not recorded in MLflow (RuntimeError: database is locked)" in said
    assert "runtime.tracking=off" in said
    assert "and more" not in said


def test_nested_parameters_become_dotted_names() -> None:
    leaves = dict(flatten("", {"a": {"b": 1, "c": {}}, "d": [1, 2]}))
    assert leaves == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_the_state_is_named_without_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    state = digests.read_state(TREE)
    assert (state.commit, state.dirty) == ("nogit", False)
    assert state.key == f"nogit-{state.digest[:8]}"
    monkeypatch.setenv("PATH", "")
    assert digests.read_state(TREE) == state


def test_the_state_follows_what_changes_an_output_and_nothing_else() -> None:
    state = digests.read_state(TREE)
    assert digests.read_state(TREE | {"select": "chat", "runtime": {"threads": 1}}) == state
    assert digests.read_state(TREE | {"train": {"lr": 0.1}}).key != state.key


def test_the_state_is_dirty_by_sources_and_not_by_what_a_run_writes() -> None:
    git("init", "-q", ".")
    for name in ("code.py", "dvc.lock", "metrics/train.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    Path("dvc.lock").write_text("2")
    Path("metrics/train.json").write_text("2")
    state = digests.read_state(TREE)
    assert state.commit == git("rev-parse", "HEAD")
    assert not state.dirty
    Path("code.py").write_text("2")
    assert digests.read_state(TREE).dirty


PIPELINE = """
stages:
  train:
    deps: [src/train.py, data/mixture, data/big.bin, models/target, data/unknown]
  validate:
    foreach: [chat]
    do: {deps: ["data/samples/${key}.parquet"]}
"""
LOCK = """
stages:
  merge:
    outs: [{path: data/mixture/train.parquet, md5: aa}, {path: data/mixture/val.parquet, md5: bb}]
  target:
    outs: [{path: models/target, md5: cc.dir}]
"""


def test_inputs_have_the_digests_of_dvc() -> None:
    Path("dvc.yaml").write_text(PIPELINE)
    Path("dvc.lock").write_text(LOCK)
    Path("data/samples").mkdir(parents=True)
    Path("data/samples/chat.parquet").write_bytes(b"abc")
    assert digests.input_digests("train", []) == {
        "data/mixture/train.parquet": "aa",
        "data/mixture/val.parquet": "bb",
        "models/target": "cc.dir",
    }
    md5 = "900150983cd24fb0d6963f7d28e17f72"  # of "abc", RFC 1321
    assert digests.input_digests("validate@chat", []) == {"data/samples/chat.parquet": md5}
    assert digests.input_digests("x", [Path("data/samples/chat.parquet")]) == {
        "data/samples/chat.parquet": md5
    }


def test_a_large_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SMALL_BYTES", 2)
    Path("big.bin").write_bytes(b"abc")
    Path("dvc.lock").write_text("stages: {a: {outs: [{path: big.bin, md5: dd}]}}")
    assert digests.input_digests("x", [Path("big.bin")]) == {"big.bin": "dd"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stages_are_recorded_below_the_state_of_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "brave-owl")
    Path("in.bin").write_bytes(b"abc")
    Path("small.json").write_text("{}")
    curve = tuple(("loss", step, 1.0 / (step + 1)) for step in range(1500))
    trained = Report(
        summary="",
        metrics={"loss": 9.9, "steps": 1500},
        inputs=(Path("in.bin"),),
        artifacts=(Path("small.json"),),
        curves=curve,
    )
    write_json(Path("metrics/generate-chat.json"), {"cost_usd": 0.25, "responses": 3})
    write_json(Path("metrics/train.json"), {"val_simulated_acceptance_length": 1.5})
    tracking.record(
        "generate@chat", params(select="chat"), report(cost_usd=0.25), started_s=STARTED_S
    )
    tracking.record("train", params(), trained, started_s=STARTED_S + 60)
    assert caplog.messages == []

    parent, generate, train = all_runs()
    assert parent.info.run_name.startswith("brave-owl nogit-")
    assert parent.info.run_name.endswith(" tiny")
    assert parent.info.start_time == STARTED_S * 1000
    assert parent.data.params["train.lr"] == "0.0002"
    assert "runtime.threads" not in parent.data.params
    assert parent.data.metrics == {
        "data_cost_usd_chat": 0.25,
        "data_cost_usd": 0.25,
        "data_responses": 3,
        "tau_simulated": 1.5,
    }
    assert {run.info.run_name for run in (generate, train)} == {"generate@chat", "train"}
    for run in (generate, train):
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["git.commit"] == "nogit"
    assert train.data.tags[tracking.STAGE_TAG] == "train"
    assert train.info.start_time == (STARTED_S + 60) * 1000
    assert train.data.params == {"train.lr": "0.0002", "train.epochs": "3"}
    assert train.data.metrics["steps"] == 1500
    assert history(train, "loss") == [(step, value) for _, step, value in curve]
    (data,) = train.inputs.dataset_inputs
    assert (data.dataset.name, json.loads(data.dataset.source)) == ("in.bin", {"uri": "in.bin"})
    assert data.dataset.digest == "900150983cd24fb0d6963f7d28e17f72"
    assert list(Path("var/artifacts").rglob("small.json"))

    tracking.record("train", params(), report(steps=7), started_s=STARTED_S + 90)
    tracking.record("train", params(train={"lr": 0.1}), report(), started_s=STARTED_S + 99)
    runs = all_runs()
    assert len([r for r in runs if "mlflow.parentRunId" not in r.data.tags]) == 2
    again = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(r.info.run_name for r in again) == ["generate@chat", "train"]
    assert [r.data.metrics.get("steps") for r in again if r.info.run_name == "train"] == [7]


def lay_job(sweep: str, key: str, tau: float) -> Path:
    """Lay the folder of a finished job, as the sweep does; return its record in the sweep."""
    job = Path("var/sweeps/jobs") / key
    (job / "models/export").mkdir(parents=True, exist_ok=True)
    (job / "models/export/model.safetensors").write_text(f"weights of {tau}")
    (job / "models/export/README.md").write_text("card")
    write_json(job / "models/drafter/config.json", {"target_name": "tiny"})
    curve = [{"split": "val", "step": n, "epoch": 1, "loss": 1.0 / (n + 1)} for n in range(3)]
    write_jsonl(job / "models/drafter/curves.jsonl", curve)
    write_json(job / "metrics/evaluate.json", {"acceptance_length_trained": tau})
    write_json(job / "data/evaluation.json", {"headline_steps": 3, "rows": []})
    (job / "params.yaml").write_text(json.dumps(TREE))
    record = {
        "key": key,
        "overrides": [f"train.lr={tau}", "runtime.threads=1"],
        "promote": f"dvc exp run -S train.lr={tau}",
        "inputs": {"data/mixture/train.parquet": "aa"},
        "commit": "c0ffee",
        "dirty": True,
        "params_md5": "beef" * 8,
        "dvc_lock_md5": "dd" * 16,
        "started_s": STARTED_S,
        "wall_s": 9.0,
        "cpu_s": 7.5,
        "tau": tau,
    }
    place = Path("var/sweeps") / sweep / key / "job.json"
    write_json(place, record)
    return place


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_jobs_of_a_sweep_stand_below_it_once(caplog: pytest.LogCaptureFixture) -> None:
    places = [lay_job("abc", "j1", 1.2), lay_job("abc", "j2", 1.6)]
    for place in [*places, *places]:  # a sweep that is run again finds its jobs finished
        tracking.record_job(place)
    tracking.record_sweep(Path("var/sweeps/abc"), "train.lr=1.2,1.6", "the table")
    assert caplog.messages == []
    parent, *jobs = all_runs()
    assert parent.info.run_name == "sweep abc train.lr=1.2,1.6"
    assert parent.data.metrics == {"tau_trained": 1.6}
    (table,) = Path("var/artifacts").rglob("table.txt")
    assert table.read_text() == "the table"
    assert sorted(job.info.run_name for job in jobs) == ["train.lr=1.2", "train.lr=1.6"]
    assert {job.info.status for job in (parent, *jobs)} == {"FINISHED"}
    best = next(job for job in jobs if job.info.run_name == "train.lr=1.6")
    assert best.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert best.data.tags["sweep.overrides"] == "train.lr=1.6"
    assert best.data.tags["git.commit"] == "c0ffee"
    assert best.data.tags["git.dirty"] == "true"
    assert best.data.tags["dvc.lock.md5"] == "dd" * 16
    assert best.data.params["train.lr"] == "0.0002"
    assert best.data.metrics["tau_trained"] == 1.6
    assert best.data.metrics["system/cpu_s"] == 7.5
    assert history(best, "val_loss") == [(n, 1.0 / (n + 1)) for n in range(3)]
    (data,) = best.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("data/mixture/train.parquet", "aa")
    client = client_here()
    models = client.search_logged_models([parent.info.experiment_id])
    assert sorted(m.value for model in models for m in model.metrics) == [1.2, 1.6]
    assert client.search_model_versions("name = 'drafter-tiny'") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_drafter_of_the_pipeline_is_registered_once_by_its_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = Path("models/export/model.safetensors")
    weights.parent.mkdir(parents=True)
    weights.with_name("README.md").write_text("card")
    write_json(Path("models/drafter/config.json"), {"target_name": "tiny"})
    for content in (b"first", b"first", b"second"):
        weights.write_bytes(content)
        given = report(acceptance_length_trained=float(len(content)))
        tracking.record("evaluate", params(), given, started_s=STARTED_S)
    assert caplog.messages == []
    assert not Path("mlflow.db").exists()
    versions = client_here().search_model_versions("name = 'drafter-tiny'")
    digests = {hashlib.sha256(content).hexdigest() for content in (b"first", b"second")}
    assert sorted(v.tags["weights.sha256"] for v in versions) == sorted(digests)
    stages = all_runs()[1:]
    assert [run.info.run_name for run in stages] == ["evaluate"]
    assert stages[0].data.metrics["system/memory_max_bytes"] > 1e7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_that_cannot_be_written_is_marked_as_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missing = Report(summary="", metrics={}, artifacts=(Path("not there"),))
    tracking.record("export", params(), missing, started_s=STARTED_S)
    assert "not recorded in MLflow" in caplog.text
    _, child = all_runs()
    assert child.info.status == "FAILED"


RECORDING = """
import sys
from eyas.desk import tracking
from eyas.desk.params import Params, flatten
from eyas.desk.stage import Report
params = Params({"target": {"name": "tiny"}})
tracking.record(f"stage{sys.argv[1]}", params, Report(summary="", metrics={}), started_s=1.0)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_six_processes_on_a_fresh_database_all_succeed() -> None:
    command = [sys.executable, "-c", RECORDING]
    started = [
        subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(6)
    ]
    said = [process.communicate(timeout=250)[1] for process in started]
    assert [process.returncode for process in started] == [0] * 6
    assert said == [""] * 6
    runs = all_runs()
    assert [r.info.run_name for r in runs if r.info.run_name.endswith("tiny")] == [
        runs[0].info.run_name
    ]
    assert sorted(r.info.run_name for r in runs[1:]) == [f"stage{i}" for i in range(6)]
