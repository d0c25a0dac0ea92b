"""Bound the requests in flight: slow start, then grow by little and cut by a fifth.

Pure: the clock is an argument. Source: additive increase, multiplicative decrease (Chiu and Jain
1989); slow start as TCP has it (RFC 5681).
"""

_START = 20
_GROWTH = 0.05  # of the limit, a clean round
_CUT = 0.8
_USED = 0.8  # of the limit must really have been in flight for the limit to grow
_DEBOUNCE_S = 15.0  # by our own clock: a long Retry-After must neither freeze nor repeat the cut


class Limiter:
    """How many requests may be in flight now, at most `maximum`."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.limit = min(_START, maximum)
        self.paused_until_s = 0.0
        self.history: list[tuple[float, int, str]] = []  # time, new limit, reason
        self._doubling = True
        self._clean = 0  # answers since the limit last changed
        self._busiest = 0.0
        self._cut_at_s = -_DEBOUNCE_S

    @property
    def ramping(self) -> bool:
        """Tell whether the limit still doubles."""
        return self._doubling and self.limit < self.maximum

    def has_room(self, in_flight: float, now_s: float) -> bool:
        """Tell whether another request may be sent now."""
        return now_s >= self.paused_until_s and in_flight < self.limit

    def on_success(self, in_flight: float, now_s: float) -> None:
        """Count an answer; grow after a clean round in which the limit was really used."""
        if now_s < self._cut_at_s + _DEBOUNCE_S:
            return
        self._clean += 1
        self._busiest = max(self._busiest, in_flight)
        if self._clean < self.limit:
            return
        if self._busiest >= _USED * self.limit and self.limit < self.maximum:
            step = self.limit if self._doubling else max(1, int(self.limit * _GROWTH))
            self._set(min(self.limit + step, self.maximum), now_s, "clean round")
        self._clean, self._busiest = 0, 0.0

    def on_overload(self, now_s: float, reason: str) -> None:
        """Cut the limit by a fifth, at most once in 15 s."""
        if now_s < self._cut_at_s + _DEBOUNCE_S:
            return
        self._cut_at_s = now_s
        self._doubling = False
        self._clean, self._busiest = 0, 0.0
        self._set(max(1, int(self.limit * _CUT)), now_s, reason)

    def pause(self, until_s: float) -> None:
        """Send nothing before `until_s`."""
        self.paused_until_s = max(self.paused_until_s, until_s)

    def _set(self, limit: int, now_s: float, reason: str) -> None:
        if limit != self.limit:
            self.limit = limit
            self.history.append((now_s, limit, reason))
