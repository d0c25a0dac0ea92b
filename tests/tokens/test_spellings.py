"""The spellings of arguments."""

from typing import Any

import pytest

from eyas.tokens.codecs import ReplyParts
from eyas.tokens.spellings import ARGUMENTS_RESPELLED, SPELLINGS, spell

ODD = ["[" * 3000, '{"a":"\\ud83d"}']  # too deep, and what no token spells


def calling(arguments: Any) -> ReplyParts:
    return ReplyParts(content=None, tool_calls=({"id": "c", "function": {"arguments": arguments}},))


@pytest.mark.parametrize(
    ("given", "spelling", "written"),
    [
        ('{"a":1}', "spaced", '{"a": 1}'),
        (' {"b": [1, 2], "a": "ü"} ', "compact", '{"b":[1,2],"a":"ü"}'),
        ('{"a": "\\u00fc"}', "spaced", '{"a": "ü"}'),
        ({"a": [1, 2]}, "compact", '{"a":[1,2]}'),
    ],
)
def test_arguments_are_written_anew_in_their_own_order(
    given: Any, spelling: str, written: str
) -> None:
    spelled = spell(calling(given), spelling)
    assert spelled.tool_calls[0]["function"]["arguments"] == written
    assert spelled.flags == (ARGUMENTS_RESPELLED,)


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": ', {"a": 1}, None, *ODD])
def test_what_needs_or_allows_no_other_spelling_stays(arguments: Any) -> None:
    reply = calling(arguments)
    assert spell(reply, "spaced") is reply


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_reply_without_calls_has_one_spelling(spelling: str) -> None:
    reply = ReplyParts(content='{"a":1}')
    assert spell(reply, spelling) is reply
    odd = ReplyParts(content=None, tool_calls=({"id": "c"},))
    assert spell(odd, spelling) is odd
