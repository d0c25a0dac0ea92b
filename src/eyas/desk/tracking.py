"""Runs in MLflow: one for each state of the pipeline or sweep, below it one a stage or job.

Writes: var/mlflow.db, var/artifacts. Nothing leaves the machine, and no failure here fails a stage.
Source: https://mlflow.org/docs/latest/ml/tracking ; the lock is there because several processes
that start on a fresh database would each run its migrations.
"""

import contextlib
import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.desk.digests import State, input_digests, read_state
from eyas.desk.params import PARAMS_FILE, Params, flatten, read_params
from eyas.desk.registry import log_model, register
from eyas.desk.results import headlines, read_results
from eyas.desk.stage import Report
from eyas.desk.sweeps import JOBS, told
from eyas.desk.workers import cpu_s
from eyas.files import read_json, read_jsonl

FOLDER = Path("var")
EXPERIMENT = "eyas"
KEY_TAG, STAGE_TAG = "pipeline.key", "stage"
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # which tabs the page has
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100  # MLflow's limits
_LONGEST_VALUE, _LONGEST_TAG, _LONGEST_NAME = 500, 4000, 120
_POINTS = 400  # of a job's training curve
_PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
_LOCK_TIMEOUT_S = 120
log = logging.getLogger("eyas")


def record(title: str, params: Params, report: Report, *, started_s: float) -> None:
    """Record a finished stage; what goes wrong is a warning that says what to do."""
    _guarded(title, lambda: _record(title, params, report, started_s))


def record_job(place: Path) -> None:
    """Record a finished job of a sweep, once: `place` is its record in the sweep's folder."""
    _guarded(f"sweep {place.parent.parent.name}", lambda: _record_job(place))


def _guarded(title: str, write: Callable[[], None]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's and SQLAlchemy's own deprecations
            write()
    except Exception as error:  # the boundary: a stage that has its result must not fail here
        log.debug("%s: tracking failed", title, exc_info=True)
        words = str(error).strip().splitlines() or ["no message"]
        log.warning(
            "%s: done, but not recorded in MLflow (%s: %s)\n"
            "  hint: move %s away, a new one is made; or give runtime.tracking=off",
            title,
            type(error).__name__,
            words[0],
            FOLDER / "mlflow.db",
        )


@contextlib.contextmanager
def _child(
    client: Any, experiment: str, parent: str, name: str, tags: dict[str, str], start_ms: int
) -> Generator[str]:
    """Yield a new run below a parent; one of the same key, finished or torn, is replaced."""
    tags = tags | {"mlflow.parentRunId": parent, "mlflow.source.type": "LOCAL"}
    run = client.create_run(experiment, start_time=start_ms, run_name=name, tags=tags).info.run_id
    try:
        yield run
    except Exception:
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run)
    for old in _find(client, experiment, tags[KEY_TAG]):
        if old != run:
            client.delete_run(old)


def _record(title: str, params: Params, report: Report, started_s: float) -> None:
    client, experiment = _open()
    state, tree = read_state(params.tree()), params.tree()
    start_ms = int(started_s * 1000)
    parent = _parent(client, experiment, state, tree, start_ms)
    stage = title.partition("@")[0]
    tags = _tags(state, f"{state.key}/{title}", title)
    tags |= {"mlflow.source.name": f"eyas.stages.{stage}"}
    read = [leaf for path in sorted(params.sections) for leaf in flatten(path, params.value(path))]
    with _child(client, experiment, parent, title, tags, start_ms) as run:
        _log_params(client, run, read)
        drawn = {name for name, _, _ in report.curves}
        values = {n: v for n, v in report.metrics.items() if n not in drawn}
        _log_metrics(client, run, values | system_metrics(started_s), report.curves)
        for path in report.artifacts:
            client.log_artifact(run, str(path))
        _log_inputs(client, run, stage, input_digests(title, report.inputs))
        if stage == "evaluate":
            log_model(client, experiment, run, Path(), report.metrics)
            register(client, run, Path(), _lock())
    _log_metrics(client, parent, _headlines(title, params, report))
    client.set_terminated(parent)


def _record_job(place: Path) -> None:
    """Write a run below the sweep's: what it changed, what it read, what it gave."""
    client, experiment = _open()
    job = read_json(place)
    folder = JOBS / job["key"]
    tree = read_params(folder / PARAMS_FILE).tree()
    sweep, start_ms = place.parent.parent.name, int(job["started_s"] * 1000)
    state = State(commit=job["commit"], dirty=job["dirty"], digest=job["params_md5"])
    parent = _sweep(client, experiment, sweep, state, start_ms)
    key = f"sweep-{sweep}/{job['key']}"
    if any(client.get_run(r).info.status == "FINISHED" for r in _find(client, experiment, key)):
        return
    words = " ".join(told(job["overrides"])) or "as configured"
    tags = _tags(state, key, "sweep job") | {
        "mlflow.source.name": "eyas.stages.sweep",
        "mlflow.note.content": f"To make it the pipeline's own: `{job['promote']}`. In `{folder}`.",
        "sweep.overrides": words[:_LONGEST_TAG],
        "dvc.lock.md5": job["dvc_lock_md5"],
    }
    with _child(client, experiment, parent, words[:_LONGEST_NAME], tags, start_ms) as run:
        _log_params(client, run, _changing(tree))
        figures = headlines(read_results(folder, tree["merge"]["sources"]), "evaluate")
        costs = {f"system/{name}": float(job[name]) for name in ("cpu_s", "wall_s")}
        _log_metrics(client, run, figures | costs, _curves(folder))
        for path in (place, folder / PARAMS_FILE, folder / "data/evaluation.json"):
            client.log_artifact(run, str(path))
        _log_inputs(client, run, "sweep", job["inputs"])
        log_model(client, experiment, run, folder, figures)
    client.set_terminated(parent)


def record_sweep(folder: Path, words: str, table: str) -> None:
    """Write on a sweep's run what was asked for, and its table."""
    _guarded(f"sweep {folder.name}", lambda: _record_sweep(folder, words, table))


def _record_sweep(folder: Path, words: str, table: str) -> None:
    client, experiment = _open()
    for run in _find(client, experiment, f"sweep-{folder.name}"):
        client.set_tag(run, "mlflow.runName", f"sweep {folder.name} {words}"[:_LONGEST_NAME])
        client.set_tag(run, "sweep.overrides", words[:_LONGEST_TAG])
        client.log_text(run, table, "table.txt")
        best = [job for job in (read_json(p) for p in folder.glob("*/job.json")) if "tau" in job]
        _log_metrics(client, run, {"tau_trained": max(job["tau"] for job in best)})


def _sweep(client: Any, experiment: str, sweep: str, state: State, start_ms: int) -> str:
    """Return the run of a sweep; made by the first of its jobs that ends."""
    with _lock():
        if found := _find(client, experiment, f"sweep-{sweep}"):
            return found[0]
        note = (
            f"One sweep. Its jobs are the runs below it, their files lie under `{FOLDER}/sweeps`."
        )
        run = client.create_run(
            experiment,
            start_time=start_ms,
            run_name=f"sweep {sweep}",
            tags=_tags(state, f"sweep-{sweep}", "sweep")
            | {"mlflow.note.content": note, "mlflow.source.name": "eyas.stages.sweep"},
        )
        return run.info.run_id


def _curves(folder: Path) -> list[tuple[str, int, float]]:
    """Return a job's training curves, thinned, under the names that the train stage gives them."""
    rows = list(read_jsonl(folder / "models/drafter/curves.jsonl"))
    every = max(1, len(rows) // _POINTS)
    return [
        (f"{row['split']}_{name}", row["step"], value)
        for number, row in enumerate(rows)
        if row["split"] == "val" or number % every == 0
        for name, value in row.items()
        if name not in ("split", "step", "epoch")
    ]


def _tags(state: State, key: str, stage: str) -> dict[str, str]:
    return {
        KEY_TAG: key,
        STAGE_TAG: stage,
        "git.commit": state.commit,
        "git.dirty": str(state.dirty).lower(),
        "params.md5": state.digest,
        "mlflow.source.git.commit": state.commit,
    }


def _log_metrics(
    client: Any,
    run: str,
    values: Mapping[str, float],
    curves: Sequence[tuple[str, int, float]] = (),
) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    entries = [Metric(name, float(value), now, step) for name, step, value in curves]
    entries += [Metric(name, float(value), now, 0) for name, value in values.items()]
    for begin in range(0, len(entries), _METRICS_A_CALL):
        client.log_batch(run, metrics=entries[begin : begin + _METRICS_A_CALL])


def system_metrics(started_s: float) -> dict[str, float]:
    """Return what this process took, its children included, as MLflow's system metrics."""
    most = max(resource.getrusage(w).ru_maxrss for w in _PROCESSES)
    return {
        "system/wall_s": round(time.time() - started_s, 1),
        "system/cpu_s": round(cpu_s(), 1),
        "system/memory_max_bytes": most * _RSS_UNIT_BYTES,
    }


def _log_params(client: Any, run: str, leaves: list[tuple[str, Any]]) -> None:
    from mlflow.entities import Param

    entries = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in leaves]
    for begin in range(0, len(entries), _PARAMS_A_CALL):
        client.log_batch(run, params=entries[begin : begin + _PARAMS_A_CALL])


def _changing(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the parameters that change an output."""
    return list(flatten("", {k: v for k, v in tree.items() if k not in ("select", "runtime")}))


def _log_inputs(client: Any, run: str, context: str, digests: Mapping[str, str]) -> None:
    """Link the data that was read, by DVC's digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    tags = [InputTag("mlflow.data.context", context)]
    inputs = [
        DatasetInput(Dataset(path, digest, "local", json.dumps({"uri": path})), tags)
        for path, digest in digests.items()
    ]
    if inputs:
        client.log_inputs(run, inputs)


def _headlines(title: str, params: Params, report: Report) -> dict[str, float]:
    """Return the figures people sort by: on the parent, so that the run table shows them."""
    stage, _, dataset = title.partition("@")
    figures = {}
    if stage == "generate" and "cost_usd" in report.metrics:
        figures[f"data_cost_usd_{dataset}"] = float(report.metrics["cost_usd"])
    sources = params.tree().get("merge", {}).get("sources", ())
    if any(Path("metrics").glob("*.json")):
        figures |= headlines(read_results(Path(), sources), stage)
    return figures


def _parent(
    client: Any, experiment: str, state: State, tree: Mapping[str, Any], start_ms: int
) -> str:
    """Return the run of this state of the pipeline; made by the first stage that ends in it."""
    with _lock():
        if found := _find(client, experiment, state.key):
            return found[0]
        trial = os.environ.get("DVC_EXP_NAME", "")
        target = tree.get("target", {}).get("name", "")
        name = f"{state.commit[:7]}-{state.digest[:8]}"  # first: the table cuts names
        dirty = " (with uncommitted changes)" if state.dirty else ""
        note = (
            f"One state of the pipeline: commit `{state.commit[:12]}`{dirty}, parameters "
            f"`{state.digest[:8]}`. Its stages are the runs below it."
        )
        run = client.create_run(
            experiment,
            start_time=start_ms,
            run_name=" ".join(filter(None, (trial, name, target))),
            tags=_tags(state, state.key, "pipeline")
            | {"mlflow.note.content": note, "mlflow.source.name": "dvc repro"}
            | ({"dvc.experiment": trial} if trial else {}),
        ).info.run_id
        _log_params(client, run, _changing(tree))
        return run


def _find(client: Any, experiment: str, key: str) -> list[str]:
    runs = client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=100)
    return [run.info.run_id for run in runs]


def _open() -> tuple[Any, str]:
    """Return a client and the experiment's id; database and experiment are made under the lock."""
    uri = f"sqlite:///{(FOLDER / 'mlflow.db').resolve()}"
    os.environ.update(_QUIET, MLFLOW_TRACKING_URI=uri)  # models:/ asks the global one
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with _lock():
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        where = (FOLDER / "artifacts").resolve().as_uri()
        return client, client.create_experiment(EXPERIMENT, where, _KIND)


def _lock() -> Any:
    from filelock import FileLock

    FOLDER.mkdir(exist_ok=True)
    return FileLock(FOLDER / "mlflow.lock", timeout=_LOCK_TIMEOUT_S)
