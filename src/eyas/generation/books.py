"""Count what a journal says: answers held, rows not asked again, tokens and dollars lost. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("issued", "responses", "failures", "abandoned", "settled")
_NEEDS = {
    "failures": {"reason", "final", "charged_tokens"},
    "settled": {"generation_id", "tokens", "charged_tokens"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where an answer lies in responses.jsonl, and what is counted without reading it."""

    start: int
    size: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    max_tokens: int | None = None  # of the request, where it is known
    latency_s: float = 0.0  # 0: not known

    @property
    def tokens(self) -> int:
        """Return the tokens billed."""
        return self.prompt_tokens + self.completion_tokens


class Books:
    """The counts, kept up to date record by record."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}  # fingerprint -> answer
        self.final: dict[str, str] = {}  # fingerprint -> reason why it is not asked again
        self.charged: dict[str, int] = {}  # fingerprint -> tokens billed without an answer
        self.lost_usd = 0.0  # of attempts that brought no answer
        self._unended: Counter[str] = Counter()
        self._unsettled: dict[str, dict[str, Any]] = {}  # generation id -> attempt

    def learn(self, name: str, record: Mapping[str, Any], start: int, size: int) -> None:
        """Take a record in; the first of two answers counts."""
        fingerprint = record["fingerprint"]
        if name != "settled":
            self._unended[fingerprint] += 1 if name == "issued" else -1
        if name == "responses" and fingerprint not in self.entries:
            self.entries[fingerprint] = Entry(
                start=start,
                size=size,
                prompt_tokens=record["prompt_tokens"],
                completion_tokens=record["completion_tokens"],
                cost_usd=record["cost_usd"],
                max_tokens=record.get("sampling", {}).get("max_tokens"),
                latency_s=record.get("latency_s") or 0.0,
            )
        elif name == "abandoned":
            self._charge(fingerprint, record.get("estimated_tokens", 0), 0.0)
        elif name == "failures":
            self._fail(fingerprint, record)
        elif name == "settled":
            self._unsettled.pop(record["generation_id"], None)
            tokens = record["tokens"] - record["charged_tokens"]
            self._charge(fingerprint, tokens, record["cost_usd"])

    def unended(self, fingerprint: str) -> int:
        """Return how many requests for a row were sent without any end on record: maybe billed."""
        return max(self._unended[fingerprint], 0)

    def all_unended(self) -> int:
        """Return how many there are of all rows."""
        return sum(count for count in self._unended.values() if count > 0)

    def unsettled(self) -> list[dict[str, Any]]:
        """Return the attempts that may be billed and can be asked for by their generation id."""
        return list(self._unsettled.values())

    def _fail(self, fingerprint: str, record: Mapping[str, Any]) -> None:
        self._charge(fingerprint, record["charged_tokens"], record.get("cost_usd", 0.0))
        if record["final"]:
            self.final[fingerprint] = record["reason"]
        if record.get("maybe_billed") and (generation_id := record.get("generation_id")):
            keys = ("fingerprint", "id", "sample", "generation_id", "charged_tokens")
            self._unsettled[generation_id] = {key: record[key] for key in keys}

    def _charge(self, fingerprint: str, tokens: int, usd: float) -> None:
        self.charged[fingerprint] = self.charged.get(fingerprint, 0) + tokens
        self.lost_usd += usd


def check_record(name: str, record: Any) -> dict[str, Any]:
    """Return a record that can be learned.

    Raises: ValueError naming what it lacks.
    """
    if not isinstance(record, dict) or not isinstance(record.get("fingerprint"), str):
        raise ValueError("no fingerprint")
    if missing := sorted(_NEEDS.get(name, set()) - set(record)):
        raise ValueError(f"no {', '.join(missing)}")
    return record
