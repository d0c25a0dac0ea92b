"""Each provider's account: its rule and what that rests on, its rows by verdict, its bill. Pure.

A row is `exact` (its count is what was billed, at the provider's offset), `near` (off by a few
tokens, kept by `validate.keep_near`) or rejected, and then has a reason.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from eyas.records import Sample
from eyas.tokens.audit import Metrics, word_of
from eyas.tokens.providers import Finding
from eyas.tokens.rebuild import NEAR, Rebuilt

Account = dict[str, Any]  # plain JSON: it passes from reconstruct to validate in a file


def open_accounts(
    rows: Iterable[tuple[str, Rebuilt]], findings: Mapping[str, Finding]
) -> dict[str, Account]:
    """Return the account of every provider, from its rows."""
    held: dict[str, list[Rebuilt]] = defaultdict(list)
    for provider, rebuilt in rows:
        held[provider].append(rebuilt)
    return {
        provider: _account(rebuilt)
        | ({"evidence": asdict(findings[provider])} if provider in findings else {})
        for provider, rebuilt in sorted(held.items())
    }


def _account(rows: list[Rebuilt]) -> Account:
    kept = [r.result for r in rows if isinstance(r.result, Sample)]
    reasons = Counter(r.result.rule for r in rows if not isinstance(r.result, Sample))
    bill = [r.evidence for r in rows if r.evidence is not None]
    near = sum(NEAR in sample.flags for sample in kept)
    return {
        "replies": len(rows),
        "exact": len(kept) - near,
        "near": near,
        "rejected": dict(reasons.most_common()),
        "billed_tokens": sum(e.billed_tokens for e in bill),
        "offset_tokens": sum(e.offset for e in bill),
        "rebuilt_tokens": sum(e.rebuilt_tokens for e in bill),
    }


def rejected_providers(accounts: Mapping[str, Account]) -> dict[str, str]:
    """Return the providers none of whose replies can be used, and why."""
    rules = {p: a["evidence"]["rule"] for p, a in accounts.items() if "evidence" in a}
    return {provider: rule["rejected"] for provider, rule in rules.items() if rule["rejected"]}


def difference_percent(accounts: Iterable[Account]) -> float:
    """Return (billed - offsets - rebuilt) / billed, in percent; 0 for an empty bill."""
    held = list(accounts)
    billed, offset, rebuilt = (
        sum(a[f"{name}_tokens"] for a in held) for name in ("billed", "offset", "rebuilt")
    )
    return round(100 * (billed - offset - rebuilt) / max(1, billed), 4)


def account_metrics(accounts: Mapping[str, Account], kept: Iterable[Sample]) -> Metrics:
    """Return the accounts as numbers, after validation: replies = exact + near + rejected."""
    if not accounts:
        return {}
    counts = Counter((s.provider, NEAR in s.flags) for s in kept)
    metrics: Metrics = {
        "billing_difference_percent": difference_percent(accounts.values()),
        "providers_rejected": len(rejected_providers(accounts)),
    }
    for provider, account in accounts.items():
        exact, near = counts[(provider, False)], counts[(provider, True)]
        numbers = {
            "replies": account["replies"],
            "exact": exact,
            "near": near,
            "rejected": account["replies"] - exact - near,
            "offset_tokens": account.get("evidence", {}).get("rule", {}).get("offset", 0),
            "billing_difference_percent": difference_percent([account]),
        }
        metrics |= {f"provider_{word_of(provider)}_{name}": n for name, n in numbers.items()}
    return metrics
