"""The bill against the rebuilt ids, and lengths. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eyas.records import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAudit:
    """One provider's bill: tokens billed and rebuilt, and the most common difference a reply."""

    replies: int
    billed_tokens: int
    rebuilt_tokens: int
    offset_mode: int

    @property
    def difference_share(self) -> float:
        """(billed - rebuilt) / billed; 0 for an empty bill."""
        return (self.billed_tokens - self.rebuilt_tokens) / max(1, self.billed_tokens)


def audit_by_provider(samples: Iterable[Sample]) -> dict[str, ProviderAudit]:
    """Compare completion tokens billed and rebuilt; samples that nobody billed are left out."""
    pairs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for sample in samples:
        if sample.completion_tokens_billed is not None:
            rebuilt = sum(end - start for start, end in sample.spans)
            pairs[sample.provider].append((sample.completion_tokens_billed, rebuilt))
    return {
        provider: ProviderAudit(
            replies=len(rows),
            billed_tokens=sum(b for b, _ in rows),
            rebuilt_tokens=sum(r for _, r in rows),
            offset_mode=Counter(b - r for b, r in rows).most_common(1)[0][0],
        )
        for provider, rows in sorted(pairs.items())
    }


def length_metrics(name: str, lengths: Sequence[int]) -> dict[str, float | int]:
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
