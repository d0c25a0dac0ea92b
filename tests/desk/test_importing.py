"""Answers bought elsewhere are taken once, and everything else is told."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from eyas.desk.importing import import_answers
from eyas.desk.params import Params, compose
from eyas.errors import EyasError
from eyas.files import write_json, write_jsonl
from eyas.generation.journal import Journal
from eyas.records import Prompt

Make = Callable[[int, int], Prompt]


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_prompt: Make) -> Params:
    tree = yaml.safe_load(compose())
    monkeypatch.chdir(tmp_path)
    write_json(Path("models/target/eyas_target.json"), {"revision": "r1"})
    write_jsonl(Path("data/prompts/chat.jsonl"), [make_prompt(i, 10) for i in range(4)])
    return Params(tree)


def write(rows: list[Any]) -> Path:
    path = Path("answers.jsonl")
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else orjson.dumps(r) for r in rows))
    return path


def test_answers_are_taken_once_by_id_or_by_messages(params: Params, make_prompt: Make) -> None:
    counts = {"prompt_tokens": 10, "completion_tokens": 3, "cost_usd": 0.5}
    rows = [
        {"id": make_prompt(0, 10).id, "content": "yes", **counts},
        {
            "messages": make_prompt(1, 10).messages,
            "content": None,
            "reasoning": "so",
            "usage": counts,
        },
    ]
    file = write(rows)
    assert list(import_answers(params, "chat", file).lines()) == ["2 answers taken"]
    again = import_answers(params, "chat", file)
    assert (again.taken, dict(again.skipped)) == (0, {"held already": 2})
    with Journal(Path("var/journal/chat"), reserve_bytes=4096) as journal:
        found = [journal.read(fingerprint) for fingerprint in journal.books.entries]
    assert [(r.content, r.reasoning, r.completion_tokens) for r in found] == [
        ("yes", None, 3),
        (None, "so", 3),
    ]
    assert {r.source for r in found} == {"imported"}


def test_a_response_of_another_clone_comes_back_as_it_was(
    params: Params, make_prompt: Make
) -> None:
    first = write(
        [{"id": make_prompt(0, 10).id, "content": "yes", "true_ids": [1, 2], "provider": "P"}]
    )
    import_answers(params, "chat", first)
    with Journal(Path("var/journal/chat"), reserve_bytes=4096) as journal:
        [response] = [journal.read(fingerprint) for fingerprint in journal.books.entries]
    Path("var/journal/chat/responses.jsonl").unlink()
    import_answers(params, "chat", write([asdict(response)]))
    with Journal(Path("var/journal/chat"), reserve_bytes=4096) as journal:
        assert [journal.read(fingerprint) for fingerprint in journal.books.entries] == [response]


def test_every_row_that_is_not_taken_is_told_with_its_place(
    params: Params, make_prompt: Make
) -> None:
    known = {"id": make_prompt(0, 10).id}
    rows = [
        b"{",
        [1],
        {"id": "unknown", "content": "x"},
        known,
        known | {"content": 3},
        known | {"content": "x", "finish_reason": "error"},
        known | {"content": "x", "completion_tokens": -1},
        known | {"content": "x"},
    ]
    result = import_answers(params, "chat", write(rows))
    assert result.taken == 0
    assert result.examples == {
        "not JSON": ["answers.jsonl:1"],
        "not an object": ["answers.jsonl:2"],
        "no prompt with this id or these messages": ["answers.jsonl:3"],
        "no content, reasoning or tool_calls": ["answers.jsonl:4"],
        "content is no text": ["answers.jsonl:5"],
        "finish_reason 'error'": ["answers.jsonl:6"],
        "completion_tokens is no count": ["answers.jsonl:7"],
        "neither completion_tokens nor true_ids": ["answers.jsonl:8"],
    }
    assert sum(result.skipped.values()) == len(rows)


def test_a_missing_file_is_told(params: Params) -> None:
    with pytest.raises(EyasError, match="no such file"):
        import_answers(params, "chat", Path("none.jsonl"))
