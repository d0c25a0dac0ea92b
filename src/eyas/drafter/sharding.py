"""What the optimiser holds: all of it on every rank, or of each tensor some rows a rank.

Sharded, a rank keeps its rows of the weights, of the summed gradients and of Adam's moments; whole
weights come together for a step and are let go as its gradients are summed. The cut is that of
FSDP2 (torch.distributed.fsdp.fully_shard), DTensors along the first axis, without its hooks: these
gather where a module is called, on all ranks as often. The step by hand calls none, reads every
matrix at every TTT step, and a rank may have more packs of a step than another, or none.
Source: ZeRO, arXiv 1910.02054; what is saved: docs/training_step.md.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from eyas.drafter import ranks
from eyas.drafter.model import Drafter


class Whole:
    """Every rank holds all."""

    def __init__(self, drafter: Drafter) -> None:
        self.parameters = list(drafter.parameters())

    def gather(self) -> None:
        """Make the drafter whole: it is."""

    def release(self) -> None:
        """Let the drafter go: it stays."""

    def reduce(self) -> None:
        """Sum the drafter's gradients over the ranks to where the optimiser takes them."""
        ranks.sum_gradients(self.parameters)


class Sharded:
    """A rank holds its rows: the same functions; `parameters` are what the optimiser steps."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = list(drafter.parameters())
        self._mesh = init_device_mesh(drafter.fc.weight.device.type, (ranks.size(),))
        self.parameters = [nn.Parameter(self.cut(p)) for p in self._drafter]
        self.release()

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of what all ranks hold; numbers stay as they are."""
        if not tensor.ndim:
            return tensor
        cut = distribute_tensor(tensor.detach(), self._mesh, [Shard(0)], src_data_rank=None)
        return cut.clone()  # rows of their own, not a view that keeps the whole

    def gather(self) -> None:
        """Make the drafter whole."""
        for whole, rows in zip(self._drafter, self.parameters, strict=True):
            whole.data = gathered(rows.detach())

    def release(self) -> None:
        """Let the whole weights go."""
        for whole in self._drafter:
            whole.data = whole.data.new_empty(0)

    def reduce(self) -> None:
        """Sum the drafter's gradients over the ranks, each rank its rows; let the weights go."""
        for whole, rows in zip(self._drafter, self.parameters, strict=True):
            own = torch.zeros_like(whole) if whole.grad is None else whole.grad
            with ranks.together():
                parts = DTensor.from_local(own, self._mesh, [Partial()], run_check=False)
                rows.grad = parts.redistribute(placements=[Shard(0)])
            whole.grad = None
        self.release()


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor of which ranks may hold rows whole; all ranks must ask."""
    if not isinstance(tensor, DTensor):
        return tensor
    with ranks.together():
        return tensor.full_tensor()
