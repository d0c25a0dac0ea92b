"""Read a file of upstream rows as prepare does: one JSON line of rows in, prompts out, rejects.

Every row is parsed by SCHEMA, cut at its last user turn, and dropped if it was there before. No
target takes part: no row is too long, none spells a special token, none is held out.
FILE holds JSON lines, one JSON array (both also as .gz) or parquet.
Run: python benchmarks/prepare_rows.py SCHEMA FILE [--functions FILE_OR_FOLDER]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson

from eyas.errors import EyasError
from eyas.prompts.schemas import SCHEMAS, parse_row
from eyas.prompts.selection import Plan, Selection, TargetFacts, select
from eyas.prompts.sources import read_rows
from eyas.settings import PartitionRule, Source

_PLAN = Plan(
    dataset="rows",
    kind="prompts",
    licence="not asked for",
    heldout_permille=0,
    max_rows=None,
    seed=0,
    partition=None,
    partitions={"any": PartitionRule(max_prompt_tokens=None, max_tokens=0)},
)
_NO_TARGET = TargetFacts(
    count_tokens=lambda messages, tools: 0, has_special_text=lambda text: False, context_tokens=0
)


def count(schema: str, source: Source) -> dict[str, Any]:
    """Return the numbers of one file."""
    rows = (parse_row(schema, row) for row in read_rows(source))
    selection = select(rows, _PLAN, _NO_TARGET)
    return {
        "schema": schema,
        "rows_in": selection.rows_in,
        "prompts_out": len(selection.prompts),
        "rejects": _rejects(selection),
    }


def _rejects(selection: Selection) -> dict[str, dict[str, Any]]:
    """Return for each reason how often it was met, and the first row that met it."""
    found: dict[str, dict[str, Any]] = {}
    for violation in selection.rejects:
        entry = found.setdefault(
            violation.rule, {"count": 0, "example_id": violation.id, "detail": violation.detail}
        )
        entry["count"] += 1
    return dict(sorted(found.items()))


def main() -> None:
    """Count one file and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schema", help=" | ".join(sorted(SCHEMAS)))
    parser.add_argument("file", type=Path)
    parser.add_argument("--functions", help="bfcl: the function documents of multi-turn rows")
    options = parser.parse_args()
    source = Source(kind="file", path=str(options.file), functions=options.functions)
    try:
        line = count(options.schema, source)
    except EyasError as error:
        sys.exit(str(error))
    print(orjson.dumps({"file": options.file.name, **line}).decode())


if __name__ == "__main__":
    main()
