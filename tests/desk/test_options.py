"""The table of options: current, complete, with types, values and readers as they are."""

import re
from pathlib import Path

import pytest

from eyas.desk.options import describe, render
from eyas.errors import EyasError
from eyas.settings import Extract, Validate

PAGE = Path("docs/options.md")


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make options`"


def test_every_option_is_described_and_no_cell_is_torn() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) in (2, 4), row
        assert all(cell.strip() for cell in cells), row


def test_a_row_tells_type_value_and_meaning_and_who_reads_it() -> None:
    page = render()
    assert "| `lr` | float | `0.0002` | of AdamW, at its highest |" in page
    assert (
        "| `max_rows` | int or None | `null` | prompts at most; held-out rows come on top;" in page
    )
    assert "## datasets.DS.generate\n" in page
    assert "## datasets.DS.prepare.overlap\n" in page
    assert "| `concurrency` | dict[str, int] | `{long: 64, short: 64}` |" in page
    train = page[page.index("## train\n") : page.index("## evaluate\n")]
    assert "Read by `train`." in train
    assert "| `target` | `kimi_k2_5`, `smollm2_135m`, `tiny` |" in page


def test_the_comment_in_conf_wins_over_that_of_the_class() -> None:
    assert describe(Extract)["codec"] == "of the layers' states: fp32 | bf16 | fp8 | int4"
    assert r"bf16 (exact) \| fp8 (a half) \| int4 (a quarter) |" in render("extract")
    assert set(describe(Validate)) == set(Validate.__slots__)


def test_one_section_alone_has_what_is_inside_it_too() -> None:
    found = re.findall(r"^## (.+)$", render("runtime"), flags=re.MULTILINE)
    inner = ("connection", "train", "sweep", "extract")
    assert found == ["runtime", *(f"runtime.{name}" for name in inner)]
    with pytest.raises(EyasError, match="no section 'nosuch'"):
        render("nosuch")
