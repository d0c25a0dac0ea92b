"""What a training run does in which order: its steps, the runs of a soup, the learning rate."""

import math
from collections.abc import Sequence
from itertools import pairwise

from eyas.drafter.packing import plan_epoch
from eyas.errors import EyasError
from eyas.settings import Train


def plan_run(
    lengths: list[int], settings: Train, windows: Sequence[int] = ()
) -> list[tuple[int, list[int]]]:
    """Return (epoch, document indices) of every optimiser step, each epoch in its own order.

    Raises: EyasError if there are no documents.
    """
    if not lengths:
        raise EyasError(
            "train: expected samples with supervised tokens, got none",
            hint="see the reject reasons of validate, and merge.sources",
        )
    return [
        (epoch, documents)
        for epoch in range(1, settings.epochs + 1)
        for documents in plan_epoch(
            lengths, settings.tokens_per_step, settings.seed + epoch, windows
        )
    ]


def parts_of(epochs: list[int], settings: Train) -> list[range]:
    """Return the steps of each run of the soup, given the epoch of every step.

    Raises: EyasError unless each run has as many epochs.
    """
    if settings.soup < 1 or settings.epochs % settings.soup:
        raise EyasError(
            f"train.soup: expected a divisor of train.epochs ({settings.epochs}), "
            f"got {settings.soup}",
            hint="each run of the soup has epochs / soup epochs; 1 is a run as usual",
        )
    each = settings.epochs // settings.soup
    ends = [sum(epoch <= each * part for epoch in epochs) for part in range(settings.soup + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def rate_at(step: int, total: int, warmup_ratio: float) -> float:
    """Return the learning rate's factor: linear warm-up, then a half cosine to 0.

    The first of 4 warm-up steps has 1/4; the factor reaches 1 on the last of them.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
