"""Bound the requests in flight: double at first, cut by a fifth when refused, find back fast.

An endpoint refuses at once and answers late. So a probe is time, not a round of answers: after
three seconds of full use with answers and hardly a refusal the limit grows, by 5 % after a cut,
then by twice as much each time, up to doubling. What is cut for is a share of refusals: a provider
that turns away one request in a hundred whatever the load would else hold the limit near 30 (with
a cut for each refusal it fell to 1 of 2,000 in a rehearsal, 2026-11-30).
Pure: the clock is an argument. Source: additive increase, multiplicative decrease (Chiu and Jain
1989); slow start (RFC 5681); growth that accelerates away from the last cut (CUBIC, RFC 9438).
"""

_START = 20
_SLOWEST, _FASTEST = 0.05, 1.0  # growth a probe, as a share of the limit
_CUT = 0.8
_USED = 0.8  # of the limit must really have been in flight for the limit to grow
_REFUSED = 0.05  # of a probe's attempts, and
_REFUSALS = 3  # at least so many, before the limit is cut
PROBE_S = 3.0
DEBOUNCE_S = 15.0  # by our own clock: a long Retry-After must neither freeze nor repeat the cut


class Limiter:
    """How many requests may be in flight now, at most `maximum`."""

    def __init__(self, maximum: int, *, time_scale: float = 1.0) -> None:
        self.maximum = maximum
        self.limit = min(_START, maximum)
        self.paused_until_s = 0.0
        self.history: list[tuple[float, int, str]] = []  # time, new limit, reason
        self._probe_s, self._debounce_s = PROBE_S / time_scale, DEBOUNCE_S / time_scale
        self._growth = _FASTEST
        self._answers = self._refusals = 0  # of this probe
        self._busiest = 0.0
        self._probed_at_s = -self._probe_s  # when this probe began; the first ends with an answer
        self._cut_at_s = -self._debounce_s

    @property
    def ramping(self) -> bool:
        """Tell whether the limit still doubles."""
        return self._growth == _FASTEST and self.limit < self.maximum

    def has_room(self, in_flight: float, now_s: float) -> bool:
        """Tell whether another request may be sent now."""
        return now_s >= self.paused_until_s and in_flight < self.limit

    def on_success(self, in_flight: float, now_s: float) -> None:
        """Count an answer; grow at the end of a probe in which the limit was really used."""
        self._answers += 1
        self._busiest = max(self._busiest, in_flight)
        if now_s < max(self._probed_at_s + self._probe_s, self._cut_at_s + self._debounce_s):
            return
        if (
            self._busiest >= _USED * self.limit
            and not self._refused()
            and self.limit < self.maximum
        ):
            step = max(1, int(self.limit * self._growth))
            self._growth = min(2 * self._growth, _FASTEST)
            self._set(min(self.limit + step, self.maximum), now_s, "well used")
        self._begin(now_s)

    def on_overload(self, now_s: float, reason: str) -> None:
        """Count a refusal; cut the limit where they are many, at most once in 15 s."""
        self._refusals += 1
        if not self._refused() or now_s < self._cut_at_s + self._debounce_s:
            return
        self._cut_at_s = now_s
        self._growth = _SLOWEST
        self._set(max(1, int(self.limit * _CUT)), now_s, reason)
        self._begin(now_s)

    def pause(self, until_s: float) -> None:
        """Send nothing before `until_s`."""
        self.paused_until_s = max(self.paused_until_s, until_s)

    def _refused(self) -> bool:
        attempts = self._answers + self._refusals
        return self._refusals >= _REFUSALS and self._refusals > _REFUSED * attempts

    def _begin(self, now_s: float) -> None:
        self._answers = self._refusals = 0
        self._busiest, self._probed_at_s = 0.0, now_s

    def _set(self, limit: int, now_s: float, reason: str) -> None:
        if limit != self.limit:
            self.limit = limit
            self.history.append((now_s, limit, reason))
