"""Look at the market before anything is sent: offers, prices, context, and what to refuse.

Edge: survey (the endpoint's addresses). Source: shared/facts/kimi_openrouter.md section 6.2.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import EyasError
from eyas.generation.holdings import Stock
from eyas.generation.jobs import Job
from eyas.generation.market import (
    Offer,
    check_routing,
    dearest,
    longest_context,
    quantization_of,
    read_offers,
    usable,
)
from eyas.generation.purse import Fetcher
from eyas.settings import Endpoint, Prices

log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What a run may meet: the offers as they were found, and those that routing lets through."""

    as_found: Mapping[str, Any]  # kept with the run
    usable: tuple[Offer, ...]

    @property
    def dearest(self) -> Prices:
        """Return the highest prices that may be met."""
        return dearest(self.usable)

    @property
    def context_length(self) -> int | None:
        """Return the most tokens of prompt and answer together; None if it is not told."""
        return longest_context(self.usable)

    @property
    def slugs(self) -> dict[str, str]:
        """Return the routing slug of each provider."""
        return {offer.provider: offer.slug.partition("/")[0] for offer in self.usable}

    @property
    def quantizations(self) -> dict[str, str]:
        """Return the quantization of each provider whose offers agree."""
        found = {o.provider: quantization_of(self.usable, o.provider) for o in self.usable}
        return {provider: name for provider, name in found.items() if name}


async def survey(fetcher: Fetcher, endpoint: Endpoint, max_tokens: int) -> Market:
    """Read the model's offers and keep those that the conf lets through.

    Raises: EyasError for an unknown model or routing option, or if no offer is left.
    """
    check_routing(endpoint.provider)
    try:
        data = await fetcher.fetch(f"models/{endpoint.model}/endpoints")
    except EyasError as error:
        raise EyasError(
            f"endpoint.model '{endpoint.model}': {error}",
            hint="check the model's name and the connection; nothing was sent",
        ) from None
    offers = usable(read_offers(data), endpoint.provider, max_tokens, logprobs=endpoint.logprobs)
    return Market(as_found=data, usable=offers)


def without_too_long(stock: Stock, context_length: int | None) -> list[Job]:
    """Return the jobs whose prompt and longest answer fit; count and tell the others."""
    if context_length is None:
        return list(stock.todo)
    fits = [job for job in stock.todo if _tokens(job) <= context_length]
    if too_long := [job for job in stock.todo if _tokens(job) > context_length]:
        stock.tally.failed_rows["context_length"] += len(too_long)
        log.warning(
            "%d prompts are not sent: with max_tokens they need up to %d tokens, offered are %d",
            *(len(too_long), max(map(_tokens, too_long)), context_length),
        )
    return fits


def _tokens(job: Job) -> int:
    return job.prompt.prompt_tokens + job.max_tokens
