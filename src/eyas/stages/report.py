"""Write the page with every number and plot of the run.

Reads: metrics/*.json, data/evaluation.json, data/valid, models/drafter/curves.jsonl.
Writes: reports/index.html, reports/acceptance.svg. Run: python -m eyas.stages.report.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.pages import acceptance_plot, build_page
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.desk.summary import read_results
from eyas.files import write_bytes, write_text

OUT = Path("reports")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Write the report."""
    run_stage("report", work, config)


def work(params: Params) -> Report:
    """Read every number, draw, write."""
    results = read_results(Path())
    page = build_page(results, Path())
    write_text(OUT / "index.html", page)
    write_bytes(OUT / "acceptance.svg", acceptance_plot(results))
    return Report(
        summary=f"{OUT}/index.html, {len(page) / 1000:.0f} kB, self-contained",
        metrics={"page_bytes": len(page.encode())},
        artifacts=(OUT / "index.html",),
    )


if __name__ == "__main__":
    main()
