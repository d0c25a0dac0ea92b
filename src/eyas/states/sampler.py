"""Sample replies of many requests together, each as if it were alone.

A thread decodes a fixed number of rows; a request takes a free row as soon as there is one. Its ids
depend on its own prompt, settings and seed only, never on its neighbours or the order of arrival:
that is what lets a killed generation go on and end with the same replies.
Source: iteration-level scheduling as in Orca (https://www.usenix.org/conference/osdi22/presentation/yu).

Legend: V vocabulary, S slots.
"""

import contextlib
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.states.decoder import Cache, Llama, decode, from_model, prefill

SLOTS = (
    32  # rows of a matrix product; 32 fill the CPU's tiles, and another number may round otherwise
)
GREEDY = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A reply's ids, the stop id included, and why it ended."""

    ids: list[int]
    finish_reason: str  # stop | length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    random: np.random.Generator
    future: "Future[Generated]"
    ids: list[int] = field(default_factory=list)


def pick(logits_V: np.ndarray, temperature: float, top_p: float, draw: float) -> int:
    """Return the id at `draw` in [0, 1) of the nucleus' cumulative distribution, in float64.

    Ids are ordered by falling probability, equal ones by id; the nucleus is the shortest prefix
    that holds `top_p`. An id below (1 - top_p) / V cannot be in it, so only the others are sorted.
    """
    if temperature == GREEDY:
        return int(logits_V.argmax())
    scaled_V = logits_V.astype(np.float64)
    scaled_V = (scaled_V - scaled_V.max()) / temperature
    weights_V = np.exp(scaled_V)
    weights_V /= weights_V.sum()
    candidates = np.flatnonzero(weights_V > (1.0 - top_p) / len(weights_V))
    candidates = candidates[np.argsort(-weights_V[candidates], kind="stable")]
    cumulative = np.cumsum(weights_V[candidates])
    last = min(int(np.searchsorted(cumulative, top_p)), len(candidates) - 1)
    chosen = int(np.searchsorted(cumulative[: last + 1], draw * cumulative[last], side="right"))
    return int(candidates[min(chosen, last)])


class BatchedSampler:
    """A pool of decoding threads over one model; safe to call from any thread.

    Args:
        model: A transformers Llama (`load_model`); its dtype is that of the matrix products.
        slots: Rows decoded together by one thread. Keep it: another number may round otherwise.
        threads: Decoding threads, one core each.
    """

    def __init__(self, model: Any, *, slots: int = SLOTS, threads: int = 1) -> None:
        self._llama = from_model(model)
        self._waiting: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(slots,), name=f"sampler-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Iterable[int],
    ) -> "Future[Generated]":
        """Queue a request; the future holds its reply, or the error that befell it.

        Raises: EyasError for an empty prompt, one too long for the model, or a closed sampler.
        """
        total, limit = len(prompt_ids) + max_new_tokens, self._llama.max_length
        if not prompt_ids or max_new_tokens < 1 or total > limit:
            raise EyasError(
                f"request of {len(prompt_ids)} + {max_new_tokens} tokens: expected both at least 1 "
                f"and together at most {limit}",
                hint="lower max_tokens, or drop long prompts",
            )
        if self._closed.is_set():
            raise EyasError("sampler: closed, takes no more requests")
        future: Future[Generated] = Future()
        self._waiting.put(
            _Request(
                prompt_ids=prompt_ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                stop_ids=frozenset(stop_ids),
                random=np.random.default_rng(seed),
                future=future,
            )
        )
        if self._closed.is_set():  # it closed while the request was on its way
            future.cancel()
        return future

    def close(self) -> None:
        """Stop after the present step; requests without an answer are cancelled."""
        self._closed.set()
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "BatchedSampler":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    @torch.inference_mode()
    def _run(self, slots: int) -> None:
        torch.set_num_threads(1)
        rows = _Rows(self._llama, slots)
        try:
            while not self._closed.is_set():
                self._admit(rows)
                rows.step()
        except Exception as error:  # the worker's boundary: each caller gets the error
            self._closed.set()
            rows.fail(error)
        rows.fail(EyasError("sampler: closed before the reply was complete"))
        self._drain()

    def _drain(self) -> None:
        """Cancel what still waits, then wake the next thread, which ends in the same way."""
        with contextlib.suppress(queue.Empty):
            while True:
                if request := self._waiting.get_nowait():
                    request.future.cancel()
        self._waiting.put(None)

    def _admit(self, rows: "_Rows") -> None:
        """Fill free rows; wait for a request only where no row is busy."""
        while rows.free:
            try:
                request = self._waiting.get(block=not rows.busy)
            except queue.Empty:
                return
            if request is None:
                return
            if request.future.set_running_or_notify_cancel():
                rows.start(request)


class _Rows:
    """The requests of one thread, by row, and their cache."""

    def __init__(self, llama: Llama, slots: int) -> None:
        self._llama, self._cache = llama, Cache(llama, slots)
        self.busy: dict[int, _Request] = {}
        self.free = list(range(slots))
        self._lengths = [0] * slots
        self._last_S = torch.zeros(slots, dtype=torch.long)

    def start(self, request: _Request) -> None:
        """Run a request's prompt and sample its first token."""
        slot = self.free.pop()
        self.busy[slot] = request
        logits_V = prefill(self._llama, self._cache, slot, request.prompt_ids)
        self._lengths[slot] = len(request.prompt_ids)
        self._take(slot, logits_V)

    def step(self) -> None:
        """Sample one more token of every request."""
        if not self.busy:
            return
        logits_SV = decode(self._llama, self._cache, self._last_S, self._lengths)
        for slot in list(self.busy):
            self._lengths[slot] += 1
            self._take(slot, logits_SV[slot])

    def fail(self, error: Exception) -> None:
        """Hand an error to every request."""
        for request in self.busy.values():
            request.future.set_exception(error)
        self.busy.clear()

    def _take(self, slot: int, logits_V: torch.Tensor) -> None:
        request = self.busy[slot]
        draw = request.random.random()
        token = pick(logits_V.numpy(), request.temperature, request.top_p, draw)
        request.ids.append(token)
        self._last_S[slot] = token
        stopped = token in request.stop_ids
        if stopped or len(request.ids) == request.max_new_tokens:
            del self.busy[slot]
            self.free.append(slot)
            self._lengths[slot] = 0
            reason = "stop" if stopped else "length"
            request.future.set_result(Generated(ids=request.ids, finish_reason=reason))
