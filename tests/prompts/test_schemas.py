from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.prompts.schemas import SCHEMAS, ParsedRow, Reject, parse_row
from eyas.records import row_id

UPSTREAM = Path("../shared/prompts")


def test_unknown_schema_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(EyasError, match=r"bfcl \| humaneval \| messages, got 'sharegpt'"):
        parse_row("sharegpt", {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("id", "task_id", "messages", "prompt", "question", "function", "tools")
ROWS = st.dictionaries(st.sampled_from(KEYS), JSON) | st.just({"when": date(2024, 1, 1)}) | JSON


@given(st.sampled_from(sorted(SCHEMAS)), ROWS)
def test_any_json_value_is_parsed_or_rejected_without_an_exception(schema: str, row: Any) -> None:
    assert isinstance(parse_row(schema, row), ParsedRow | Reject)


@given(st.permutations(["role", "content", "name"]), st.permutations(["id", "messages", "x"]))
def test_row_id_does_not_depend_on_the_order_of_keys(inner: list[str], outer: list[str]) -> None:
    message = {"role": "user", "content": "Hi", "name": "n"}
    row = {"id": "a", "messages": [{key: message[key] for key in inner}], "x": 1}
    found = parse_row("messages", {key: row[key] for key in outer})
    assert isinstance(found, ParsedRow)
    assert row_id("d", found.upstream_id, found.messages) == row_id("d", "a", [message])


UPSTREAM_COUNTS = [
    ("bfcl", "bfcl_v4_simple_python.jsonl", 110, {}),
    ("bfcl", "bfcl_v4_parallel_multiple.jsonl", 60, {}),
    ("bfcl", "bfcl_v4_multi_turn_base.jsonl", 0, {"several_turns": 40}),
    ("humaneval", "humaneval.jsonl", 164, {}),
]


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason="needs ../shared/prompts, real upstream rows")
@pytest.mark.parametrize(("schema", "name", "parsed", "rejected"), UPSTREAM_COUNTS)
def test_real_upstream_files_parse_row_for_row(
    schema: str, name: str, parsed: int, rejected: dict[str, int]
) -> None:
    found = [parse_row(schema, row) for row in read_jsonl(UPSTREAM / name)]
    reasons = [row.reason for row in found if isinstance(row, Reject)]
    assert sum(isinstance(row, ParsedRow) for row in found) == parsed
    assert {reason: reasons.count(reason) for reason in reasons} == rejected
