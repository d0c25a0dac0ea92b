"""Where the time of training goes: seconds by kind of work, which cost nothing to measure.

A GPU works behind the program: there a reading is an event in its queue, and readings become
seconds once they are many, or asked for. So a share is that of the GPU's time: what it computes, or
what it waits for.
"""

import contextlib
import time
from collections.abc import Generator

import torch

# exchange: with other ranks, waiting for them included
_OF_A_STEP = ("fetch", "forward", "backward", "exchange", "optimiser")
KINDS = (*_OF_A_STEP, "evaluate", "save")
_QUEUED = 1000  # pairs of readings that wait to be read


class Clock:
    """Adds up what each kind of work took."""

    def __init__(self, *, cuda: bool = False) -> None:
        self.tokens = 0  # trained on
        self._cuda, self._busy = cuda, False
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._queue: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def timed(self, kind: str) -> Generator[None]:
        """Count the time of a block; within another such block it is the outer's."""
        if self._busy:
            yield
            return
        self._busy = True
        begin_s, begin = time.monotonic(), self._event()
        try:
            yield
        finally:
            self._busy = False
        if (end := self._event()) and begin:
            self._queue.append((kind, begin, end))
        else:
            self._seconds[kind] += time.monotonic() - begin_s
        if len(self._queue) >= _QUEUED:
            self.seconds()

    def _event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind that has been at work."""
        for kind, begin, end in self._queue:
            end.synchronize()
            self._seconds[kind] += begin.elapsed_time(end) / 1000
        self._queue.clear()
        return {kind: spent for kind, spent in self._seconds.items() if spent}

    def shares(self) -> dict[str, float]:
        """Return the share of each kind in the time of all."""
        seconds = self.seconds()
        return {kind: round(spent / sum(seconds.values()), 3) for kind, spent in seconds.items()}

    def figures(self) -> dict[str, float]:
        """Return the seconds of all, and the tokens a second of the steps; nothing of no step."""
        seconds = self.seconds()
        steps_s = sum(seconds.get(kind, 0.0) for kind in _OF_A_STEP)
        if not steps_s:
            return {}
        return {
            "train_wall_s": round(sum(seconds.values()), 1),
            "tokens_per_s": round(self.tokens / steps_s, 1),
        }
