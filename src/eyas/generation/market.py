"""Who offers the model, at what price, and which offers a run may meet. Pure.

Source: shared/facts/kimi_openrouter.md sections 5.2 (routing) and 6.2 (GET .../endpoints).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import EyasError
from eyas.settings import Prices

ROUTING = (
    "order",
    "only",
    "ignore",
    "allow_fallbacks",
    "quantizations",
    "require_parameters",
    "max_price",
    "data_collection",
    "zdr",
    "enforce_distillable_text",
    "sort",
    "preferred_min_throughput",
    "preferred_max_latency",
)
SENT = frozenset({"max_tokens", "seed", "temperature", "top_p"})  # with every request
_PER_MTOK = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One provider's endpoint for the model."""

    provider: str
    slug: str  # the name that routing knows it by
    quantization: str
    context_length: int | None
    max_completion_tokens: int | None
    prices: Prices
    parameters: frozenset[str] = frozenset()  # that it supports; empty: not told

    @property
    def names(self) -> set[str]:
        """Return every name that routing may call it by, in lower case."""
        return {self.provider.lower(), self.slug.lower(), self.slug.lower().partition("/")[0]}


def read_offers(data: Mapping[str, Any]) -> tuple[Offer, ...]:
    """Return the offers of a GET .../endpoints answer's `data`.

    Raises: EyasError for a shape that is not known, and for no offer at all.
    """
    try:
        offers = tuple(_offer(entry) for entry in data["endpoints"])
    except (KeyError, TypeError, ValueError) as error:
        raise EyasError(
            f"GET .../endpoints: not of the known form ({type(error).__name__}: {error})",
            hint="the API may have changed; nothing was sent",
        ) from None
    if not offers:
        raise EyasError(f"model '{data.get('id')}': nobody offers it", hint="see endpoint.model")
    return offers


def _offer(entry: Mapping[str, Any]) -> Offer:
    pricing = entry["pricing"]
    return Offer(
        provider=str(entry["provider_name"]),
        slug=str(entry.get("tag") or entry["provider_name"]),
        quantization=str(entry.get("quantization") or "unknown"),
        context_length=entry.get("context_length"),
        max_completion_tokens=entry.get("max_completion_tokens"),
        prices=Prices(
            prompt_usd_per_mtok=float(pricing["prompt"]) * _PER_MTOK,
            completion_usd_per_mtok=float(pricing["completion"]) * _PER_MTOK,
        ),
        parameters=frozenset(map(str, entry.get("supported_parameters") or ())),
    )


def check_routing(routing: Mapping[str, Any]) -> None:
    """Refuse a routing key that OpenRouter would silently ignore.

    Raises: EyasError naming it.
    """
    if unknown := sorted(set(routing) - set(ROUTING)):
        raise EyasError(
            f"endpoint.provider.{unknown[0]}: no such routing option",
            hint=f"OpenRouter knows {', '.join(ROUTING)}",
        )


def usable(
    offers: Sequence[Offer],
    routing: Mapping[str, Any],
    max_tokens: int,
    *,
    logprobs: bool = False,
) -> tuple[Offer, ...]:
    """Return the offers that a request may be routed to.

    Raises: EyasError with the reason for each refused offer if none is left.
    """
    sent = SENT | ({"logprobs"} if logprobs else set())
    refused = {
        i: why
        for i, offer in enumerate(offers)
        if (why := _why_not(offer, routing, max_tokens, sent))
    }
    left = tuple(offer for i, offer in enumerate(offers) if i not in refused)
    if left:
        return left
    reasons = "; ".join(f"{offers[i].provider}: {why}" for i, why in refused.items())
    raise EyasError(
        f"endpoint.provider lets no offer through: {reasons}",
        hint="loosen endpoint.provider, max_tokens or endpoint.logprobs; nothing was sent",
    )


def _why_not(
    offer: Offer, routing: Mapping[str, Any], max_tokens: int, sent: frozenset[str]
) -> str | None:
    """Return why routing passes an offer by; None if it may be taken."""
    prices, ceiling = offer.prices, routing.get("max_price") or {}
    longest = offer.max_completion_tokens or offer.context_length
    order = () if routing.get("allow_fallbacks", True) else routing.get("order")
    only = routing.get("only") or order or ()
    checks = (
        (bool(only) and not _named(offer, only), "not among only/order"),
        (_named(offer, routing.get("ignore") or ()), "ignored"),
        (
            routing.get("quantizations") and offer.quantization not in routing["quantizations"],
            f"quantization {offer.quantization}",
        ),
        (
            prices.prompt_usd_per_mtok > float(ceiling.get("prompt", math.inf)),
            f"${prices.prompt_usd_per_mtok:g} per million prompt tokens is above max_price",
        ),
        (
            prices.completion_usd_per_mtok > float(ceiling.get("completion", math.inf)),
            f"${prices.completion_usd_per_mtok:g} per million completion tokens is above max_price",
        ),
        (longest is not None and longest < max_tokens, f"at most {longest} completion tokens"),
    )
    lacking = sorted(sent - offer.parameters) if offer.parameters else []
    if lacking and routing.get("require_parameters"):
        return f"does not take {', '.join(lacking)}"
    return next((why for wrong, why in checks if wrong), None)


def _named(offer: Offer, names: Iterable[str]) -> bool:
    return bool(offer.names & {name.lower() for name in names})


def dearest(offers: Sequence[Offer]) -> Prices:
    """Return the highest prices that may be met: what reservations are made at."""
    return Prices(
        prompt_usd_per_mtok=max(offer.prices.prompt_usd_per_mtok for offer in offers),
        completion_usd_per_mtok=max(offer.prices.completion_usd_per_mtok for offer in offers),
    )


def longest_context(offers: Sequence[Offer]) -> int | None:
    """Return the most tokens that any offer takes in prompt and answer; None if not told."""
    lengths = [offer.context_length for offer in offers]
    known = [length for length in lengths if length is not None]
    return max(known) if len(known) == len(lengths) else None


def quantization_of(offers: Sequence[Offer], provider: str) -> str | None:
    """Return the quantization of a provider's answers; None unless all its offers agree."""
    found = {offer.quantization for offer in offers if provider.lower() in offer.names}
    return found.pop() if len(found) == 1 else None
