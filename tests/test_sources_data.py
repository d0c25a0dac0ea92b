"""Rules for the data that the project wrote itself: data/sources."""

import ast
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eyas.files import read_jsonl
from eyas.prompts.schemas import ParsedRow, parse_row
from eyas.prompts.selection import is_heldout
from eyas.records import row_id

FOLDER = Path("data/sources")
CHAT = list(read_jsonl(FOLDER / "chat.jsonl"))
TRAJECTORIES = list(read_jsonl(FOLDER / "trajectories.jsonl"))
SPECIAL = ("<|", "|>", "<repo_name>", "<reponame>", "<filename>", "<file_sep>", "<gh_stars>")
SPECIAL += ("<jupyter", "<issue", "<empty_output>", "<think>", "<tool_call>")
LANGUAGES = {"en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "zh", "ja", "ko", "tr", "ru"}


def texts_of(row: dict[str, Any], *roles: str) -> list[str]:
    return [m["content"] for m in row["messages"] if not roles or m["role"] in roles]


def grams(row: dict[str, Any]) -> frozenset[str]:
    text = " ".join(texts_of(row, "user")).lower()
    return frozenset(text[i : i + 4] for i in range(max(1, len(text) - 3)))


@pytest.mark.parametrize("row", [*CHAT, *TRAJECTORIES], ids=lambda row: row["id"])
def test_row_parses_and_spells_no_special_token(row: dict[str, Any]) -> None:
    assert isinstance(parse_row("messages", row), ParsedRow)
    for text in texts_of(row):
        assert text == text.strip()
        assert not any(special in text for special in SPECIAL)


def test_ids_are_numbered_without_a_gap() -> None:
    for rows, name in ((CHAT, "chat"), (TRAJECTORIES, "trajectory")):
        assert [row["id"] for row in rows] == [f"{name}-{i + 1:03d}" for i in range(len(rows))]


def test_chat_has_enough_rows_in_enough_languages() -> None:
    languages = Counter(row["tags"][0] for row in CHAT)
    assert len(CHAT) >= 120
    assert set(languages) <= LANGUAGES
    assert len(languages) >= 6
    assert 0.2 <= 1 - languages["en"] / len(CHAT) <= 0.35


def test_chat_covers_its_kinds() -> None:
    tags = Counter(tag for row in CHAT for tag in row["tags"])
    kinds = ("factual", "explanation", "reasoning", "rewriting", "summary", "translation", "code")
    assert all(tags[kind] >= 5 for kind in (*kinds, "code-review", "list", "email", "story"))


def test_chat_rows_end_with_the_user_after_one_to_four_turns() -> None:
    turns = Counter(len(texts_of(row, "user")) for row in CHAT)
    assert set(turns) == {1, 2, 3, 4}
    assert all(row["messages"][-1]["role"] == "user" for row in CHAT)
    words = {"two-turns": 2, "three-turns": 3, "four-turns": 4}
    for row in CHAT:
        said = [words[tag] for tag in row["tags"] if tag in words] or [1]
        assert said == [len(texts_of(row, "user"))], row["id"]
        assert ("system" in row["tags"]) == (row["messages"][0]["role"] == "system")


def test_no_two_chat_rows_are_nearly_the_same() -> None:
    known = [(row["id"], grams(row)) for row in CHAT]
    for (first, a), (second, b) in itertools.combinations(known, 2):
        assert len(a & b) / len(a | b) < 0.4, f"{first} is close to {second}"


def test_chat_names_no_address_and_no_number_of_a_person() -> None:
    for row in CHAT:
        text = " ".join(texts_of(row))
        assert "@" not in text
        assert "http" not in text


def test_trajectories_are_whole_conversations_of_the_target() -> None:
    assert 20 <= len(TRAJECTORIES) <= 40
    for row in TRAJECTORIES:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) in (4, 6)
        assert len(row["sampling"]["seeds"]) == len(roles) // 2
        assert row["target"]["name"] == "smollm2_135m"
        assert len(row["target"]["revision"]) == 64


def test_user_turns_of_the_trajectories_stand_in_their_script() -> None:
    tree = ast.parse((FOLDER / "make_trajectories.py").read_text(encoding="utf-8"))
    turns = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "USER_TURNS"
    )
    written = [tuple(texts_of(row, "user")) for row in TRAJECTORIES]
    assert written == [turn for turn in turns if turn in set(written)]


def test_each_own_set_has_a_heldout_row() -> None:
    for rows, name in ((CHAT, "chat"), (TRAJECTORIES, "trajectories")):
        ids = [row_id(name, row["id"], row["messages"]) for row in rows]
        assert any(is_heldout(row, 120) for row in ids)


def test_readme_gives_the_row_counts() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"| `chat.jsonl` | {len(CHAT)} |" in text
    assert f"| `trajectories.jsonl` | {len(TRAJECTORIES)} |" in text
