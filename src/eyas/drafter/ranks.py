"""Ranks: processes that share the documents of every training step, started by torchrun.

Without torchrun there is one rank and nothing here does anything. Sums come back with the same bits
on every rank, so all of them hold the same weights; rank 0 leads: it alone writes.
Source: the environment that torchrun sets, `python -m torch.distributed.run --help`.
"""

import contextlib
import os
from collections.abc import Generator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from eyas.errors import EyasError

_PATIENCE = timedelta(hours=1)  # between ranks; one that has died is noticed at once


def launched() -> bool:
    """Tell whether torchrun has started this process."""
    return dist.is_torchelastic_launched()


def leads() -> bool:
    """Tell whether this is the rank that writes."""
    return not launched() or os.environ["RANK"] == "0"


def size() -> int:
    """Return the number of ranks that have joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def joined() -> Generator[None]:
    """Join the other ranks: gloo between CPUs; NCCL between GPUs, one for each rank.

    Raises: EyasError if a machine has fewer GPUs than ranks.
    """
    if not launched():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if here > gpus:
            raise EyasError(
                f"train: expected a GPU for each of {here} ranks on this machine, got {gpus}",
                hint=f"torchrun --nproc-per-node {gpus}",
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def share(documents: list[int], lengths: Sequence[int]) -> list[int]:
    """Return this rank's documents of a step, in their order; they may be none.

    The longest goes first to whoever has the fewest tokens: all ranks find the same shares.
    """
    if size() == 1:
        return documents
    tokens, owner = [0] * size(), dict[int, int]()
    for index in sorted(documents, key=lambda index: -lengths[index]):
        owner[index] = tokens.index(min(tokens))
        tokens[owner[index]] += lengths[index]
    return [index for index in documents if owner[index] == dist.get_rank()]


@contextlib.contextmanager
def together() -> Generator[None]:
    """Do with all ranks what needs them all.

    Raises: EyasError if another rank has ended.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, and this rank's own
    except RuntimeError as error:
        raise EyasError(
            f"train: rank {dist.get_rank()} has lost another of {size()} ranks "
            f"({str(error).split('. ')[0]})",
            hint="its own message says why; the last checkpoint is kept, run the same again",
        ) from error


def all_sum(values: Tensor) -> Tensor:
    """Return the sum over the ranks, in place.

    Raises: EyasError if another rank has ended.
    """
    if size() > 1:
        with together():
            dist.all_reduce(values)
    return values


def leader_says(value: bool) -> bool:
    """Return the leading rank's value on every rank."""
    return bool(all_sum(torch.tensor(float(value and leads()))))


def wait_for_all() -> None:
    """Return when every rank has come here."""
    all_sum(torch.zeros(1))


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace every gradient by its sum over the ranks, in one exchange; none counts as zeros."""
    if size() == 1:
        return
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = all_sum(torch.cat([gradient.flatten() for gradient in own]))
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)


def agree(parameters: Sequence[Tensor], step: int) -> None:
    """Give every rank the weights of rank 0.

    Raises: EyasError if the ranks have not gone on from one checkpoint.
    """
    steps = all_sum(torch.tensor([step, step * step]))
    if int(steps[0]) ** 2 != int(steps[1]) * size():  # equality of Cauchy and Schwarz
        raise EyasError(
            f"train: expected all ranks at one step, got {step} and others",
            hint="ranks on several machines need one working folder",
        )
    for parameter in parameters if size() > 1 else ():
        dist.broadcast(parameter.detach(), src=0)
