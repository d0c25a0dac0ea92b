"""Runs in MLflow: a parent for each state of the pipeline, a child for each stage.

Writes: var/mlflow.db, var/artifacts. Nothing leaves the machine, and no failure here fails a stage.
Source: https://mlflow.org/docs/latest/ml/tracking ; the lock is there because several processes
that start on a fresh database would each run its migrations.
"""

import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.desk.digests import State, input_digests, read_state
from eyas.desk.params import Params
from eyas.desk.results import headlines, read_results
from eyas.desk.stage import Report

FOLDER = Path("var")
EXPERIMENT = "eyas"
KEY_TAG, STAGE_TAG = "pipeline.key", "stage"
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100  # MLflow's limits
_LONGEST_VALUE = 500
_LOCK_TIMEOUT_S = 120
log = logging.getLogger("eyas")


def record(title: str, params: Params, report: Report, *, started_s: float) -> None:
    """Record a finished stage; what goes wrong is a warning that says what to do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's and SQLAlchemy's own deprecations
            _record(title, params, report, started_s)
    except Exception as error:  # the boundary: a stage that has its result must not fail here
        log.debug("%s: tracking failed", title, exc_info=True)
        words = str(error).strip().splitlines() or ["no message"]
        log.warning(
            "%s: done, but not recorded in MLflow (%s: %s)\n"
            "  hint: move %s away, a new one is made; or set runtime.tracking=off in conf/",
            title,
            type(error).__name__,
            words[0],
            FOLDER / "mlflow.db",
        )


def _record(title: str, params: Params, report: Report, started_s: float) -> None:
    client, experiment = _open()
    state = read_state(params.tree())
    start_ms = int(started_s * 1000)
    parent = _parent(client, experiment, state, params.tree(), start_ms)
    stage, key = title.partition("@")[0], f"{state.key}/{title}"
    source = {"mlflow.source.name": f"eyas.stages.{stage}", "mlflow.source.type": "LOCAL"}
    run = client.create_run(
        experiment,
        start_time=start_ms,
        run_name=title,
        tags=_tags(state, key, title) | source | {"mlflow.parentRunId": parent},
    ).info.run_id
    try:
        _log(client, run, params, report)
        _log_inputs(client, run, title, report)
    except Exception:
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run)
    for old in _find(client, experiment, key):
        if old != run:
            client.delete_run(old)
    _log_headlines(client, parent, title, params, report)
    client.set_terminated(parent)


def _tags(state: State, key: str, stage: str) -> dict[str, str]:
    return {
        KEY_TAG: key,
        STAGE_TAG: stage,
        "git.commit": state.commit,
        "git.dirty": str(state.dirty).lower(),
        "params.md5": state.digest,
        "mlflow.source.git.commit": state.commit,
    }


def _log(client: Any, run: str, params: Params, report: Report) -> None:
    from mlflow.entities import Metric

    read = [leaf for path in sorted(params.sections) for leaf in flatten(path, params.value(path))]
    _log_params(client, run, read)
    now = int(time.time() * 1000)
    drawn = {name for name, _, _ in report.curves}
    values = [Metric(name, float(value), now, step) for name, step, value in report.curves]
    values += [Metric(n, float(v), now, 0) for n, v in report.metrics.items() if n not in drawn]
    for begin in range(0, len(values), _METRICS_A_CALL):
        client.log_batch(run, metrics=values[begin : begin + _METRICS_A_CALL])
    for path in report.artifacts:
        client.log_artifact(run, str(path))


def _log_params(client: Any, run: str, leaves: list[tuple[str, Any]]) -> None:
    from mlflow.entities import Param

    entries = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in leaves]
    for begin in range(0, len(entries), _PARAMS_A_CALL):
        client.log_batch(run, params=entries[begin : begin + _PARAMS_A_CALL])


def flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and leaf values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(f"{path}.{key}" if path else key, item)
    else:
        yield path, value


def _log_inputs(client: Any, run: str, title: str, report: Report) -> None:
    """Link the data that the stage read, by DVC's digest and without reading large files."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    tags = [InputTag("mlflow.data.context", title.partition("@")[0])]
    inputs = [
        DatasetInput(Dataset(path, digest, "local", json.dumps({"uri": path})), tags)
        for path, digest in input_digests(title, report.inputs).items()
    ]
    if inputs:
        client.log_inputs(run, inputs)


def _log_headlines(client: Any, parent: str, title: str, params: Params, report: Report) -> None:
    """Put the figures people sort by onto the parent, so that the run table shows them."""
    from mlflow.entities import Metric

    stage, _, dataset = title.partition("@")
    figures = {}
    if stage == "generate" and "cost_usd" in report.metrics:
        figures[f"data_cost_usd_{dataset}"] = float(report.metrics["cost_usd"])
    sources = params.tree().get("merge", {}).get("sources", ())
    if any(Path("metrics").glob("*.json")):
        figures |= headlines(read_results(Path(), sources), stage)
    now = int(time.time() * 1000)
    client.log_batch(parent, metrics=[Metric(n, v, now, 0) for n, v in figures.items()])


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
        leaves = flatten("", {k: v for k, v in tree.items() if k not in ("select", "runtime")})
        _log_params(client, run, list(leaves))
        return run


def _find(client: Any, experiment: str, key: str) -> list[str]:
    runs = client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=100)
    return [run.info.run_id for run in runs]


def _open() -> tuple[Any, str]:
    """Return a client and the experiment's id; database and experiment are made under the lock."""
    os.environ.update(_QUIET)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with _lock():
        client = MlflowClient(f"sqlite:///{(FOLDER / 'mlflow.db').resolve()}")
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        where = (FOLDER / "artifacts").resolve().as_uri()
        return client, client.create_experiment(EXPERIMENT, artifact_location=where)


def _lock() -> Any:
    from filelock import FileLock

    FOLDER.mkdir(exist_ok=True)
    return FileLock(FOLDER / "mlflow.lock", timeout=_LOCK_TIMEOUT_S)
