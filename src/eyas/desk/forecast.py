"""Foretell a data set from its own answers, else from those of the others with the same max_tokens.

Reads: var/journal/*, data/responses/*.jsonl. `eyas plan` and `generate` ask here, so that they
agree.
"""

from collections.abc import Sequence
from pathlib import Path

from eyas.files import read_jsonl
from eyas.generation.books import Books
from eyas.generation.estimate import Estimate, foresee
from eyas.generation.holdings import Stock
from eyas.generation.jobs import Job, Wish
from eyas.generation.journal import read_books
from eyas.generation.market import Offer

JOURNAL = Path("var/journal")
RESPONSES = Path("data/responses")


def read_held(dataset: str) -> Books:
    """Return the books of a journal, with the answers that `generate` would take over into it."""
    books, shared = read_books(JOURNAL / dataset), RESPONSES / f"{dataset}.jsonl"
    for row in read_jsonl(shared) if shared.is_file() else ():
        if row["fingerprint"] not in books.entries:
            books.learn("responses", row, 0, 0)
    return books


def forecast(
    dataset: str,
    stock: Stock,
    todo: Sequence[Job],
    wish: Wish,
    offers: Sequence[Offer],
    *,
    concurrency: int = 1,
) -> Estimate:
    """Return what the jobs to do will take."""
    cap = max((job.max_tokens for job in todo), default=1)
    known = [
        entry.completion_tokens
        for folder in sorted(JOURNAL.glob("*/"))
        if folder.name != dataset
        for entry in read_books(folder).entries.values()
        if entry.max_tokens == cap and entry.completion_tokens
    ]
    return foresee(stock, todo, wish, offers, known=known, concurrency=concurrency)
