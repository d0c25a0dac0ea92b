"""Accounts of providers."""

from collections.abc import Callable
from typing import Any

from eyas.records import Sample, Violation
from eyas.tokens.ledger import (
    account_metrics,
    difference_percent,
    open_accounts,
    rejected_providers,
)
from eyas.tokens.providers import Seen, find_rule
from eyas.tokens.rebuild import Evidence, Rebuilt

MakeSample = Callable[..., Sample]


def evidence(billed: int, rebuilt: int, offset: int = 0) -> Evidence:
    return Evidence(
        provider="Acme AI",
        billed_tokens=billed,
        rebuilt_tokens=rebuilt,
        count_delta=billed - offset - rebuilt,
        prompt_delta=0,
        half_character=False,
        identical=None,
        offset=offset,
    )


def lost(rule: str) -> Violation:
    return Violation(id="p", dataset="chat", rule=rule, detail="")


def rows_of(make_sample: MakeSample) -> list[tuple[str, Rebuilt]]:
    exact, near = make_sample(provider="Acme AI"), make_sample(provider="Acme AI", flags=("near",))
    return [
        ("Acme AI", Rebuilt(result=exact, evidence=evidence(101, 100, 1))),
        ("Acme AI", Rebuilt(result=near, evidence=evidence(52, 50, 1))),
        ("Acme AI", Rebuilt(result=lost("count_mismatch"), evidence=evidence(47, 49, 1))),
        ("Acme AI", Rebuilt(result=lost("finish_reason"))),
        ("Bolt", Rebuilt(result=lost("provider_template"), evidence=evidence(0, 0))),
    ]


def rejecting() -> dict[str, Any]:
    one = Seen(finished=True, billed=9, prompt_delta=30, counts={"given": 9})
    return {"Bolt": find_rule("Bolt", [one] * 20)}


def test_every_row_stands_in_its_providers_account(make_sample: MakeSample) -> None:
    accounts = open_accounts(rows_of(make_sample), rejecting())
    assert list(accounts) == ["Acme AI", "Bolt"]
    acme = accounts["Acme AI"]
    assert (acme["replies"], acme["exact"], acme["near"]) == (4, 1, 1)
    assert acme["rejected"] == {"count_mismatch": 1, "finish_reason": 1}
    assert (acme["billed_tokens"], acme["offset_tokens"], acme["rebuilt_tokens"]) == (200, 3, 199)
    assert "evidence" not in acme
    assert difference_percent([acme]) == -1.0
    (name,) = rejected_providers(accounts)
    assert (name, accounts["Bolt"]["evidence"]["prompt_deltas"]) == ("Bolt", {"+30": 20})


def test_after_validation_replies_are_exact_near_or_rejected(make_sample: MakeSample) -> None:
    accounts = open_accounts(rows_of(make_sample), rejecting())
    metrics = account_metrics(accounts, [make_sample(provider="Acme AI")])
    assert metrics == {
        "billing_difference_percent": -1.0,
        "providers_rejected": 1,
        "provider_acme_ai_replies": 4,
        "provider_acme_ai_exact": 1,
        "provider_acme_ai_near": 0,
        "provider_acme_ai_rejected": 3,
        "provider_acme_ai_offset_tokens": 0,
        "provider_acme_ai_billing_difference_percent": -1.0,
        "provider_bolt_replies": 1,
        "provider_bolt_exact": 0,
        "provider_bolt_near": 0,
        "provider_bolt_rejected": 1,
        "provider_bolt_offset_tokens": 0,
        "provider_bolt_billing_difference_percent": 0.0,
    }


def test_where_nobody_answered_there_is_no_account() -> None:
    assert open_accounts([], {}) == {}
    assert account_metrics({}, []) == {}
    assert difference_percent([]) == 0.0
