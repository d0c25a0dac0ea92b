"""Parse the trajectories of software-engineering agents; runs of one issue stay together.

Pure. Source: https://huggingface.co/datasets/nebius/SWE-agent-trajectories and
https://huggingface.co/datasets/nebius/SWE-rebench-openhands-trajectories,
https://github.com/SWE-bench/SWE-smith, https://github.com/SWE-agent/SWE-agent (.traj files).
"""

from collections.abc import Mapping
from typing import Any

from eyas.prompts.chat import messages_of, tools_of
from eyas.prompts.rows import ParsedRow, RowError, json_of, upstream_id
from eyas.records import Message

_NEBIUS_ROLES = {"system": "system", "user": "user", "ai": "assistant"}


def parse_nebius_swe(row: Mapping[str, Any]) -> ParsedRow:
    """Parse nebius' SWE-agent rows: `trajectory` of role and text, `ai` is the assistant."""
    steps = row.get("trajectory")
    if not isinstance(steps, list) or not steps:
        raise RowError("no_messages", steps)
    return _trajectory(row, [_nebius_step(step) for step in steps])


def parse_swe_smith(row: Mapping[str, Any]) -> ParsedRow:
    """Parse SWE-smith's rows: `messages` is a list, or the JSON of one."""
    column = row.get("messages")
    if isinstance(column, str):
        column = json_of(column, "messages_not_json")
    return _trajectory(row, column)


def parse_swe_agent(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a SWE-agent `.traj` file: `history` is what the model was shown and said."""
    return _trajectory(row, row.get("history"))


def parse_openhands(row: Mapping[str, Any]) -> ParsedRow:
    """Parse OpenHands' rows: `trajectory` holds a chat API's messages, `tools` its functions."""
    return _trajectory(row, row.get("trajectory"))


def _trajectory(row: Mapping[str, Any], column: object) -> ParsedRow:
    issue = upstream_id(row, "instance_id")
    return ParsedRow(
        upstream_id=upstream_id(row, "traj_id") or upstream_id(row, "trajectory_id") or issue,
        messages=messages_of(column),
        tools=tools_of(_without_nulls(row.get("tools"))),
        conversation=issue,
    )


def _nebius_step(step: object) -> Message:
    """Return a step as a message; the system's words stand in a column of their own."""
    role = step.get("role") if isinstance(step, dict) else None
    if not isinstance(step, dict) or not isinstance(role, str) or role not in _NEBIUS_ROLES:
        raise RowError("bad_role", step)
    text = step.get("text")
    if role == "system" and text is None:
        text = step.get("system_prompt")
    return {"role": _NEBIUS_ROLES[role], "content": text}


def _without_nulls(value: object) -> object:
    """Drop the keys without a value: parquet gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
