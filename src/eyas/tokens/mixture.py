"""The training mixture: caps, cuts, a seeded order, a split by conversation. Pure.

A data set's samples are shuffled, then each rule takes from what the one before has left:

    weight 0.5     the first half of the rows          what is over counts as `over_weight`
    cap 1000       the first 1000 of these             `over_cap`
    max_tokens     cut at a reply's end, or rejected   `too_long`
    token cap      rows as long as their sum fits      `over_token_cap`
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from eyas.errors import EyasError
from eyas.records import Sample
from eyas.settings import Merge
from eyas.tokens.rebuild import HALF_CHARACTER, TRUNCATED


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


def check_names(settings: Merge) -> None:
    """Refuse rules for data sets that are no source, and weights that are no share.

    Raises: EyasError naming the option.
    """
    named = {
        "caps": settings.caps,
        "token_caps": settings.token_caps,
        "weights": settings.weights,
        "drop": settings.drop,
    }
    for option, names in named.items():
        if strangers := sorted(set(names) - set(settings.sources)):
            raise EyasError(f"merge.{option}: '{strangers[0]}' is not in merge.sources")
    for name, weight in settings.weights.items():
        if not 0 < weight <= 1:
            raise EyasError(
                f"merge.weights.{name}: expected a share of the rows, over 0 and at most 1, "
                f"got {weight}",
                hint="rows are never repeated; name a set in merge.drop to leave it out",
            )


def mix(sources: Mapping[str, Iterable[Sample]], settings: Merge) -> Mixture:
    """Mix the samples of `sources`, in an order that the seed and their own order fix."""
    result = Mixture()
    for name, samples in sources.items():
        rows = list(samples)
        result.rows_in += len(rows)
        if name in settings.drop:
            result.reject("dropped_set", len(rows))
            continue
        random.Random(f"{settings.seed} {name}").shuffle(rows)
        for sample in _within_tokens(_chosen(rows, name, settings, result), name, settings, result):
            val = is_val(sample.conversation, settings.val_permille)
            (result.val if val else result.train).append(sample)
    random.Random(settings.seed).shuffle(result.train)
    random.Random(settings.seed).shuffle(result.val)
    return result


def _chosen(rows: list[Sample], name: str, settings: Merge, result: Mixture) -> Iterator[Sample]:
    """Yield the rows under weight and cap, short enough."""
    share = round(settings.weights.get(name, 1.0) * len(rows))
    result.reject("over_weight", len(rows) - share)
    kept = rows[:share][: settings.caps.get(name, share)]
    result.reject("over_cap", share - len(kept))
    for sample in kept:
        short = cut_at_reply(sample, settings.max_tokens)
        if short is None:
            result.reject("too_long")
            continue
        result.cut += short is not sample
        yield short


def _within_tokens(
    rows: Iterable[Sample], name: str, settings: Merge, result: Mixture
) -> Iterator[Sample]:
    """Yield rows up to the first that goes over the token cap.

    Later rows that would still fit are left out too: choosing by length would favour short ones.
    """
    cap, tokens, full = settings.token_caps.get(name), 0, False
    for sample in rows:
        tokens += len(sample.input_ids)
        full = full or (cap is not None and tokens > cap)
        if full:
            result.reject("over_token_cap")
        else:
            yield sample


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
