"""Where texts begin and end, and what may be put right there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.tokens.borders import EDITS, PLACES, edit_reply, edit_text, has_space, places_of
from eyas.tokens.codecs import ReplyParts

CALL = {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("reply", "finish", "places"),
    [
        (ReplyParts(content="a", reasoning="b"), "stop", PLACES),
        (ReplyParts(content="a", reasoning="b"), "length", PLACES[:3]),
        (ReplyParts(content=None, reasoning="b"), "length", PLACES[:1]),
        (ReplyParts(content="", reasoning="b"), "stop", PLACES[:2]),
        (ReplyParts(content="a"), "tool_calls", PLACES[2:]),
        (ReplyParts(content="a", tool_calls=(CALL,)), "length", PLACES[2:]),
        (ReplyParts(content=None), "stop", ()),
    ],
)
def test_a_text_that_was_cut_has_no_end(
    reply: ReplyParts, finish: str, places: tuple[str, ...]
) -> None:
    assert places_of(reply, finish) == places


@pytest.mark.parametrize(
    ("text", "place", "edit", "edited"),
    [
        ("  1", "content_start", "strip_space", " 1"),
        ("ok ", "reasoning_end", "strip_space", "ok"),
        ("ok", "reasoning_end", "restore_newline", "ok\n"),
        ("\nok", "content_start", "strip_newline", "ok"),
        ("ok", "content_start", "restore_space", " ok"),
        (" ok", "content_end", "strip_space", " ok"),
        (" ", "content_end", "strip_space", ""),
    ],
)
def test_an_edit_changes_one_character_at_its_side(
    text: str, place: str, edit: str, edited: str
) -> None:
    assert edit_text(text, place, edit) == edited


@given(
    text=st.text(min_size=1),
    place=st.sampled_from(PLACES),
    kind=st.sampled_from(["space", "newline"]),
)
def test_stripping_undoes_restoring(text: str, place: str, kind: str) -> None:
    assert edit_text(edit_text(text, place, f"restore_{kind}"), place, f"strip_{kind}") == text


def test_edits_apply_only_where_the_reply_has_the_border() -> None:
    edits = tuple((place, "strip_space") for place in PLACES)
    reply = ReplyParts(content=" a ", reasoning=" b ")
    assert edit_reply(reply, "stop", edits) == ReplyParts(content="a", reasoning="b")
    assert edit_reply(reply, "length", edits) == ReplyParts(content="a ", reasoning="b")
    assert edit_reply(reply, "stop", ()) is reply
    silent = ReplyParts(content=None)
    assert edit_reply(silent, "stop", tuple((p, e) for p in PLACES for e in EDITS)) == silent


def test_a_space_is_seen_at_its_side_only() -> None:
    assert has_space(" a", "content_start")
    assert not has_space(" a", "content_end")
    assert has_space("a ", "reasoning_end")
