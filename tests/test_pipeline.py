"""The whole pipeline on the tiny target, each stage's `work` called in the order of dvc.yaml."""

import importlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.desk.params import Params, compose
from eyas.desk.stage import Report
from eyas.desk.summary import print_summary
from eyas.files import read_json, write_json

ROOT = Path.cwd()
STAGES: dict[str, Any] = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
WORKING = [name for name in STAGES if name != "compose"]
CARRIED = ("conf", "src", "docs", "data/sources", "README.md", "dvc.yaml")
pytestmark = pytest.mark.slow


@dataclass
class Ran:
    """What a stage read and reported, by `stage` or `stage@data set`."""

    folder: Path
    reports: dict[str, Report] = field(default_factory=dict)
    sections: dict[str, set[str]] = field(default_factory=dict)
    knobs: dict[str, set[str]] = field(default_factory=dict)


def run_all(ran: Ran) -> None:
    text = compose(["experiment=tiny", "runtime.tracking=off", "runtime.threads=1"])
    Path("params.yaml").write_text(text, encoding="utf-8")
    tree = yaml.safe_load(text)
    for stage in WORKING:
        module = importlib.import_module(f"eyas.stages.{stage}")
        for dataset in tree["datasets"] if "foreach" in STAGES[stage] else [None]:
            params = Params(tree | {"select": dataset})
            title = f"{stage}@{dataset}" if dataset else stage
            ran.reports[title] = module.work(params)
            write_json(
                Path("metrics") / f"{title.replace('@', '-')}.json",
                dict(ran.reports[title].metrics),
            )
            ran.sections[title], ran.knobs[title] = params.sections, params.knobs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("pipeline")
    for name in CARRIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(source, folder / name)
    (ROOT / "var/cache").mkdir(parents=True, exist_ok=True)
    (folder / "var").mkdir()
    (folder / "var/cache").symlink_to(ROOT / "var/cache")
    result = Ran(folder)
    os.chdir(folder)
    try:
        run_all(result)
        yield result
    finally:
        os.chdir(ROOT)


def declared(title: str) -> set[str]:
    stage, _, dataset = title.partition("@")
    block = STAGES[stage].get("do", STAGES[stage])
    return {p.replace("${key}", dataset) for p in block.get("params", [])}


def test_every_stage_reads_exactly_the_params_that_it_declares(ran: Ran) -> None:
    assert {t: sorted(s) for t, s in ran.sections.items()} == {
        t: sorted(declared(t)) for t in ran.sections
    }


def test_no_knob_is_declared_as_a_param(ran: Ran) -> None:
    assert {k for knobs in ran.knobs.values() for k in knobs} == {"runtime"}
    assert not any(p.startswith("runtime") for title in ran.sections for p in declared(title))


def test_every_out_of_every_stage_is_there(ran: Ran) -> None:
    for title in ran.reports:
        stage, _, dataset = title.partition("@")
        for out in STAGES[stage].get("do", STAGES[stage])["outs"]:
            assert (ran.folder / out.replace("${key}", dataset)).exists(), out


def test_rows_add_up_in_every_stage(ran: Ran) -> None:
    for title, report in ran.reports.items():
        m = report.metrics
        if "rows_out" in m:
            rejects = sum(v for k, v in m.items() if k.startswith("rejects_"))
            assert m["rows_in"] == m["rows_out"] + rejects, title


def test_the_decoding_was_lossless_and_a_drafter_stands_in_the_table(ran: Ran) -> None:
    metrics = ran.reports["evaluate"].metrics
    assert metrics["lossless_share"] == 1.0
    assert metrics["acceptance_length_trained"] >= 1.0
    rows = read_json(ran.folder / "data/evaluation.json")["rows"]
    assert {row["drafter"] for row in rows} >= {"trained", "untrained", "lookup"}


def test_the_page_shows_every_data_set(ran: Ran) -> None:
    page = (ran.folder / "reports/index.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("chat", "code", "trajectories"))


def test_the_summary_names_every_data_set_and_what_to_do_next(
    ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(ran.folder)
    text = capsys.readouterr().out
    assert all(word in text for word in ("chat", "code", "trajectories", "lossless", "make ui"))
    assert max(len(line) for line in text.splitlines()) <= 100
