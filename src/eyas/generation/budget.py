"""Decide which request may still be sent within a token budget, without ever cancelling one.

A request in flight is billed whole, so room is reserved before it is sent. Its answer's length is
foretold by the answers so far, in the order of admission: the first to finish are the short ones,
and a mean over them overshoots by 13 to 60 % (shared/facts/generation.md section 3.2).
"""

import math
from collections.abc import Iterable

_TRUSTED = 100  # admitted rows before their mean is used
_DONE_SHARE = 0.95  # of a prefix; the rest counts as if it reached max_tokens
_DEVIATIONS = 2.0  # standard deviations reserved on top of the mean
_RESCAN_SHARE = 0.02  # of all answers must be new before the mean is taken again


class Budget:
    """Tokens spent, tokens reserved, and whether the next request still fits.

    The reserve for n requests in flight is
    `min(max(admitted*mu - spent_on_replies, n*mu) + 2*sd*sqrt(n), their max_tokens)`
    with mu, sd over the longest prefix of admitted rows of which 95 % are done. The upper bound
    releases the slack near the end, so that a run lands on its budget, not 5 to 10 % short of it.
    """

    def __init__(self, limit_tokens: int | None) -> None:
        self.limit_tokens = limit_tokens
        self.spent_tokens = 0
        self._caps: list[int] = []  # max_tokens of each admitted row
        self._lengths: list[int | None] = []  # of its answer; None: in flight
        self._void: set[int] = set()  # admitted rows that failed
        self._open: dict[int, tuple[int, int]] = {}  # ticket -> prompt tokens, max_tokens
        self._open_prompts = self._open_caps = 0
        self._reply_tokens = 0
        self._estimate: tuple[float, float] | None = None
        self._changes = self._rescan_at = 0

    def hold(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a row that the journal already has."""
        self._caps.append(completion_tokens)
        self._lengths.append(completion_tokens)
        self._add(prompt_tokens, completion_tokens)

    def charge(self, tokens: int) -> None:
        """Count tokens that brought no row: an attempt that failed after it was sent."""
        self.spent_tokens += tokens

    def admits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Tell whether one more request fits beside everything spent and in flight."""
        if self.limit_tokens is None:
            return True
        reserve = self._reserve(len(self._open) + 1, self._open_caps + max_tokens)
        prompts = self._open_prompts + prompt_tokens
        return self.spent_tokens + prompts + reserve <= self.limit_tokens

    def admit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Reserve room for a request; return the ticket that `settle` or `void` takes back."""
        ticket = len(self._caps)
        self._caps.append(max_tokens)
        self._lengths.append(None)
        self._open[ticket] = (prompt_tokens, max_tokens)
        self._open_prompts += prompt_tokens
        self._open_caps += max_tokens
        return ticket

    def settle(self, ticket: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Replace a reservation by what was billed."""
        self._close(ticket)
        self._lengths[ticket] = completion_tokens
        self._add(prompt_tokens, completion_tokens)

    def void(self, ticket: int) -> None:
        """Release the reservation of a row that failed."""
        self._close(ticket)
        self._void.add(ticket)
        self._changes += 1

    def mean_tokens(self) -> float | None:
        """Return the foretold length of an answer; None while too few are known."""
        self._rescan()
        return self._estimate[0] if self._estimate else None

    def known_lengths(self) -> list[int]:
        """Return the completion lengths of all answers counted here."""
        return [length for length in self._lengths if length is not None]

    def projected_tokens(self) -> float:
        """Return what will have been spent once all that is in flight has come in."""
        if not self._open:
            return self.spent_tokens
        reserve = self._reserve(len(self._open), self._open_caps)
        return self.spent_tokens + self._open_prompts + reserve

    def _add(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.spent_tokens += prompt_tokens + completion_tokens
        self._reply_tokens += completion_tokens
        self._changes += 1

    def _close(self, ticket: int) -> None:
        prompt_tokens, max_tokens = self._open.pop(ticket)
        self._open_prompts -= prompt_tokens
        self._open_caps -= max_tokens

    def _reserve(self, in_flight: int, caps: int) -> float:
        self._rescan()
        if self._estimate is None:
            return caps
        mean, deviation = self._estimate
        admitted = len(self._caps) - len(self._void) + 1
        foretold = max(admitted * mean - self._reply_tokens, in_flight * mean)
        return min(foretold + _DEVIATIONS * deviation * math.sqrt(in_flight), caps)

    def _rescan(self) -> None:
        """Take the mean again, but not at every answer: that would cost a pass over all rows."""
        if self._changes < self._rescan_at and self._open:
            return
        self._rescan_at = self._changes + max(1, int(self._changes * _RESCAN_SHARE))
        rows = (
            (length, cap)
            for i, (length, cap) in enumerate(zip(self._lengths, self._caps, strict=True))
            if i not in self._void
        )
        self._estimate = prefix_estimate(rows)


def prefix_estimate(rows: Iterable[tuple[int | None, int]]) -> tuple[float, float] | None:
    """Return mean and standard deviation over the longest prefix that is 95 % done.

    Each row is (length or None, max_tokens), in the order of admission; an unfinished row counts at
    its max_tokens. None while no such prefix has 100 rows.
    """
    count = unfinished = total = squares = 0
    best: tuple[int, int, int] | None = None
    for length, cap in rows:
        value = cap if length is None else length
        count, total, squares = count + 1, total + value, squares + value * value
        unfinished += length is None
        if count >= _TRUSTED and unfinished <= (1 - _DONE_SHARE) * count:
            best = (count, total, squares)
    if best is None:
        return None
    count, total, squares = best
    mean = total / count
    return mean, math.sqrt(max(squares / count - mean * mean, 0.0))


def rows_within(limit: float | None, sizes: Iterable[float]) -> int:
    """Return how many rows of a budget count: those that start before it is used up.

    What is written is cut here, in the order of admission, so it depends on the journal alone.
    limit 100: sizes 60, 50, 10 -> 2 rows (the second crosses).   60, 40, 10 -> 2.   none -> 0.
    """
    spent, rows = 0.0, 0
    for size in sizes:
        if limit is not None and spent >= limit:
            break
        spent, rows = spent + size, rows + 1
    return rows
