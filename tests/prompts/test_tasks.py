from typing import Any

import pytest

from eyas.prompts.schemas import ParsedRow, Reject, parse_row


def test_humaneval_task_becomes_a_request_with_a_code_block() -> None:
    row = {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    '''Double x.'''\n", "test": "..."}
    content = (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        "```python\ndef f(x):\n    '''Double x.'''\n```"
    )
    assert parse_row("humaneval", row) == ParsedRow(
        upstream_id="HumanEval/0", messages=({"role": "user", "content": content},)
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"task_id": "t"}, "no_content"),
        ({"task_id": "t", "prompt": "  \n"}, "no_content"),
        ({"task_id": "t", "prompt": ["def f():"]}, "no_content"),
        ({"task_id": "t", "prompt": "def f():\n    '```'"}, "code_fence_in_code"),
        ({"task_id": {}, "prompt": "def f():"}, "bad_id"),
    ],
)
def test_malformed_humaneval_rows_have_a_named_reason(row: dict[str, Any], reason: str) -> None:
    found = parse_row("humaneval", row)
    assert isinstance(found, Reject)
    assert found.reason == reason


QUESTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("gsm8k", {"question": "Q", "answer": "#### 1"}, ""),
    ("opencodeinstruct", {"id": "o", "input": "Q", "output": "A", "domain": "x"}, "o"),
    ("magicoder", {"index": 3, "raw_index": 9, "problem": "Q", "solution": "A"}, "3"),
    ("instruction", {"instruction": "Q", "response": "A"}, ""),
    ("instruction", {"instruction": "Q", "output": None}, ""),
    ("turns", {"question_id": 81, "turns": ["Q", "And then?"], "category": "x"}, "81"),
]


@pytest.mark.parametrize(("schema", "row", "identity"), QUESTIONS)
def test_question_is_the_prompt_and_its_answer_is_not_read(
    schema: str, row: dict[str, Any], identity: str
) -> None:
    question = {"role": "user", "content": "Q"}
    assert parse_row(schema, row) == ParsedRow(upstream_id=identity, messages=(question,))


def test_mbpp_task_shows_its_tests() -> None:
    row = {"task_id": 2, "prompt": "Add.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    content = (
        "Add.\n\nYour code should pass these tests:\n\n"
        "```python\nassert f(1) == 2\nassert f(2) == 3\n```"
    )
    assert parse_row("mbpp", row) == ParsedRow(
        upstream_id="2", messages=({"role": "user", "content": content},)
    )


@pytest.mark.parametrize(
    ("schema", "row", "reason"),
    [
        ("gsm8k", {"answer": "1"}, "no_content"),
        ("gsm8k", {"question": " "}, "no_content"),
        ("opencodeinstruct", {"input": ["Q"]}, "no_content"),
        ("magicoder", {"solution": "A"}, "no_content"),
        ("magicoder", {"problem": "Q", "index": 1.5}, "bad_id"),
        ("instruction", {"instruction": None}, "no_content"),
        ("turns", {"turns": []}, "no_messages"),
        ("turns", {"turns": "Q"}, "no_messages"),
        ("turns", {"turns": [""]}, "no_content"),
        ("turns", {"turns": [["Q"]]}, "no_content"),
        ("mbpp", {"prompt": "Add."}, "no_tests"),
        ("mbpp", {"prompt": "Add.", "test_list": [1]}, "no_tests"),
        ("mbpp", {"prompt": "", "test_list": ["assert f"]}, "no_content"),
        ("mbpp", {"prompt": "Add.", "test_list": ["'```'"]}, "code_fence_in_code"),
    ],
)
def test_malformed_questions_have_a_named_reason(
    schema: str, row: dict[str, Any], reason: str
) -> None:
    found = parse_row(schema, row)
    assert isinstance(found, Reject)
    assert found.reason == reason
