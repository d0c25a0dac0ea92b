"""What the mixture takes: tokens, bytes and hours of each data set, and of all without it. Pure.

How many bytes and hours so many tokens take, the caller says: the states wing knows, this one does
not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.records import Sample

Cost = Callable[["Extent"], float]  # bytes of the states
Rate = Callable[[int], float | None]  # hours of so many tokens; None: nothing was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much there is of something; extents add up."""

    samples: int = 0
    tokens: int = 0
    supervised: int = 0  # tokens inside replies
    final_rows: int = 0  # tokens whose final state the loss reads

    def __add__(self, other: "Extent") -> "Extent":
        return Extent(
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            supervised=self.supervised + other.supervised,
            final_rows=self.final_rows + other.final_rows,
        )

    def __sub__(self, other: "Extent") -> "Extent":
        return Extent(
            samples=self.samples - other.samples,
            tokens=self.tokens - other.tokens,
            supervised=self.supervised - other.supervised,
            final_rows=self.final_rows - other.final_rows,
        )


def metered(
    samples: Iterable[Sample], found: dict[str, Extent], final_rows: Callable[[Sample], int]
) -> Iterator[Sample]:
    """Yield the samples, adding up in `found` how much there is of each data set."""
    for sample in samples:
        one = Extent(
            samples=1,
            tokens=len(sample.input_ids),
            supervised=sum(end - start for start, end in sample.spans),
            final_rows=final_rows(sample),
        )
        found[sample.dataset] = found.get(sample.dataset, Extent()) + one
        yield sample


def project(
    valid: Mapping[str, Extent], mixed: Mapping[str, Extent], costs: Mapping[str, Cost], rate: Rate
) -> dict[str, Any]:
    """Return the table: each data set of `valid`, what the mixture has of it, and all without it.

    `valid` is what there is before caps, cuts and drops; `mixed` is what these leave.
    """

    def figures(extent: Extent) -> dict[str, Any]:
        return {
            "samples": extent.samples,
            "tokens": extent.tokens,
            "supervised_share": round(extent.supervised / max(1, extent.tokens), 4),
            "bytes": {codec: round(cost(extent)) for codec, cost in costs.items()},
            "hours": rate(extent.tokens),
        }

    everything = sum(mixed.values(), Extent())
    rows = {
        name: {
            "valid": figures(extent),
            "mixture": figures(mixed.get(name, Extent())),
            "all_without": figures(everything - mixed.get(name, Extent())),
        }
        for name, extent in valid.items()
    }
    total = {"valid": figures(sum(valid.values(), Extent())), "mixture": figures(everything)}
    return {"datasets": rows, "all": total}
