"""Drafters in MLflow: logged by the digest of their weights, the pipeline's own registered too.

MLflow holds the record, DVC the bytes. Source: https://mlflow.org/docs/latest/ml/model-registry
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eyas.files import read_json, sha256_of

_DIGEST = "weights.sha256"
_WORDS = "The weights are with DVC: `dvc get . models/export --rev REVISION`."


def log_model(
    client: Any, experiment: str, run: str, folder: Path, figures: Mapping[str, float]
) -> None:
    """Log the drafter of a run with its figures; equal weights are one model."""
    from mlflow.entities import LoggedModelOutput, Metric

    name, digest = _named(folder)
    found = _models(client, experiment, digest)
    if not found:
        made = client.create_logged_model(
            experiment,
            name=name,
            source_run_id=run,
            tags={_DIGEST: digest, "dvc.path": "models/export"},
            model_type="EAGLE-3 drafter",
        )
        client.log_model_artifact(made.model_id, str(folder / "models/export/README.md"))
        found = [client.finalize_logged_model(made.model_id, "READY")]
    model, now = found[0].model_id, int(time.time() * 1000)
    client.log_outputs(run, [LoggedModelOutput(model, 0)])
    told = [Metric(n, float(v), now, 0, model_id=model, run_id=run) for n, v in figures.items()]
    client.log_batch(run, metrics=told)


def register(client: Any, run: str, folder: Path, lock: AbstractContextManager[Any]) -> None:
    """Make the logged drafter of a run a version of the registered model of its target, once."""
    name, digest = _named(folder)
    (model,) = _models(client, client.get_run(run).info.experiment_id, digest)[:1]
    with lock:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name, description="EAGLE-3 drafters, a version each.")
        versions = client.search_model_versions(f"name = '{name}'")
        if not any(version.tags.get(_DIGEST) == digest for version in versions):
            client.create_model_version(
                *(name, f"models:/{model.model_id}", run),
                tags={_DIGEST: digest},
                description=_WORDS,
                model_id=model.model_id,
            )


def _models(client: Any, experiment: str, digest: str) -> list[Any]:
    return client.search_logged_models([experiment], f"tags.`{_DIGEST}` = '{digest}'")


def _named(folder: Path) -> tuple[str, str]:
    """Return the name of a drafter's target, and the digest of its weights."""
    target = read_json(folder / "models/drafter/config.json")["target_name"]
    return f"drafter-{target}", sha256_of(folder / "models/export/model.safetensors")
