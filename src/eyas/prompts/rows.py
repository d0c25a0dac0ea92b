"""What every schema shares: the two results of a row, its reasons, and strict JSON.

Pure. A schema raises `RowError`; `eyas.prompts.schemas.parse_row` makes it a `Reject`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from eyas.records import Message, Tool, canonical_json

DETAIL_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """What a row says, in the pipeline's form; `upstream_id` is empty where the row has none."""

    upstream_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    conversation: str = ""  # rows that share it stay on one side of every split; "": alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Why a row is not used: a reason that is counted, and the text that shows it."""

    reason: str
    detail: str


class RowError(Exception):
    """A row that its schema does not fit: the reason that is counted, and a detail."""

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(reason, detail)
        self.reject = Reject(reason=reason, detail=str(detail)[:DETAIL_CHARS])


def upstream_id(row: Mapping[str, Any], key: str) -> str:
    """Return the row's own id as text, empty if it has none.

    Raises: RowError for an id that is neither text nor a whole number.
    """
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError("bad_id", value)
    return str(value)


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return a column that must hold text with something in it.

    Raises: RowError where it does not.
    """
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RowError("no_content", f"{key}: {value}")
    return value


def json_of(text: str, reason: str) -> Any:
    """Return what a JSON text says; `Infinity`, `NaN` and lone surrogates are no JSON.

    Raises: RowError with this reason; it is also given for what is nested too deep to be written.
    """
    try:
        value = orjson.loads(text)
        canonical_json(value)
    except (orjson.JSONDecodeError, TypeError):
        raise RowError(reason, text) from None
    return value
