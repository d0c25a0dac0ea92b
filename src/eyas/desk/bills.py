"""The providers' table of the report: whose replies were kept, and how the bill compares. Pure."""

import re

from eyas.desk import markup
from eyas.desk.results import Results
from eyas.desk.words import number, percent

_REPLIES = re.compile(r"provider_(?P<provider>\w+)_replies")
_COUNTS = ("replies", "exact", "near", "rejected")
_RATES = ("offset_tokens", "billing_difference_percent")


def bill_table(results: Results) -> list[str]:
    """Return the table over data sets and providers; nothing where nobody was billed."""
    rows = bill_rows(results)
    if not rows:
        return []
    headings = (
        "data set: provider",
        "replies",
        "exact",
        "near",
        "rejected",
        "k",
        "bill differs by",
    )
    words = (
        "Replies are rebuilt from text and held against the tokens billed. Exact: the counts are "
        "the same, but for k tokens that the provider bills with every reply beyond its own. "
        "What was found of each provider: `data/samples/*.providers.json`."
    )
    return [markup.paragraph(words), markup.table("Providers and their bills", headings, rows)]


def bill_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row for each provider of each data set, and one over all."""
    rows: list[tuple[str, ...]] = []
    sums = dict.fromkeys(_COUNTS, 0)
    for dataset in results.datasets:
        metrics = results.metrics.get(f"validate-{dataset}", {})
        for provider in [m["provider"] for name in metrics if (m := _REPLIES.fullmatch(name))]:
            told = {name: metrics[f"provider_{provider}_{name}"] for name in (*_COUNTS, *_RATES)}
            k, difference = (told[name] for name in _RATES)
            sums = {name: sums[name] + told[name] for name in _COUNTS}
            counts = (number(told[name]) for name in _COUNTS)
            title = f"{dataset}: {provider.replace('_', ' ')}"
            rows.append((title, *counts, number(k), percent(difference / 100, 2)))
    total = (markup.TOTAL, *map(number, sums.values()), "", percent(_difference(results), 2))
    return [*rows, total] if rows else []


def _difference(results: Results) -> float | None:
    """Return the share by which the bill differs over all data sets, weighed by tokens billed."""
    known = [
        (results.of("reconstruct", d, "billed_tokens") or 0, difference / 100)
        for d in results.datasets
        if (difference := results.of("validate", d, _RATES[1])) is not None
    ]
    billed = sum(tokens for tokens, _ in known)
    return sum(tokens * share for tokens, share in known) / billed if billed else None
