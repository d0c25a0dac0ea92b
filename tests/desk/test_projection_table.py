"""The projection as a table of words."""

from pathlib import Path
from typing import Any

from eyas.desk import projection_table
from eyas.files import write_json


def figures(tokens: int, hours: float | None) -> dict[str, Any]:
    return {
        "samples": tokens // 1000,
        "tokens": tokens,
        "supervised_share": 0.3,
        "bytes": {"bf16": tokens * 57_348, "fp8": tokens * 23_672},
        "hours": hours,
    }


def table(hours: float | None = 1.0) -> dict[str, Any]:
    long = {"valid": 32_000_000, "mixture": 3_200_000, "all_without": 106_400_000}
    return {
        "tokens_per_s": 422.5 if hours else None,
        "datasets": {"a1": {what: figures(tokens, hours) for what, tokens in long.items()}},
        "all": {"valid": figures(138_400_000, hours), "mixture": figures(109_600_000, hours)},
    }


def test_a_row_says_what_is_left_without_its_set() -> None:
    heads, (a1, total) = projection_table.headings(table(91.0)), projection_table.rows(table(91.0))
    assert len(heads) == len(a1) == len(total)
    row = dict(zip(heads[5:], a1[5:], strict=True))
    assert row == {
        "supervised": "30 %",
        "bf16 states": "184 GB",
        "fp8 states": "75.8 GB",
        "hours": "91.0 h",
        "all without it": "91.0 h, 6.1 TB",
    }
    assert total[0] == "all"
    assert total[-1] == ""


def test_the_lines_are_aligned_and_end_with_what_the_rules_save() -> None:
    *lines, last = projection_table.text_of(table()).splitlines()
    assert len(lines) == 3
    at = lines[0].index("supervised") + len("supervised")
    assert all(line[at - 1] in "d%" for line in lines)
    assert last == (
        "all valid samples would take 60 min and 7.94 TB in bf16; "
        "the mixture takes 60 min and 6.29 TB, at 422 tokens a second"
    )


def test_unknown_hours_are_a_dash_and_not_in_the_words() -> None:
    assert projection_table.rows(table(None))[0][-2] == "-"
    words = projection_table.words_of(table(None)["all"]["mixture"])
    assert words == "109,600,000 tokens; states 6.29 TB in bf16, 2.59 TB in fp8"
    assert "to extract" in projection_table.words_of(table()["all"]["mixture"])


def test_the_page_has_the_table_where_there_is_one(tmp_path: Path) -> None:
    assert projection_table.section(tmp_path) == []
    write_json(tmp_path / projection_table.FILE, table())
    (html,) = projection_table.section(tmp_path)
    assert "a1" in html
    assert "6.29 TB" in html
