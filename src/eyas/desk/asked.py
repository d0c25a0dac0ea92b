"""The prompts' table of the report: how long they are and in what languages people ask. Pure."""

from eyas.desk import markup
from eyas.desk.results import Results
from eyas.desk.words import number

_LENGTHS = ("prompt_tokens_p50", "prompt_tokens_p90", "prompt_tokens_max")
_LANGUAGE = "language_"


def prompt_table(results: Results) -> list[str]:
    """Return the table over data sets; nothing where no language is known."""
    rows = prompt_rows(results)
    if not rows:
        return []
    headings = ("data set", "median", "9 in 10", "longest", "language of the users' turns: prompts")
    return [markup.table("The prompts, in tokens, and their languages", headings, rows)]


def prompt_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row for each data set whose languages were told, the most common ones first."""
    rows = list[tuple[str, ...]]()
    for dataset in results.datasets:
        told = results.metrics.get(f"prepare-{dataset}", {})
        found = [(n, k.removeprefix(_LANGUAGE)) for k, n in told.items() if k.startswith(_LANGUAGE)]
        words = ", ".join(f"{name} {number(n)}" for n, name in sorted(found, key=_most_first))
        if words:
            rows.append((dataset, *(number(told.get(name)) for name in _LENGTHS), words))
    return rows


def _most_first(counted: tuple[int, str]) -> tuple[int, str]:
    return -counted[0], counted[1]
