"""The training mixture: caps, cuts, a seeded order, a split by conversation. Pure."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from eyas.records import Sample
from eyas.settings import Merge
from eyas.tokens.rebuild import HALF_CHARACTER, TRUNCATED

_BYTES_A_TOKEN = 16  # ids and masks beside the states, as the peers store them


@dataclass(slots=True)
class Mixture:
    """The result; rows_in = train + val + rejects."""

    rows_in: int = 0
    train: list[Sample] = field(default_factory=list)
    val: list[Sample] = field(default_factory=list)
    rejects: dict[str, int] = field(default_factory=dict)
    cut: int = 0  # samples that lost replies to `max_tokens`

    def reject(self, reason: str, count: int = 1) -> None:
        """Count rows that are left out."""
        if count:
            self.rejects[reason] = self.rejects.get(reason, 0) + count


def mix(sources: Mapping[str, Iterable[Sample]], settings: Merge) -> Mixture:
    """Mix the samples of `sources`, in an order that the seed and their own order fix."""
    result = Mixture()
    for name, samples in sources.items():
        rows = list(samples)
        result.rows_in += len(rows)
        random.Random(f"{settings.seed} {name}").shuffle(rows)
        kept = rows[: settings.caps.get(name, len(rows))]
        result.reject("over_cap", len(rows) - len(kept))
        for sample in kept:
            _place(sample, settings, result)
    random.Random(settings.seed).shuffle(result.train)
    random.Random(settings.seed).shuffle(result.val)
    return result


def _place(sample: Sample, settings: Merge, result: Mixture) -> None:
    short = cut_at_reply(sample, settings.max_tokens)
    if short is None:
        result.reject("too_long")
        return
    result.cut += short is not sample
    side = result.val if is_val(sample.conversation, settings.val_permille) else result.train
    side.append(short)


def cut_at_reply(sample: Sample, max_tokens: int) -> Sample | None:
    """Drop whole replies from the end until the sample fits; None if the first does not."""
    if len(sample.input_ids) <= max_tokens:
        return sample
    spans = tuple(span for span in sample.spans if span[1] <= max_tokens)
    if not spans:
        return None
    flags = tuple(flag for flag in sample.flags if flag not in (TRUNCATED, HALF_CHARACTER))
    return replace(sample, input_ids=sample.input_ids[: spans[-1][1]], spans=spans, flags=flags)


def is_val(conversation: str, permille: int) -> bool:
    """Tell whether a conversation belongs to the validation split, by hash."""
    bits = int.from_bytes(hashlib.sha256(f"val {conversation}".encode()).digest()[:4], "big")
    return bits * 1000 < permille << 32


def projection(samples: Iterable[Sample], hidden_size: int) -> dict[str, int | float]:
    """Return samples, tokens, supervised share, and bytes of four bfloat16 states a token."""
    count = tokens = supervised = 0
    for sample in samples:
        count += 1
        tokens += len(sample.input_ids)
        supervised += sum(end - start for start, end in sample.spans)
    return {
        "samples": count,
        "tokens": tokens,
        "supervised_share": round(supervised / max(1, tokens), 4),
        "states_bytes": tokens * (8 * hidden_size + _BYTES_A_TOKEN),
    }
