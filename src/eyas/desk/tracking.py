"""Runs in MLflow: a parent for each state of the pipeline, a child for each stage.

Writes: var/mlflow.db, var/artifacts. Nothing leaves the machine, and no failure here fails a stage.
Source: https://mlflow.org/docs/latest/ml/tracking ; the lock is there because several processes
that start on a fresh database would each run its migrations.
"""

import hashlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.desk.params import PARAMS_FILE, Params
from eyas.desk.stage import Report

FOLDER = Path("var")
EXPERIMENT = "eyas"
KEY_TAG, STAGE_TAG = "pipeline.key", "pipeline.stage"
_BATCH = 1000  # metrics a call, MLflow's limit
_HEADLINES = ("acceptance_length", "cost_usd", "lossless_share", "wall_clock_ratio")
_LOCK_TIMEOUT_S = 120
log = logging.getLogger("eyas")


def record(title: str, params: Params, report: Report, *, started_s: float) -> None:
    """Record a finished stage; what goes wrong is a warning that says what to do."""
    try:
        _record(title, params, report, started_s)
    except Exception as error:  # the boundary: tracking must not fail a stage that has its result
        log.warning(
            "%s: not tracked in MLflow (%s: %s)\n  hint: set runtime.tracking=off, or move %s away",
            title,
            type(error).__name__,
            str(error).splitlines()[0] if str(error) else "",
            FOLDER / "mlflow.db",
        )


def pipeline_key() -> tuple[str, dict[str, str]]:
    """Return what names a state of the pipeline (commit and parameters), and its tags."""
    commit = _git("rev-parse", "HEAD") or "nogit"
    text = PARAMS_FILE.read_bytes() if PARAMS_FILE.is_file() else b""
    digest = hashlib.md5(text, usedforsecurity=False).hexdigest()
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no"))
    key = f"{commit[:12]}-{digest[:8]}"
    return key, {KEY_TAG: key, "git.commit": commit, "git.dirty": str(dirty).lower()}


def _record(title: str, params: Params, report: Report, started_s: float) -> None:
    client, experiment = _client()
    key, tags = pipeline_key()
    parent = _parent(client, experiment, key, tags, started_s)
    stage = title.partition("@")[0]
    for old in _find(client, experiment, f"tags.`{KEY_TAG}` = '{key}/{title}'"):
        client.delete_run(old.info.run_id)
    run = client.create_run(
        experiment,
        start_time=int(started_s * 1000),
        run_name=title,
        tags=tags | {KEY_TAG: f"{key}/{title}", STAGE_TAG: stage, "mlflow.parentRunId": parent},
    )
    _log(client, run.info.run_id, params, report)
    client.set_terminated(run.info.run_id)
    _log_headlines(client, parent, title, report.metrics)
    client.set_terminated(parent)


def _log(client: Any, run_id: str, params: Params, report: Report) -> None:
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    values = [Metric(name, float(value), now, 0) for name, value in report.metrics.items()]
    values += [Metric(name, float(value), now, step) for name, step, value in report.curves]
    read = [
        Param(key, str(value)[:500])
        for path in sorted(params.sections)
        for key, value in flatten(path, params.value(path))
    ]
    client.log_batch(run_id, params=read[:100])
    for begin in range(0, len(values), _BATCH):
        client.log_batch(run_id, metrics=values[begin : begin + _BATCH])
    if inputs := [_input(path) for path in report.inputs if path.is_file()]:
        client.log_inputs(run_id, inputs)
    for path in report.artifacts:
        client.log_artifact(run_id, str(path))


def flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and leaf values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(f"{path}.{key}", item)
    else:
        yield path, value


def _input(path: Path) -> Any:
    """Return a data-set input whose digest is DVC's own: the md5 of the file."""
    from mlflow.data.http_dataset_source import HTTPDatasetSource
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import DatasetInput, InputTag

    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    data = MetaDataset(HTTPDatasetSource(path.as_posix()), name=path.as_posix(), digest=digest)
    return DatasetInput(data._to_mlflow_entity(), [InputTag("mlflow.data.context", "input")])


def _log_headlines(client: Any, parent: str, title: str, metrics: Mapping[str, Any]) -> None:
    """Put the numbers people sort by onto the parent, so that the run table shows them."""
    dataset = title.partition("@")[2]
    for name, value in metrics.items():
        if name.startswith(_HEADLINES):
            client.log_metric(parent, f"{name}_{dataset}" if dataset else name, float(value))


def _parent(
    client: Any, experiment: str, key: str, tags: Mapping[str, str], started_s: float
) -> str:
    with _lock():
        found = _find(client, experiment, f"tags.`{KEY_TAG}` = '{key}'")
        if found:
            return found[0].info.run_id
        run = client.create_run(
            experiment,
            start_time=int(started_s * 1000),
            run_name=f"pipeline {key}",
            tags=dict(tags) | {STAGE_TAG: "pipeline"},
        )
        return run.info.run_id


def _find(client: Any, experiment: str, condition: str) -> list[Any]:
    return list(client.search_runs([experiment], condition, max_results=10))


def _client() -> tuple[Any, str]:
    """Return a client and the experiment's id; made once, under a lock."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _lock():
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        client = MlflowClient(f"sqlite:///{FOLDER / 'mlflow.db'}")
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        where = (FOLDER / "artifacts").resolve().as_uri()
        return client, client.create_experiment(EXPERIMENT, artifact_location=where)


def _lock() -> Any:
    from filelock import FileLock

    FOLDER.mkdir(exist_ok=True)
    return FileLock(FOLDER / "mlflow.lock", timeout=_LOCK_TIMEOUT_S)


def _git(*arguments: str) -> str:
    """Return what git prints, or nothing where there is no repository."""
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
