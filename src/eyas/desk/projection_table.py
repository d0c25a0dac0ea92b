"""The projection of the mixture as people read it: in merge's log and on the report page. Pure.

Reads what the merge stage writes into data/mixture/projection.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.desk import markup
from eyas.desk.words import UNKNOWN, number, percent, seconds, size
from eyas.files import read_json

FILE = Path("data/mixture/projection.json")
Figures = Mapping[str, Any]


def headings(table: Figures) -> tuple[str, ...]:
    """Return the heads of the columns."""
    codecs = table["all"]["mixture"]["bytes"]
    counts = ("data set", "samples", "of valid", "tokens", "of valid", "supervised")
    return (*counts, *(f"{codec} states" for codec in codecs), "hours", "all without it")


def rows(table: Figures) -> list[tuple[str, ...]]:
    """Return a row for each data set, and one for all."""
    sets = [_row(name, one, one["all_without"]) for name, one in table["datasets"].items()]
    return [*sets, _row(markup.TOTAL, table["all"], None)]


def _row(name: str, one: Figures, without: Figures | None) -> tuple[str, ...]:
    mixture, valid = one["mixture"], one["valid"]
    return (
        name,
        number(mixture["samples"]),
        number(valid["samples"]),
        number(mixture["tokens"]),
        number(valid["tokens"]),
        percent(mixture["supervised_share"], 0),
        *(size(value) for value in mixture["bytes"].values()),
        _hours(mixture["hours"]),
        "" if without is None else f"{_hours(without['hours'])}, {size(_first(without['bytes']))}",
    )


def _hours(value: float | None) -> str:
    return UNKNOWN if value is None else seconds(3600 * value)


def _first(sizes: Mapping[str, int]) -> int:
    return next(iter(sizes.values()))


def words_of(mixture: Figures) -> str:
    """Return tokens, bytes and hours in a few words."""
    sizes = ", ".join(f"{size(value)} in {codec}" for codec, value in mixture["bytes"].items())
    time = "" if mixture["hours"] is None else f", {_hours(mixture['hours'])} to extract"
    return f"{mixture['tokens']:,} tokens; states {sizes}{time}"


def caps_words(table: Figures) -> str:
    """Return what caps, cuts and drops save."""
    valid, mixture = table["all"]["valid"], table["all"]["mixture"]
    codec, speed = next(iter(valid["bytes"])), table.get("tokens_per_s")
    rate = f", at {speed:,.0f} tokens a second" if speed else ""
    return (
        f"all valid samples would take {_hours(valid['hours'])} and "
        f"{size(valid['bytes'][codec])} in {codec}; the mixture takes {_hours(mixture['hours'])} "
        f"and {size(mixture['bytes'][codec])}{rate}"
    )


def text_of(table: Figures) -> str:
    """Return the table as lines of text."""
    lines = [headings(table), *rows(table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*aligned, caps_words(table)])


def section(root: Path) -> list[str]:
    """Return the table for the report page; nothing where there is none."""
    if not (root / FILE).is_file():
        return []
    table = read_json(root / FILE)
    caption = f"What the mixture takes ({caps_words(table)})"
    return [markup.table(caption, headings(table), rows(table))]
