"""Run combinations of parameters beside the pipeline, and put them in order.

Reads: conf/, dvc.yaml, dvc.lock, the pipeline's data. Writes: var/sweeps; no out of DVC.
Run: python -m eyas.stages.sweep --multirun train.lr=1e-4,3e-4 train=small,random_start; two jobs
at once with hydra/launcher=joblib hydra.launcher.n_jobs=2. Killed, it goes on: run it again.
Source: https://hydra.cc/docs/tutorials/basic/running_your_app/multi-run/
"""

import importlib
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from eyas.desk import sweeps
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.settings import Runtime

log = logging.getLogger("eyas")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def run(config: DictConfig) -> float:
    """Run one combination; return its acceptance length, which sweepers like Optuna maximise."""
    return run_combination(config)


def run_combination(config: DictConfig) -> float:
    """Run, record; a user's error ends this job and not the sweep."""
    settings = HydraConfig.get()
    overrides, tree = list(settings.overrides.task), Params(config).tree()
    place = Path(settings.runtime.output_dir) / sweeps.FINISHED
    try:
        job = sweeps.plan_job(tree, overrides)
        found = sweeps.run_job(job, work)
    except (EyasError, OSError) as error:
        log.debug("sweep: failed", exc_info=True)
        log.error("sweep: %s: error: %s", " ".join(overrides), error)
        write_json(place, {"overrides": overrides, "error": str(error)})
        return math.nan
    tracked = Params(tree).knob("runtime", Runtime).tracking != "off"
    told = {"overrides": overrides, "promote": sweeps.promote_line(overrides), "recorded": tracked}
    write_json(place, found | told)
    if tracked:
        from eyas.desk import tracking

        with sweeps.locked(job):
            tracking.record_job(place)
    return float(found["tau"])


def work(node: sweeps.Node, tree: Mapping[str, Any]) -> Report:
    """Run a stage in the working folder."""
    module = importlib.import_module(f"eyas.stages.{node.title.partition('@')[0]}")
    return module.work(Params(tree))


def main() -> None:
    """Run every combination, print the table; exit 1 if one failed."""
    arguments = sys.argv[1:]
    folder = sweeps.folder_of(arguments)
    sys.argv += [f"hydra.sweep.dir={folder}", f"hydra.run.dir={folder}/0"]
    try:
        run()
    except KeyboardInterrupt:
        sys.exit("sweep: interrupted; finished jobs are kept, run the same command again to go on")
    finally:
        tell(folder, arguments)
    if any("error" in job for job in sweeps.read_jobs(folder)):
        sys.exit(1)


def tell(folder: Path, arguments: list[str]) -> None:
    """Print the table of the jobs that have ended, and put it into MLflow."""
    jobs = sweeps.read_jobs(folder)
    if not jobs:
        return
    table = "\n".join([*sweeps.render(folder.name, jobs), ""])
    sys.stdout.write(f"\n{table}")
    if any(job.get("recorded") for job in jobs):
        from eyas.desk import tracking

        tracking.record_sweep(folder, " ".join(sweeps.told(arguments)), table)


if __name__ == "__main__":
    main()
