from pathlib import Path
from typing import Any

import pytest

from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.stages.report import work


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    return Params({"select": None, "merge": {"sources": ["chat"]}})


def row(drafter: str, dataset: str, method: str = "replay") -> dict[str, Any]:
    return {
        "drafter": drafter,
        "dataset": dataset,
        "method": method,
        "draft_steps": 2,
        "tau": 1.5,
        "tau_low": 1.4,
        "tau_high": 1.6,
        "tau_without_loops": 1.5,
        "acceptance_by_position": [0.4, 0.2],
        "prompts": 2,
        "prompts_in_loops": 0,
        "verifications": 20,
        "tokens": 30,
        "lossless_prompts": 2,
    }


def test_the_page_and_the_picture_are_written_and_kept_with_the_run(params: Params) -> None:
    write_json(Path("metrics/merge.json"), {"tokens": 10})
    rows = [row(drafter, name) for drafter in ("trained", "lookup") for name in ("all", "chat")]
    rows += [row("trained", name, "real") for name in ("all", "chat")]
    write_json(Path("data/evaluation.json"), {"headline_steps": 2, "rows": rows})
    report = work(params)
    assert report.artifacts == (Path("reports/index.html"), Path("reports/acceptance.png"))
    assert all(path.is_file() for path in report.artifacts)
    assert not report.metrics  # its file would be among the stage's own deps
    assert params.sections == {"merge.sources"}


def test_a_run_without_an_evaluation_has_a_page_without_the_picture(params: Params) -> None:
    write_json(Path("metrics/merge.json"), {"tokens": 10})
    assert work(params).artifacts == (Path("reports/index.html"),)
    page = Path("reports/index.html").read_text(encoding="utf-8")
    assert "not been evaluated yet" in page
    assert "nogit" in page


def test_before_any_run_it_is_one_error(params: Params) -> None:
    with pytest.raises(EyasError, match="no run has been here"):
        work(params)
