"""Measure a run while it goes: rates, latencies, faults of the last minute, each provider's part.

Pure: the clock is an argument.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_WINDOW_S = 60.0
_KEPT = 2000  # latencies and lags, the newest


@dataclass(slots=True)
class ProviderPart:
    """What one provider has done in this run."""

    answers: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    busy_s: float = 0.0  # sum of latencies
    failures: Counter[str] = field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """Return plain numbers; `tokens_per_s` is of one request."""
        return {
            "answers": self.answers,
            "truncated": self.truncated,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "usd": round(self.usd, 9),
            "tokens_per_s": round(self.completion_tokens / self.busy_s, 1) if self.busy_s else 0.0,
            "failures": dict(self.failures),
        }


class Meter:
    """Numbers of the last minute, and per provider of the whole run."""

    def __init__(self) -> None:
        self.providers: dict[str, ProviderPart] = {}
        self._latencies: deque[float] = deque(maxlen=_KEPT)
        self._lags: deque[float] = deque(maxlen=_KEPT)
        self._answers: deque[tuple[float, int]] = deque()  # time, completion tokens
        self._failures: deque[tuple[float, str]] = deque()

    def answered(
        self,
        provider: str,
        now_s: float,
        *,
        latency_s: float,
        tokens: tuple[int, int],
        usd: float,
        truncated: bool,
    ) -> None:
        """Count an answer; `tokens`: of prompt and completion."""
        part = self.providers.setdefault(provider, ProviderPart())
        part.answers += 1
        part.truncated += truncated
        part.prompt_tokens += tokens[0]
        part.completion_tokens += tokens[1]
        part.usd += usd
        part.busy_s += latency_s
        self._latencies.append(latency_s)
        self._answers.append((now_s, tokens[1]))

    def failed(self, provider: str, reason: str, now_s: float) -> None:
        """Count an attempt that brought no answer."""
        if provider:
            self.providers.setdefault(provider, ProviderPart()).failures[reason] += 1
        self._failures.append((now_s, reason))

    def lagged(self, seconds: float) -> None:
        """Note how late the event loop woke a sleeper."""
        self._lags.append(seconds)

    def facts(self, now_s: float, elapsed_s: float) -> dict[str, Any]:
        """Return the numbers of the last minute (or of the run, while it is younger)."""
        while self._answers and self._answers[0][0] < now_s - _WINDOW_S:
            self._answers.popleft()
        while self._failures and self._failures[0][0] < now_s - _WINDOW_S:
            self._failures.popleft()
        window_s = max(min(_WINDOW_S, elapsed_s), 1e-9)
        return {
            "answers_per_s": round(len(self._answers) / window_s, 3),
            "tokens_per_s": round(sum(tokens for _, tokens in self._answers) / window_s, 1),
            "latency_s": quantiles(self._latencies),
            "loop_lag_s": quantiles(self._lags),
            "failures_last_minute": dict(Counter(reason for _, reason in self._failures)),
            "providers": {name: part.facts() for name, part in sorted(self.providers.items())},
        }


def quantiles(values: Sequence[float] | deque[float]) -> dict[str, float]:
    """Return p50, p90 and p99 (nearest rank); empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {f"p{q}": round(ordered[round(q / 100 * last)], 4) for q in (50, 90, 99)}
