"""Our books against the key's."""

from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.generation.facts import Tally
from eyas.generation.journal import Journal
from eyas.generation.purse import key_left_usd, look_at_key, settle_lost

LOST = {
    "fingerprint": "f1",
    "id": "p1",
    "sample": 0,
    "reason": "connection_lost",
    "generation_id": "gen-1",
    "maybe_billed": True,
    "charged_tokens": 500,
    "cost_usd": 0.0,
    "final": False,
}


class Books:
    """Answers GETs from a table; what is not there fails."""

    def __init__(self, table: dict[str, dict[str, Any]]) -> None:
        self.table = table

    async def fetch(self, path: str) -> dict[str, Any]:
        if path not in self.table:
            raise EyasError(f"GET {path}: HTTP 404")
        return self.table[path]


async def test_what_no_answer_explains_is_told() -> None:
    tally, books = Tally(total=1, resumed=0), Books({"key": {"usage": 5.0, "limit_remaining": 3}})
    await look_at_key(books, tally)
    tally.new_usd = 1.0
    books.table["key"] = {"usage": 6.25, "limit_remaining": None}
    await look_at_key(books, tally)
    assert tally.key == {
        "usage_start_usd": 5.0,
        "usage_now_usd": 6.25,
        "limit_left_usd": None,
        "unexplained_usd": 0.25,
    }


async def test_a_key_that_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(total=1, resumed=0)
    await look_at_key(Books({}), tally)
    await look_at_key(Books({"key": {"usage": None}}), tally)
    assert tally.key == {}
    assert len(caplog.messages) == 2
    assert await key_left_usd(Books({"key": {"limit_remaining": 2}})) == 2.0


async def test_a_lost_answer_is_settled_once_and_its_true_price_replaces_the_estimate(
    tmp_path: Path,
) -> None:
    books = Books(
        {
            "generation?id=gen-1": {
                "native_tokens_prompt": 10,
                "native_tokens_completion": 90,
                "total_cost": 0.5,
            }
        }
    )
    tally = Tally(total=1, resumed=0)
    with Journal(tmp_path, reserve_bytes=4096) as journal:
        journal.write("failures", LOST)
        assert journal.books.charged == {"f1": 500}
        await settle_lost(books, journal, tally)
    with Journal(tmp_path, reserve_bytes=4096) as journal:
        assert (journal.books.charged, journal.books.lost_usd) == ({"f1": 100}, 0.5)
        assert journal.books.unsettled() == []
        await settle_lost(books, journal, tally)
    assert (tally.settled, tally.new_usd) == (1, 0.5)


async def test_what_is_not_known_there_yet_waits_for_the_next_run(tmp_path: Path) -> None:
    tally = Tally(total=1, resumed=0)
    with Journal(tmp_path, reserve_bytes=4096) as journal:
        journal.write("failures", LOST)
        await settle_lost(Books({}), journal, tally)
        assert len(journal.books.unsettled()) == 1
    assert tally.settled == 0
