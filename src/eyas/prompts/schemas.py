"""Parse upstream rows, a function a schema: each row is a `ParsedRow` or a `Reject`, no guesses.

Pure. The table is `SCHEMAS`; the functions stand in `bfcl`, `dialogues`, `glaive`, `swe`, `tasks`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from eyas.errors import EyasError
from eyas.prompts.bfcl import parse_bfcl
from eyas.prompts.dialogues import (
    parse_messages,
    parse_mixture_of_thoughts,
    parse_openthoughts,
    parse_sharegpt,
    parse_ultrachat,
)
from eyas.prompts.glaive import parse_glaive
from eyas.prompts.rows import DETAIL_CHARS, ParsedRow, Reject, RowError
from eyas.prompts.swe import parse_nebius_swe, parse_openhands, parse_swe_agent, parse_swe_smith
from eyas.prompts.tasks import parse_humaneval, parse_mbpp, parse_turns, question
from eyas.records import canonical_json

SCHEMAS: dict[str, Callable[[Mapping[str, Any]], ParsedRow]] = {
    "messages": parse_messages,
    "bfcl": parse_bfcl,
    "glaive": parse_glaive,
    "gsm8k": question("question", "id"),
    "humaneval": parse_humaneval,
    "instruction": question("instruction", "id"),  # Magicoder's Evol-Instruct
    "magicoder": question("problem", "index"),
    "mbpp": parse_mbpp,
    "mixture_of_thoughts": parse_mixture_of_thoughts,
    "nebius_swe": parse_nebius_swe,
    "opencodeinstruct": question("input", "id"),
    "openhands": parse_openhands,
    "openthoughts": parse_openthoughts,
    "sharegpt": parse_sharegpt,
    "swe_agent": parse_swe_agent,
    "swe_smith": parse_swe_smith,
    "turns": parse_turns,  # MT-Bench, Vicuna bench, Spec-Bench
    "ultrachat": parse_ultrachat,
}


def parse_row(schema: str, row: object) -> ParsedRow | Reject:
    """Parse one upstream row of any type; a `Reject` stays one.

    Raises: EyasError for an unknown schema; a malformed row is a `Reject`.
    """
    if schema not in SCHEMAS:
        raise EyasError(
            f"datasets.*.prepare.schema: expected {' | '.join(sorted(SCHEMAS))}, got '{schema}'",
            hint="a new one is a function in src/eyas/prompts, named in its schemas.py",
        )
    if isinstance(row, Reject):
        return row
    problem = _json_problem(row)
    if not isinstance(row, Mapping):
        return Reject(reason="not_an_object", detail=problem or str(row)[:DETAIL_CHARS])
    if problem:
        return Reject(reason="not_json", detail=problem)
    try:
        parsed = SCHEMAS[schema](row)
    except RowError as error:
        return error.reject
    if problem := _json_problem([[parsed.messages, parsed.tools]]):  # deeper than `row_id` goes
        return Reject(reason="not_json", detail=problem)
    return parsed


def _json_problem(value: object) -> str:
    """Tell why a value has no JSON form (nested too deep is a reason), and so no id."""
    try:
        canonical_json(value)
    except TypeError as error:
        return str(error)[:DETAIL_CHARS]
    return ""
