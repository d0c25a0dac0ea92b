from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.desk import sweeps
from eyas.desk.stage import Report
from eyas.errors import EyasError
from eyas.files import read_json, write_json

PIPELINE = """
stages:
  compose: {deps: [conf], outs: [params.yaml: {cache: false}]}
  generate:
    foreach: ${datasets}
    do:
      deps: [src/generate.py]
      params: [generate, "datasets.${key}.generate"]
      outs: ["data/responses/${key}.jsonl"]
      metrics: ["metrics/generate-${key}.json": {cache: false}]
  merge:
    deps: [src/merge.py, data/responses]
    params: [merge]
    outs: [data/mixture/train.parquet]
  train:
    deps: [src/train.py, data/mixture/train.parquet]
    params: [train]
    outs: [models/drafter]
  export: {deps: [models/drafter], outs: [models/export]}
  evaluate: {deps: [models/export, data/raw], outs: [data/evaluation.json]}
  report: {deps: [metrics], outs: [reports/index.html]}
"""
TREE: dict[str, Any] = {
    "select": None,
    "datasets": {
        "chat": {"kind": "prompts", "generate": {"budget_tokens": 900}},
        "own": {"kind": "trajectories", "generate": {"budget_tokens": None}},
    },
    "generate": {"temperature": 0.7},
    "merge": {"sources": ["chat", "own"]},
    "train": {"lr": 0.1},
    "runtime": {
        "tracking": "off",
        "threads": None,
        "store": "var/states",
        "concurrency": {},
        "connection": {
            "url": None,
            "api_key_env": None,
            "timeout_s": 1.0,
            "attempts": 1,
            "slots": 1,
        },
        "train": {"checkpoint_every_s": 1.0, "log_every_steps": 1},
        "sweep": {"budget_tokens": None},
    },
}
ROW = {"drafter": "trained", "dataset": "all", "method": "replay", "draft_steps": 3}


def tree(**sections: Any) -> dict[str, Any]:
    return TREE | sections


def capped(budget_tokens: int | None, **sections: Any) -> dict[str, Any]:
    runtime = TREE["runtime"] | {"sweep": {"budget_tokens": budget_tokens}}
    return tree(runtime=runtime, **sections)


@pytest.fixture(autouse=True)
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder whose pipeline has run up to the mixture."""
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").write_text(PIPELINE)
    for name in ("generate", "merge", "train"):
        path = Path(f"src/{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    locked: dict[str, Any] = {}
    for node in sweeps.read_nodes(["chat", "own"]):
        for out in node.outs:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text("{}")
        values = {"generate": TREE["generate"], "merge": TREE["merge"], "train": TREE["train"]}
        values |= {f"datasets.{n}.generate": d["generate"] for n, d in TREE["datasets"].items()}
        locked[node.title] = {
            "params": {"params.yaml": {p: values[p] for p in node.params}},
            "outs": [{"path": out, "md5": f"md5 of {out}"} for out in node.outs],
        }
    Path("data/raw").mkdir()
    Path("data/raw/a.txt").write_text("a")
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": locked}))
    return tmp_path


def work_giving(tau: float, seen: list[str]) -> Callable[[sweeps.Node, Mapping[str, Any]], Report]:
    """Return a stand-in for the stages: each writes its outs where it is."""

    def work(node: sweeps.Node, given: Mapping[str, Any]) -> Report:
        seen.append(node.title)
        for out in node.outs:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            row = ROW | {"tau": tau, "tau_low": tau - 0.1, "tau_high": tau + 0.1}
            write_json(Path(out), {"headline_steps": 3, "rows": [row]})
        return Report(summary="", metrics={"cost_usd": 0.5, "select": given["select"] == "chat"})

    return work


def titles(job: sweeps.Job) -> list[str]:
    return [node.title for node in job.run]


def test_a_job_trains_exports_and_evaluates_and_nothing_else() -> None:
    job = sweeps.plan_job(tree(train={"lr": 0.2}), ["train.lr=0.2"])
    assert titles(job) == ["train", "export", "evaluate"]
    assert job.inputs == {"data/mixture/train.parquet": "md5 of data/mixture/train.parquet"}


def test_a_job_makes_again_what_its_parameters_change_and_all_that_follows() -> None:
    job = sweeps.plan_job(tree(merge={"sources": ["chat"]}), [])
    assert titles(job) == ["merge", "train", "export", "evaluate"]
    assert sorted(job.inputs) == ["data/responses/chat.jsonl", "data/responses/own.jsonl"]


def test_the_outs_of_the_pipeline_are_not_touched(pipeline: Path) -> None:
    outs = [p for p in pipeline.rglob("*") if p.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in outs}
    job = sweeps.plan_job(tree(train={"lr": 0.2}), [])
    sweeps.run_job(job, work_giving(1.5, []))
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in outs}
    new = {p.relative_to(pipeline).parts[:2] for p in pipeline.rglob("*") if p not in before}
    assert {parts for parts in new if len(parts) == 2 and parts[0] == "var"} == {("var", "sweeps")}
    assert (job.folder / "data/mixture/train.parquet").is_symlink()
    assert not (job.folder / "models/drafter").is_symlink()


def test_a_finished_job_is_not_run_again_and_a_killed_one_is(pipeline: Path) -> None:
    job, seen = sweeps.plan_job(tree(), []), list[str]()

    def killed(node: sweeps.Node, given: Mapping[str, Any]) -> Report:
        if node.title == "export":
            raise KeyboardInterrupt
        return work_giving(1.5, seen)(node, given)

    with pytest.raises(KeyboardInterrupt):
        sweeps.run_job(job, killed)
    assert Path.cwd() == pipeline
    first = sweeps.run_job(job, work_giving(1.6, seen))
    assert seen == ["train", "train", "export", "evaluate"]
    assert sweeps.run_job(job, work_giving(9.9, seen)) == first
    assert len(seen) == 4
    assert (first["tau"], first["tau_low"], first["draft_steps"]) == (1.6, 1.5, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda: Path("src/train.py").write_text("other"),
        lambda: Path("data/raw/a.txt").write_text("other"),
        lambda: Path("dvc.lock").write_text(
            Path("dvc.lock").read_text().replace("md5 of data/mixture", "new md5 of data/mixture")
        ),
    ],
)
def test_other_sources_or_data_make_another_job(change: Callable[[], object]) -> None:
    key = sweeps.plan_job(tree(), []).key
    assert sweeps.plan_job(tree(runtime=TREE["runtime"] | {"threads": 1}), []).key == key
    change()
    assert sweeps.plan_job(tree(), []).key != key


def test_new_answers_are_asked_for_within_a_cap_only() -> None:
    warmer = {"generate": {"temperature": 1.0}}
    with pytest.raises(EyasError, match=r"new answers of 'chat'.*\n.*runtime\.sweep\.budget"):
        sweeps.plan_job(tree(**warmer), [])
    job = sweeps.plan_job(capped(200, **warmer), [])
    assert job.tree["datasets"]["chat"]["generate"] == {"budget_tokens": 200}
    assert job.tree["datasets"]["own"]["generate"] == {"budget_tokens": None}
    assert sweeps.plan_job(capped(2000, **warmer), []).tree["datasets"] == TREE["datasets"]
    found = sweeps.run_job(job, work_giving(1.2, []))
    assert found["cost_usd"] == 1.0  # both data sets, 0.5 each
    assert found["ran"][:2] == ["generate@chat", "generate@own"]


def test_missing_data_says_what_to_run() -> None:
    Path("data/mixture/train.parquet").unlink()
    with pytest.raises(EyasError, match=r"train\.parquet: no such file\n.*dvc repro"):
        sweeps.plan_job(tree(), [])


def test_data_that_change_under_a_job_spoil_it(pipeline: Path) -> None:
    job, lock = sweeps.plan_job(tree(), []), pipeline / "dvc.lock"

    def meddling(node: sweeps.Node, given: Mapping[str, Any]) -> Report:
        lock.write_text(lock.read_text().replace(" md5 of", " new md5 of"))
        return work_giving(1.5, [])(node, given)

    with pytest.raises(EyasError, match="has changed while job"):
        sweeps.run_job(job, meddling)
    assert not (job.folder / sweeps.FINISHED).exists()


def test_the_promoting_command_leaves_out_what_changes_no_output() -> None:
    line = sweeps.promote_line(["train=small", "train.lr=0.1", "runtime.threads=1", "a=[1, 2]"])
    assert line == "dvc exp run -S train=small -S train.lr=0.1 -S 'a=[1, 2]'"


def test_a_sweep_is_named_by_what_it_asks_for(pipeline: Path) -> None:
    name = sweeps.folder_of(["--multirun", "train.lr=1,2", "train=a,b"])
    assert sweeps.folder_of(["train=a,b", "train.lr=1,2", "-m", "runtime.threads=1"]) == name
    assert sweeps.folder_of(["train.lr=1,2"]) != name
    Path("dvc.lock").write_text("other")
    assert sweeps.folder_of(["train.lr=1,2", "train=a,b"]) != name


def test_the_table_is_sorted_and_fits_80_columns() -> None:
    folder = Path("var/sweeps/abc")
    for number, tau in enumerate((1.2, 1.6)):
        overrides = ["experiment=tiny", f"train.lr={number}", "runtime.threads=1"]
        job = {"overrides": overrides, "tau": tau, "tau_low": 1.0, "tau_high": 2.0, "cpu_s": 12.4}
        job |= {"draft_steps": 3, "cost_usd": 0.0, "promote": sweeps.promote_line(overrides)}
        write_json(folder / str(number) / sweeps.FINISHED, job)
    failed = {"overrides": ["experiment=tiny", "train.lr=9"], "error": "no room\n  hint: none"}
    write_json(folder / "2" / sweeps.FINISHED, failed)
    lines = list(sweeps.render("abc", sweeps.read_jobs(folder)))
    assert lines[:2] == [
        "Sweep abc: 2 of 3 jobs, by acceptance length, K=3, bonus counted",
        "all with experiment=tiny",
    ]
    rows = [line.split()[-1] for line in lines if line.startswith("  ") and "1.00 to" in line]
    assert rows == ["train.lr=1", "train.lr=0"]
    assert "  -  failed  train.lr=9: no room" in lines
    assert lines[-2:] == [
        "  1  dvc exp run -S experiment=tiny -S train.lr=1",
        "  2  dvc exp run -S experiment=tiny -S train.lr=0",
    ]
    assert max(map(len, lines)) <= 80


def test_the_record_of_a_job_is_on_disk(pipeline: Path) -> None:
    job = sweeps.plan_job(tree(), ["train.lr=0.1"])
    found = sweeps.run_job(job, work_giving(1.5, []))
    assert read_json(job.folder / "job.json") == found
    assert yaml.safe_load((job.folder / "params.yaml").read_text())["train"] == {"lr": 0.1}
    assert found["inputs"] == dict(job.inputs)
