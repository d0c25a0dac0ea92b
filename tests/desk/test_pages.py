import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.desk import plots
from eyas.desk.figures import smoothed
from eyas.desk.markup import paragraph, table
from eyas.desk.pages import acceptance_picture, build_page, reject_rows
from eyas.desk.results import Results, headlines, passes_saved, read_results
from eyas.desk.words import dollars, number, percent, seconds, size
from eyas.errors import EyasError
from eyas.files import read_json, write_json

SETS = ("chat", "tools", "code", "trajectories")


@pytest.fixture(scope="module")
def page(finished_run: Path) -> str:
    return build_page(read_results(finished_run, SETS), finished_run, "0123456789ab")


@pytest.fixture(scope="module")
def reader(page: str, read_page: Callable[[str], Any]) -> Any:
    return read_page(page)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out: drawing takes most of a page's time."""
    monkeypatch.setattr(plots, "svg_of", lambda *_, **__: "")


@pytest.fixture
def partial(finished_run: Path, tmp_path: Path, undrawn: None) -> Callable[..., str]:
    """Return a function that builds the page of a run without some of its files."""

    def build(*patterns: str) -> str:
        root = tmp_path / "partial"
        shutil.copytree(finished_run, root)
        for pattern in patterns:
            for path in sorted(root.glob(pattern)):
                path.unlink()
        return build_page(read_results(root, SETS), root, "nogit")

    return build


def test_every_element_is_closed_and_every_id_is_its_own(reader: Any) -> None:
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))


def test_headings_skip_no_level(reader: Any) -> None:
    assert reader.headings[0] == 1
    assert reader.headings.count(1) == 1
    steps = zip(reader.headings, reader.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps)


def test_the_page_loads_nothing(page: str, reader: Any) -> None:
    assert all(where.startswith(("#", "data:")) for where in reader.loaded)
    assert "http" not in page
    assert "@import" not in page
    assert all(where.startswith("#") for where in re.findall(r"url\(([^)]*)\)", page))


def test_every_picture_has_words_in_its_place(reader: Any) -> None:
    assert len(reader.pictures) == 9
    for picture in reader.pictures:
        assert picture["role"] == "img"
        assert len(picture["aria-label"] or "") > 20


def test_every_reference_inside_a_picture_is_to_an_id_of_the_page(page: str, reader: Any) -> None:
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    assert {a or b for a, b in used} <= set(reader.ids)


def test_pictures_take_the_colours_of_the_page(page: str) -> None:
    body = page[page.index("<body>") :]
    assert "var(--c0)" in body
    assert re.findall(r"#[0-9a-f]{6}", body) == []


def test_equal_numbers_give_equal_bytes(page: str, finished_run: Path) -> None:
    results = read_results(finished_run, SETS)
    assert build_page(results, finished_run, "0123456789ab") == page
    assert acceptance_picture(results) == acceptance_picture(results)


@pytest.mark.parametrize(
    "words",
    ["A drafter for smollm2_135m", "1.56", "100 %", "1.08x", "$0.0156", "37 of 37", "0123456789ab"],
)
def test_the_headline_figures_stand_on_the_page(reader: Any, words: str) -> None:
    assert words in reader.words


def test_the_readme_picture_is_a_png(finished_run: Path) -> None:
    picture = acceptance_picture(read_results(finished_run, SETS))
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("data/evaluation.json", "data/evaluation.json"),
        ("models/drafter/curves.jsonl", "models/drafter/curves.jsonl"),
        ("data/valid/code.parquet", "data/valid/code.parquet"),
        ("models/target/*", "A drafter for the target"),
        ("metrics/validate-*.json", "What was dropped, and why"),
        ("metrics/generate-*.json", "What the data cost"),
    ],
)
def test_what_is_missing_is_left_out_with_a_note(
    partial: Callable[..., str], read_page: Callable[[str], Any], missing: str, words: str
) -> None:
    reader = read_page(partial(missing))
    assert reader.open == []
    assert any(words in said for said in reader.words)


def test_an_endpoint_without_cost_has_no_plot_of_cost(
    finished_run: Path, tmp_path: Path, undrawn: None
) -> None:
    root = tmp_path / "free"
    shutil.copytree(finished_run, root)
    for path in root.glob("metrics/generate-*.json"):
        write_json(path, {k: v for k, v in read_json(path).items() if k != "cost_usd"})
    page = build_page(read_results(root, SETS), root, "nogit")
    assert "Money spent" not in page
    assert "Tokens bought" in page


def test_rejects_are_told_by_reason_and_data_set(finished_run: Path) -> None:
    rows = reject_rows(read_results(finished_run, SETS))
    assert ("prepare: duplicate", "2", "2", "2", "2", "8") in rows
    assert ("generate: budget", "-", "-", "3", "-", "3") in rows
    assert ("merge: too long", "-", "-", "-", "-", "4") in rows


def test_a_run_without_rejects_says_so(partial: Callable[..., str]) -> None:
    page = partial(
        "metrics/prepare-*", "metrics/generate-*", "metrics/validate-*", "metrics/merge*"
    )
    assert "Nothing: every row passed every rule." in page


def test_text_is_escaped_wherever_it_stands() -> None:
    assert "<script" not in table("<script>", ["<script>"], [["<script>", "<script>"]])
    assert paragraph("a `b<c` d") == "<p>a <code>b&lt;c</code> d</p>"


def test_names_that_look_like_formulas_are_drawn_as_they_are() -> None:
    bars = plots.Bars(labels=["a$b$c"], series={"x$^$": [2.0]}, xlabel="USD")
    assert "a$b$c" in plots.svg_of({"": bars.draw}, name="money", alt="bars of one set")


def test_nothing_run_yet_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no run has been here"):
        read_results(tmp_path, SETS)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (number(1234567), "1,234,567"),
        (number(None), "-"),
        (percent(0.9466), "94.7 %"),
        (dollars(0.0156), "0.0156"),
        (dollars(86.1), "86.10"),
        (dollars(0), "0.00"),
        (dollars(None), "-"),
        (size(5_500_000_000_000), "5.5 TB"),
        (size(0), "0 B"),
        (size(None), "-"),
        (seconds(61), "61 s"),
        (seconds(214.0), "4 min"),
        (seconds(91 * 3600), "91.0 h"),
        (seconds(None), "-"),
    ],
)
def test_numbers_are_written_as_people_write_them(said: str, expected: str) -> None:
    assert said == expected


def test_curves_are_thinned_by_means_of_neighbours() -> None:
    rows: list[dict[str, Any]] = [
        {"split": "train", "step": i, "loss": float(i)} for i in range(240)
    ]
    thin = smoothed(rows)
    assert len(thin) == 60
    assert thin[0] == {"step": 1.5, "loss": 1.5}
    assert smoothed([]) == []


def test_passes_saved_count_the_prefill_on_both_sides() -> None:
    # a reply of 5 tokens: 5 passes plainly; prefill and 2 verifications with drafts
    assert passes_saved({"prompts": 1, "tokens": 4, "verifications": 2}) == pytest.approx(2 / 5)
    assert passes_saved({"prompts": 0, "tokens": 0, "verifications": 0}) is None


def test_a_stage_tells_no_figure_of_a_later_one() -> None:
    metrics = {
        "generate-chat": {"cost_usd": 0.5},
        "train": {"val_simulated_acceptance_length": 1.7},
        "evaluate": {"acceptance_length_trained": 1.6},
    }
    results = Results(metrics=metrics, evaluation=None, datasets=("chat",))
    assert headlines(results, "validate") == {}
    assert headlines(results, "merge") == {"data_cost_usd": 0.5}
    assert set(headlines(results, "train")) == {
        "data_cost_usd",
        "tau_simulated",
    }
    assert headlines(results, "evaluate")["tau_trained"] == 1.6
