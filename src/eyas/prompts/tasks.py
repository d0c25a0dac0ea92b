"""Parse the sets whose row is one question: the answer beside it is not read, the target answers.

Pure. Source: the data sets' pages; HumanEval, https://github.com/openai/human-eval; MBPP,
https://github.com/google-research/google-research/tree/master/mbpp; MT-Bench's question files,
https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge/data.
"""

from collections.abc import Callable, Mapping
from typing import Any

from eyas.prompts.rows import ParsedRow, RowError, text_of, upstream_id

_COMPLETE = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n"
    "```python\n{code}\n```"
)
_WITH_TESTS = "{task}\n\nYour code should pass these tests:\n\n```python\n{tests}\n```"


def parse_humaneval(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a HumanEval task: the unfinished function is put into a user's request, as a block."""
    code = _without_fence(text_of(row, "prompt"))
    return _asked(row, "task_id", _COMPLETE.format(code=code.strip("\n")))


def parse_mbpp(row: Mapping[str, Any]) -> ParsedRow:
    """Parse an MBPP task: only its tests tell the name of the function, so they are shown."""
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise RowError("no_tests", tests)
    shown = _without_fence("\n".join(tests))
    return _asked(row, "task_id", _WITH_TESTS.format(task=text_of(row, "prompt"), tests=shown))


def parse_turns(row: Mapping[str, Any]) -> ParsedRow:
    """Parse a question file: the first turn; a later one speaks about an answer not yet given."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise RowError("no_messages", turns)
    return _asked(row, "question_id", text_of({"turns[0]": turns[0]}, "turns[0]"))


def question(column: str, identity: str) -> Callable[[Mapping[str, Any]], ParsedRow]:
    """Return the schema of a set whose question is the text of one column."""
    return lambda row: _asked(row, identity, text_of(row, column))


def _asked(row: Mapping[str, Any], identity: str, content: str) -> ParsedRow:
    return ParsedRow(
        upstream_id=upstream_id(row, identity), messages=({"role": "user", "content": content},)
    )


def _without_fence(code: str) -> str:
    if "```" in code:
        raise RowError("code_fence_in_code", code)
    return code
