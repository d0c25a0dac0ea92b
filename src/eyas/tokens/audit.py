"""The bill against the rebuilt ids, the truth where it is known, and lengths. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eyas.records import Sample, Violation
from eyas.tokens.rebuild import Evidence, Rebuilt

Metrics = dict[str, float | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAudit:
    """One provider's bill: tokens billed and rebuilt, and the most common difference a reply."""

    replies: int
    billed_tokens: int
    rebuilt_tokens: int
    offset_mode: int  # tokens a reply, billed - rebuilt; not 0: the provider counts otherwise

    @property
    def difference_share(self) -> float:
        """(billed - rebuilt) / billed; 0 for an empty bill."""
        return (self.billed_tokens - self.rebuilt_tokens) / max(1, self.billed_tokens)


def audit_by_provider(evidence: Iterable[Evidence]) -> dict[str, ProviderAudit]:
    """Compare completion tokens billed and rebuilt, over all replies: also those not kept."""
    seen: dict[str, list[Evidence]] = defaultdict(list)
    for one in evidence:
        seen[one.provider].append(one)
    return {
        provider: ProviderAudit(
            replies=len(rows),
            billed_tokens=sum(e.billed_tokens for e in rows),
            rebuilt_tokens=sum(e.rebuilt_tokens for e in rows),
            offset_mode=_mode(e.billed_tokens - e.rebuilt_tokens for e in rows),
        )
        for provider, rows in sorted(seen.items())
    }


def _mode(values: Iterable[int]) -> int:
    """Return the most common value; of several the one nearest to 0, then the smaller."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], abs(value), value))


def bill_metrics(rebuilt: Sequence[Rebuilt]) -> Metrics:
    """Return how the rebuilt ids stand against the bill; nothing where nobody was billed."""
    evidence = [r.evidence for r in rebuilt if r.evidence is not None]
    if not evidence:
        return {}
    audits = audit_by_provider(evidence)
    billed = sum(a.billed_tokens for a in audits.values())
    made = sum(a.rebuilt_tokens for a in audits.values())
    offsets = sum(e.offset for e in evidence)
    modes = {f"offset_mode_tokens_{word_of(p)}": a.offset_mode for p, a in audits.items()}
    return {
        "billed_tokens": billed,
        "rebuilt_tokens": made,
        "billing_difference_share": round((billed - offsets - made) / max(1, billed), 6),
        "count_exact_share": _share(e.count_delta == 0 for e in evidence),
        "prompt_exact_share": _share(e.prompt_delta == 0 for e in evidence),
        **modes,
    }


def truth_metrics(rebuilt: Sequence[Rebuilt]) -> Metrics:
    """Return how the rebuilt ids stand against those really sampled; nothing where unknown.

    `mismatches_caught` are replies whose ids are not those sampled and whose count shows it;
    `silent_mismatches` have the right count and other ids. `kept_identical_share` is what counts
    for training: the share among the samples that were kept. The token shares align each reply with
    the one sampled: in a reply of 100 tokens of which two are spelled as one, 98 are the same.
    """
    pairs = [(r.result, r.evidence) for r in rebuilt if r.evidence is not None]
    known = [(result, e) for result, e in pairs if e.identical is not None]
    if not known:
        return {}
    wrong = [e for _, e in known if not e.identical]
    silent = sum(e.count_delta == 0 for e in wrong)
    kept = [e for result, e in known if isinstance(result, Sample)]
    return {
        "replies_of_known_ids": len(known),
        "identical_share": _share(bool(e.identical) for _, e in known),
        "kept_identical_share": _share(bool(e.identical) for e in kept),
        "identical_token_share": _token_share([e for _, e in known]),
        "kept_identical_token_share": _token_share(kept),
        "mismatches_caught": len(wrong) - silent,
        "silent_mismatches": silent,
    }


def mismatch(rebuilt: Rebuilt) -> Violation | None:
    """Return why a reply's ids are not those really sampled; a flag if its count does not show it.

    None where they are the same or the true ones are not known.
    """
    evidence, result = rebuilt.evidence, rebuilt.result
    if evidence is None or evidence.identical is not False:
        return None
    caught = evidence.count_delta != 0
    return Violation(
        id=result.id,
        dataset=result.dataset,
        rule="caught_by_the_count" if caught else "silent",
        detail=evidence.difference,
        severity="reject" if isinstance(result, Violation) else "flag",
    )


def length_metrics(name: str, lengths: Sequence[int]) -> Metrics:
    """Return total, mean, median, 90th percentile and maximum of token counts."""
    if not lengths:
        return {f"{name}_tokens": 0}
    ordered = sorted(lengths)
    return {
        f"{name}_tokens": sum(ordered),
        f"{name}_tokens_mean": round(sum(ordered) / len(ordered), 2),
        f"{name}_tokens_p50": ordered[len(ordered) // 2],
        f"{name}_tokens_p90": ordered[int(0.9 * (len(ordered) - 1))],
        f"{name}_tokens_max": ordered[-1],
    }


def _share(values: Iterable[bool]) -> float:
    held = list(values)
    return round(sum(held) / len(held), 6) if held else 0.0


def _token_share(evidence: Sequence[Evidence]) -> float:
    sampled = sum(e.sampled_tokens for e in evidence)
    return round(sum(e.same_tokens for e in evidence) / sampled, 6) if sampled else 0.0


def word_of(name: str) -> str:
    """Return a provider's name as part of a metric's name."""
    return "".join(c if c.isalnum() else "_" for c in name.lower())
