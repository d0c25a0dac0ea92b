"""The bill against the rebuilt ids, the truth where it is known, and lengths. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from eyas.records import Sample, Violation
from eyas.tokens.rebuild import WITNESS_REFUSED, Evidence, Rebuilt

Metrics = dict[str, float | int]


def _mode(values: Iterable[int]) -> int:
    """Return the most common value; of several the one nearest to 0, then the smaller."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], abs(value), value))


def bill_metrics(rebuilt: Sequence[Rebuilt]) -> Metrics:
    """Return how the rebuilt ids stand against the bill; nothing where nobody was billed."""
    evidence = [r.evidence for r in rebuilt if r.evidence is not None]
    if not evidence:
        return {}
    billed, made, offsets = (
        sum(getattr(e, name) for e in evidence)
        for name in ("billed_tokens", "rebuilt_tokens", "offset")
    )
    deltas: dict[str, list[int]] = defaultdict(list)
    for e in evidence:
        deltas[e.provider].append(e.billed_tokens - e.rebuilt_tokens)
    modes = {f"offset_mode_tokens_{word_of(p)}": _mode(d) for p, d in sorted(deltas.items())}
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
    told = any(e.refused is not None for _, e in known)
    by_text = [e.identical if e.refused is None else e.text_identical for _, e in known]
    return {
        "replies_of_known_ids": len(known),
        "identical_share": _share(bool(e.identical) for _, e in known),
        "kept_identical_share": _share(bool(e.identical) for e in kept),
        "identical_token_share": _token_share([e for _, e in known]),
        "kept_identical_token_share": _token_share(kept),
        "mismatches_caught": len(wrong) - silent,
        "silent_mismatches": silent,
        **({"text_identical_share": _share(map(bool, by_text))} if told else {}),
    }


def witness_metrics(rebuilt: Sequence[Rebuilt]) -> Metrics:
    """Return of how many replies the token texts gave the ids; nothing where none was rebuilt."""
    held = [r.evidence.refused for r in rebuilt if r.evidence is not None]
    if not held:
        return {}
    witnessed = _share(reason == "" for reason in held)
    return {"witnessed_share": witnessed, "witness_refused": sum(map(bool, held))}


def mismatches(rebuilt: Rebuilt) -> list[Violation]:
    """Return why a reply's ids are not those really sampled, and why its token texts are not used.

    A flag if its count does not show it. Nothing where the ids are the same or the true ones are
    not known, and the token texts were taken or did not come.
    """
    evidence, result = rebuilt.evidence, rebuilt.result
    if evidence is None:
        return []
    rule = "caught_by_the_count" if evidence.count_delta else "silent"
    severity = "reject" if isinstance(result, Violation) else "flag"
    told = ((rule, evidence.difference), (WITNESS_REFUSED, evidence.refused))
    return [
        Violation(id=result.id, dataset=result.dataset, rule=r, detail=detail, severity=severity)
        for r, detail in told
        if detail
    ]


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
