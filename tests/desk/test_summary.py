import shutil
from pathlib import Path

import pytest

from eyas.desk.results import read_results
from eyas.desk.summary import data_rows, drafter_rows, print_summary
from eyas.errors import EyasError

SETS = ("chat", "tools", "code", "trajectories")


@pytest.fixture
def printed(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    print_summary(finished_run)
    return capsys.readouterr().out


def test_it_fits_into_80_columns(printed: str) -> None:
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "…" not in printed


@pytest.mark.parametrize(
    "words", ["reports/index.html", "make ui", "models/export (for vllm)", "1.08x", "K=3"]
)
def test_it_says_how_fast_and_where_to_look(printed: str, words: str) -> None:
    assert words in printed


def test_every_data_set_and_their_sum_have_a_row(finished_run: Path) -> None:
    rows = data_rows(read_results(finished_run, SETS))
    assert [row[0] for row in rows] == [*SETS, "all"]
    assert rows[0] == ("chat", "136", "136", "22,440", "0.0067", "95.0 %")
    assert rows[-1] == ("all", "339", "316", "52,140", "0.0156", "94.7 %")


def test_every_held_out_set_has_its_acceptance_and_passes_saved(finished_run: Path) -> None:
    rows = drafter_rows(read_results(finished_run, SETS))
    assert [row[0] for row in rows] == [*SETS, "all"]
    assert rows[-1] == ("all", "1.56", "1.45", "1.00", "1.19", "35.3 %")


def test_only_the_named_data_sets_are_shown(finished_run: Path) -> None:
    assert [row[0] for row in data_rows(read_results(finished_run, ["code"]))] == ["code", "all"]


def test_a_run_that_is_half_done_is_told_as_far_as_it_went(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "half"
    shutil.copytree(finished_run, root)
    (root / "data/evaluation.json").unlink()
    for path in root.glob("metrics/validate-*.json"):
        path.unlink()
    (root / "metrics/generate-code.json").unlink()
    print_summary(root)
    out = capsys.readouterr().out
    assert "not been evaluated yet" in out
    assert "22,440" in out


def test_before_any_run_it_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"params\.yaml: no such file"):
        print_summary(tmp_path)
