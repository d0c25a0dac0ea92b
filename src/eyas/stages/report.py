"""Write the page with every number and plot of the run.

Reads: metrics/*.json, data/evaluation.json, data/valid, models/drafter/curves.jsonl,
models/target/eyas_target.json. Writes: reports/index.html, reports/acceptance.png.
Run: python -m eyas.stages.report.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.digests import read_state
from eyas.desk.pages import acceptance_picture, build_page
from eyas.desk.params import Params
from eyas.desk.results import read_results
from eyas.desk.stage import CONF, Report, run_stage
from eyas.files import write_bytes, write_text

OUT = Path("reports")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Write the report."""
    run_stage("report", work, config)


def work(params: Params) -> Report:
    """Read every number, draw, write."""
    results = read_results(Path(), params.section("merge.sources", tuple[str, ...]))
    state = read_state(params.tree())
    version = f"{state.commit[:12]}{' with uncommitted changes' if state.dirty else ''}"
    page = build_page(results, Path(), version)
    write_text(OUT / "index.html", page)
    artifacts = [OUT / "index.html"]
    if results.evaluation is not None:
        write_bytes(OUT / "acceptance.png", acceptance_picture(results))
        artifacts.append(OUT / "acceptance.png")
    size_bytes = len(page.encode())
    return Report(
        summary=f"{OUT}/index.html, {size_bytes / 1000:.0f} kB, self-contained",
        metrics={},
        artifacts=tuple(artifacts),
    )


if __name__ == "__main__":
    main()
