"""Hold a run to all its limits at once: tokens, and dollars where a limit is set. Pure."""

from dataclasses import dataclass

from eyas.generation.budget import Budget
from eyas.settings import DatasetGenerate, Prices

COUNTS = ("total", "completion")
_UNITS = 1_000_000_000  # of a dollar; a Budget counts whole units


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one answer was billed."""

    prompt_tokens: int
    completion_tokens: int
    usd: float


class Limits:
    """A token budget, and beside it one in dollars at the dearest price that may be met.

    Both foretell from the same rows in the same order, so their tickets are the same.
    """

    def __init__(self, generate: DatasetGenerate, prices: Prices | None) -> None:
        self.tokens = Budget(generate.budget_tokens)
        self._with_prompts = generate.budget_counts == "total"
        self._usd = None
        if generate.budget_usd is not None and prices:
            self._usd = Budget(int(generate.budget_usd * _UNITS))
            self._prompt_units = prices.prompt_usd_per_mtok * _UNITS / 1e6
            self._completion_units = prices.completion_usd_per_mtok * _UNITS / 1e6

    def counted(self, spent: Spent) -> int:
        """Return the tokens of an answer that count."""
        return spent.completion_tokens + (spent.prompt_tokens if self._with_prompts else 0)

    def hold(self, spent: Spent, latency_s: float = 0.0) -> None:
        """Count a row that the journal already has."""
        prompt_tokens = self._prompt(spent.prompt_tokens)
        self.tokens.hold(prompt_tokens, spent.completion_tokens, latency_s)
        if self._usd:
            self._usd.hold(0, int(spent.usd * _UNITS), latency_s)

    def charge(self, tokens: int, usd: float = 0.0) -> None:
        """Count what brought no row; where no price is known, at that of completions."""
        self.tokens.charge(tokens)
        if self._usd:
            self._usd.charge(int(usd * _UNITS if usd else tokens * self._completion_units))

    def admits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Tell whether one more request fits under every limit."""
        fits = self.tokens.admits(self._prompt(prompt_tokens), max_tokens)
        return fits and (
            self._usd is None or self._usd.admits(*self._units(prompt_tokens, max_tokens))
        )

    def admit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Reserve room for a row; return its ticket."""
        if self._usd:
            self._usd.admit(*self._units(prompt_tokens, max_tokens))
        return self.tokens.admit(self._prompt(prompt_tokens), max_tokens)

    def send(self, ticket: int, now_s: float) -> None:
        """Note that the row's request leaves now."""
        self.tokens.send(ticket, now_s)
        if self._usd:
            self._usd.send(ticket, now_s)

    def rest(self, ticket: int) -> None:
        """Note that the row's request failed and waits."""
        self.tokens.rest(ticket)
        if self._usd:
            self._usd.rest(ticket)

    def settle(self, ticket: int, spent: Spent, now_s: float) -> None:
        """Replace a reservation by what was billed."""
        prompt_tokens = self._prompt(spent.prompt_tokens)
        self.tokens.settle(ticket, prompt_tokens, spent.completion_tokens, now_s)
        if self._usd:
            self._usd.settle(ticket, 0, int(spent.usd * _UNITS), now_s)

    def void(self, ticket: int) -> None:
        """Release the reservation of a row that failed."""
        self.tokens.void(ticket)
        if self._usd:
            self._usd.void(ticket)

    def _prompt(self, prompt_tokens: int) -> int:
        return prompt_tokens if self._with_prompts else 0

    def _units(self, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
        """Return prompt and longest answer in units; the prompt's price settles with the rest."""
        prompt = int(prompt_tokens * self._prompt_units)
        return 0, prompt + int(max_tokens * self._completion_units)
