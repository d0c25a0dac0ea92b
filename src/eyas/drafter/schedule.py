"""The order and length of a training run: steps, epochs, rates, when to stop.

A soup is `settings.soup` runs of `settings.epochs` epochs from the same start, each in other
orders, whose weights are averaged (arXiv 2203.05482); 1 is a run as usual.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from eyas.drafter import ranks
from eyas.drafter.packing import plan_epoch
from eyas.errors import EyasError
from eyas.settings import Train

Row = dict[str, Any]  # of the curve: split, step, epoch and figures
AUTO = "auto"
_DTYPES = ("float32", "bfloat16", "float64")  # the last for exact comparisons
_LENGTH = "simulated_acceptance_length"


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
        for epoch in range(1, settings.epochs * settings.soup + 1)
        for documents in plan_epoch(
            lengths, settings.tokens_per_step, settings.seed + epoch, windows
        )
    ]


def parts_of(epochs: Sequence[int], settings: Train) -> list[range]:
    """Return the steps of each run of the soup, given the epoch of every step."""
    ends = [
        sum(epoch <= settings.epochs * part for epoch in epochs)
        for part in range(settings.soup + 1)
    ]
    return [range(begin, end) for begin, end in pairwise(ends)]


def rate_at(step: int, total: int, warmup_ratio: float) -> float:
    """Return the learning rate's factor: linear warm-up, then a half cosine to 0.

    The first of 4 warm-up steps has 1/4; the factor reaches 1 on the last of them.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def best_epoch(curve: Sequence[Row]) -> int:
    """Return the epoch after which the validation split accepted most; of equals the first.

    0, the start, if there is no validation row.
    """
    checks = [row for row in curve if row["split"] == "val"]
    return max(checks, key=lambda row: row[_LENGTH])["epoch"] if checks else 0


def has_stalled(curve: Sequence[Row], patience: int | None) -> bool:
    """Tell whether so many epochs in a row have brought no longer acceptance than the best."""
    checks = [row["epoch"] for row in curve if row["split"] == "val"]
    return patience is not None and bool(checks) and checks[-1] - best_epoch(curve) >= patience


def check_length(settings: Train, num_val: int) -> None:
    """Refuse a length that cannot be run; `num_val`: documents of the validation split.

    Raises: EyasError.
    """
    for name, value in (("epochs", settings.epochs), ("soup", settings.soup)):
        if value < 1:
            raise EyasError(f"train.{name}: expected at least 1, got {value}")
    if settings.patience is None:
        return
    if settings.patience < 1:
        raise EyasError(f"train.patience: expected null or at least 1, got {settings.patience}")
    if settings.soup > 1:
        raise EyasError(
            f"train.patience: expected null with train.soup {settings.soup}, "
            f"got {settings.patience}",
            hint="runs of a soup are averaged at their ends; train.soup=1 may stop early",
        )
    if not num_val:
        raise EyasError(
            f"train.patience: got {settings.patience}, and the validation split is empty",
            hint="raise merge.val_share, or patience: null",
        )


def with_dtype(settings: Train) -> Train:
    """Return the settings with `auto` put as the type that multiplies fastest here.

    Of several ranks the leading one's machine decides.
    """
    if settings.dtype != AUTO:
        return settings
    cuda, processor = torch.cuda, torch.cpu.get_capabilities()
    able = cuda.is_bf16_supported() if cuda.is_available() else processor.get("avx512_bf16", False)
    able = ranks.leader_says(bool(able))
    return dataclasses.replace(settings, dtype="bfloat16" if able else "float32")


def dtype_of(settings: Train) -> torch.dtype:
    """Return the type of the products.

    Raises: EyasError if it is none of those that work.
    """
    name = with_dtype(settings).dtype
    if name not in _DTYPES:
        names = ", ".join((AUTO, *_DTYPES))
        raise EyasError(f"train.dtype: expected one of {names}, got {name!r}")
    return getattr(torch, name)
