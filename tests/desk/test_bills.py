"""The providers' table."""

from typing import Any

from eyas.desk.bills import bill_rows, bill_table
from eyas.desk.results import Results


def provider(name: str, *numbers: float) -> dict[str, float]:
    names = ("replies", "exact", "near", "rejected", "offset_tokens", "billing_difference_percent")
    return {f"provider_{name}_{n}": v for n, v in zip(names, numbers, strict=True)}


def results(**metrics: dict[str, Any]) -> Results:
    by_stage = {name.replace("_", "-"): values for name, values in metrics.items()}
    return Results(metrics=by_stage, evaluation=None, datasets=("chat", "code", "old"))


def test_every_provider_has_a_row_and_the_last_is_over_all() -> None:
    given = results(
        validate_chat=provider("acme_ai", 1200, 1100, 40, 60, -1, 0.04)
        | provider("bolt", 20, 0, 0, 20, 0, 0.0)
        | {"billing_difference_percent": 0.03},
        validate_code=provider("acme_ai", 10, 10, 0, 0, 1, -0.5)
        | {"billing_difference_percent": -0.5},
        validate_old={"rows_in": 3},
        reconstruct_chat={"billed_tokens": 9000},
        reconstruct_code={"billed_tokens": 1000},
    )
    assert bill_rows(given) == [
        ("chat: acme ai", "1,200", "1,100", "40", "60", "-1", "0.04 %"),
        ("chat: bolt", "20", "0", "0", "20", "0", "0.00 %"),
        ("code: acme ai", "10", "10", "0", "0", "1", "-0.50 %"),
        ("all", "1,230", "1,110", "40", "80", "", "-0.02 %"),
    ]
    assert "Providers and their bills" in "".join(bill_table(given))


def test_where_nobody_was_billed_there_is_no_table() -> None:
    assert bill_table(results(validate_chat={"rows_in": 3})) == []
