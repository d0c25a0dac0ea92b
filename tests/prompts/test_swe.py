import json
from typing import Any

import pytest

from eyas.prompts.schemas import ParsedRow, Reject, parse_row

SYSTEM = {"role": "system", "content": "You fix bugs."}
ISSUE = {"role": "user", "content": "It fails."}
STEP = {"role": "assistant", "content": "ls"}
OUTPUT = {"role": "user", "content": "a.py"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "Look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "a.py", "tool_call_id": "call_1"}


def step(role: str, text: Any, system: Any = None) -> dict[str, Any]:
    return {"role": role, "text": text, "system_prompt": system, "mask": False, "cutoff_date": None}


def parsed(schema: str, row: Any) -> ParsedRow:
    found = parse_row(schema, row)
    assert isinstance(found, ParsedRow), found
    return found


def test_nebius_roles_and_system_prompt_are_read() -> None:
    steps = [step("system", None, "You fix bugs."), step("user", "It fails."), step("ai", "ls")]
    row = {"instance_id": "a__b-1", "trajectory": [*steps, step("user", "a.py")]}
    assert parsed("nebius_swe", row) == ParsedRow(
        upstream_id="a__b-1",
        messages=(SYSTEM, ISSUE, STEP, OUTPUT),
        conversation="a__b-1",
    )


@pytest.mark.parametrize("form", [list, json.dumps])
def test_swe_smith_messages_are_a_list_or_its_json(form: Any) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a.py"}]}
    messages = form([SYSTEM | {"agent": "main"}, ISSUE, STEP, parts])
    row = {"instance_id": "i", "traj_id": "i.3", "messages": messages, "resolved": True}
    assert parsed("swe_smith", row) == ParsedRow(
        upstream_id="i.3", messages=(SYSTEM, ISSUE, STEP, OUTPUT), conversation="i"
    )


def test_swe_agent_history_is_read_with_its_tool_calls() -> None:
    result = {"role": "tool", "content": "a.py", "tool_call_ids": ["call_1"], "agent": "main"}
    row = {"history": [SYSTEM, ISSUE, CALLING | {"thought": "Look."}, result], "info": {}}
    assert parsed("swe_agent", row).messages == (SYSTEM, ISSUE, CALLING, RESULT)


def test_openhands_tools_lose_the_empty_keys_that_parquet_adds() -> None:
    properties = {"command": {"type": "string", "enum": None}, "path": None}
    function = {"name": "bash", "parameters": {"type": "object", "properties": properties}}
    row = {
        "instance_id": "i",
        "trajectory_id": "t",
        "trajectory": [SYSTEM | {"tool_calls": None, "name": None}, ISSUE, CALLING, RESULT],
        "tools": [{"type": "function", "function": function}],
    }
    found = parsed("openhands", row)
    assert found.messages == (SYSTEM, ISSUE, CALLING, RESULT)
    assert found.tools[0]["function"]["parameters"]["properties"] == {"command": {"type": "string"}}
    assert (found.upstream_id, found.conversation) == ("t", "i")


@pytest.mark.parametrize(
    ("schema", "row", "reason"),
    [
        ("nebius_swe", {"trajectory": []}, "no_messages"),
        ("nebius_swe", {"trajectory": "[]"}, "no_messages"),
        ("nebius_swe", {"trajectory": ["Hi"]}, "bad_role"),
        ("nebius_swe", {"trajectory": [step("assistant", "Hi")]}, "bad_role"),
        ("nebius_swe", {"trajectory": [step("user", None)]}, "no_content"),
        ("nebius_swe", {"trajectory": [step("user", None, "Hi")]}, "no_content"),
        ("nebius_swe", {"trajectory": [step("ai", "ls")]}, "starts_with_assistant"),
        ("swe_smith", {"messages": "[{"}, "messages_not_json"),
        ("swe_smith", {"messages": "{}"}, "no_messages"),
        ("swe_smith", {"messages": "[" * 300 + "]" * 300}, "messages_not_json"),
        ("swe_smith", {"messages": [ISSUE], "instance_id": 1.5}, "bad_id"),
        ("swe_agent", {"trajectory": []}, "no_messages"),
        ("swe_agent", {"history": [ISSUE, RESULT]}, "bad_turn_order"),
        ("swe_agent", {"history": [ISSUE, CALLING, RESULT | {"tool_call_id": 1}]}, "bad_message"),
        ("openhands", {"trajectory": [ISSUE], "tools": {}}, "bad_tools"),
        ("openhands", {"trajectory": None}, "no_messages"),
        (
            "openhands",
            {"trajectory": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "part_without_text",
        ),
    ],
)
def test_malformed_trajectories_have_a_named_reason(schema: str, row: Any, reason: str) -> None:
    found = parse_row(schema, row)
    assert isinstance(found, Reject)
    assert found.reason == reason
