"""Decide which request may still be sent within a token budget, without ever cancelling one.

A request in flight is billed whole, so room is reserved before it is sent: what those in flight
are foretold to bring (survival.py), and two standard deviations on top. Near the end, where that
foretells 99.5 % of the budget and is sure to half a percent, nothing more is admitted: the last
tenths of a percent would cost one more wait for the longest answers. 100 simulated runs of 10 M
tokens at 2,000 concurrent ended between -0.5 and +1.9 %, in half the time of a rule that waits for
the first admitted answers to be complete (RESULTS.md).
"""

import math
from collections.abc import Iterable

from eyas.generation.survival import Outlook, foretell

_TRUSTED = 30  # answers before anything is foretold
_DEVIATIONS = 2.0  # standard deviations reserved on top
_ENOUGH = 0.005  # of the budget may stay unused
_RESCAN_SHARE = 0.02  # of those in flight (a thousandth of all) must have ended to look again
_TOKENS_PER_S = 50.0  # assumption: of a held answer that has no latency


class Budget:
    """Tokens spent, tokens reserved, and whether the next request still fits.

    The reserve for n requests in flight is `sum of their foretold lengths + 2 sqrt(v + n n d)`,
    never more than their max_tokens: v is the variance of that sum, d of the foretold mean itself.
    """

    def __init__(self, limit_tokens: int | None) -> None:
        self.limit_tokens = limit_tokens
        self.spent_tokens = 0
        self._answers: list[tuple[float, int]] = []  # seconds in flight, tokens
        self._open: dict[int, tuple[int, int]] = {}  # ticket -> prompt tokens, max_tokens
        self._sent_s: dict[int, float] = {}  # ticket -> when, for those in flight
        self._open_prompts = self._open_caps = 0
        self._tickets = 0
        self._outlook: Outlook | None = None
        self._foretold: dict[int, float] = {}  # ticket -> tokens
        self._foretold_tokens = self._foretold_variance = 0.0
        self._changes = self._rescan_at = 0
        self._now_s = 0.0

    def hold(self, prompt_tokens: int, completion_tokens: int, latency_s: float = 0.0) -> None:
        """Count a row that the journal already has."""
        self._answers.append((latency_s or completion_tokens / _TOKENS_PER_S, completion_tokens))
        self._add(prompt_tokens + completion_tokens)

    def charge(self, tokens: int) -> None:
        """Count tokens that brought no row: an attempt that failed after it was sent."""
        self.spent_tokens += tokens

    def admits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Tell whether one more request fits beside everything spent and in flight."""
        if self.limit_tokens is None:
            return True
        self._rescan()
        if self._is_full(self.limit_tokens):
            return False
        reserve = self._reserve(1, self._open_caps + max_tokens)
        prompts = self._open_prompts + prompt_tokens
        return self.spent_tokens + prompts + reserve <= self.limit_tokens

    def admit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Reserve room for a row; return the ticket that `settle` or `void` takes back."""
        ticket = self._tickets
        self._tickets += 1
        self._open[ticket] = (prompt_tokens, max_tokens)
        self._open_prompts += prompt_tokens
        self._open_caps += max_tokens
        if self._outlook:
            self._foretold[ticket] = self._outlook.mean
            self._foretold_tokens += self._outlook.mean
            self._foretold_variance += self._outlook.variance
        return ticket

    def send(self, ticket: int, now_s: float) -> None:
        """Note that the row's request leaves now, for the first time or again."""
        self._sent_s[ticket] = self._now_s = now_s

    def rest(self, ticket: int) -> None:
        """Note that the row's request failed and waits; its age begins anew when it is sent."""
        self._sent_s.pop(ticket, None)

    def settle(self, ticket: int, prompt_tokens: int, completion_tokens: int, now_s: float) -> None:
        """Replace a reservation by what was billed."""
        self._now_s = now_s
        self._answers.append((now_s - self._sent_s[ticket], completion_tokens))
        self._close(ticket)
        self._add(prompt_tokens + completion_tokens)

    def void(self, ticket: int) -> None:
        """Release the reservation of a row that failed."""
        self._close(ticket)
        self._changes += 1

    def mean_tokens(self) -> float | None:
        """Return the foretold length of an answer; None while too few are known."""
        self._rescan()
        return self._outlook.mean if self._outlook else None

    def known_lengths(self) -> list[int]:
        """Return the completion lengths of all answers counted here."""
        return [tokens for _, tokens in self._answers]

    def projected_tokens(self) -> float:
        """Return what is foretold to have been spent once all that is in flight has come in."""
        self._rescan()
        foretold = self._foretold_tokens if self._outlook else self._open_caps
        return self.spent_tokens + self._open_prompts + foretold

    def _add(self, tokens: int) -> None:
        self.spent_tokens += tokens
        self._changes += 1

    def _close(self, ticket: int) -> None:
        prompt_tokens, max_tokens = self._open.pop(ticket)
        self.rest(ticket)
        self._open_prompts -= prompt_tokens
        self._open_caps -= max_tokens
        self._foretold_tokens -= self._foretold.pop(ticket, 0.0)

    def _reserve(self, more: int, caps: int) -> float:
        """Return the room for those in flight and `more` of them, their max_tokens at most."""
        if self._outlook is None:
            return caps
        foretold = self._foretold_tokens + more * self._outlook.mean
        return min(foretold + _DEVIATIONS * self._deviation(self._outlook, more), caps)

    def _deviation(self, outlook: Outlook, more: int) -> float:
        number = len(self._open) + more
        scatter = self._foretold_variance + more * outlook.variance
        return math.sqrt(scatter + number * number * outlook.doubt)

    def _is_full(self, limit_tokens: int) -> bool:
        """Tell whether what is in flight will fill the budget, surely enough."""
        if self._outlook is None or self.projected_tokens() < (1 - _ENOUGH) * limit_tokens:
            return False
        return _DEVIATIONS * self._deviation(self._outlook, 0) <= _ENOUGH * limit_tokens

    def _rescan(self) -> None:
        """Look anew at all answers and ages, but not at every answer: that would cost a pass."""
        if len(self._answers) < _TRUSTED or (self._outlook and self._changes < self._rescan_at):
            return
        step = max(len(self._open) * _RESCAN_SHARE, len(self._answers) / 1000, 1)
        self._rescan_at = self._changes + int(step)
        ages_s = [self._now_s - self._sent_s.get(ticket, self._now_s) for ticket in self._open]
        caps = [max_tokens for _, max_tokens in self._open.values()]
        self._outlook = foretell(self._answers, ages_s, caps)
        self._foretold = dict(zip(self._open, self._outlook.open_mean_n.tolist(), strict=True))
        self._foretold_tokens = sum(self._foretold.values())
        self._foretold_variance = self._outlook.open_variance


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
