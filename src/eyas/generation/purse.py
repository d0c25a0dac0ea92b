"""Compare our books with the key's: what it has spent, and what of that no answer explains.

Source: shared/facts/kimi_openrouter.md section 6.2 (GET /key, GET /generation).
"""

import asyncio
import contextlib
import logging
from typing import Any, Protocol

from eyas.errors import EyasError
from eyas.generation.facts import Tally
from eyas.generation.journal import Journal

_EVERY_S = 60.0
_AT_ONCE = 8
_SETTLE_S = 60.0
log = logging.getLogger("eyas")


class Fetcher(Protocol):
    """Whoever reads the endpoint's other addresses."""

    async def fetch(self, path: str) -> dict[str, Any]:
        """Return the `data` below an address; EyasError if there is none."""
        ...


async def watch_key(fetcher: Fetcher, tally: Tally, *, every_s: float = _EVERY_S) -> None:
    """Keep `tally.key` up to date until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await look_at_key(fetcher, tally)


async def look_at_key(fetcher: Fetcher, tally: Tally) -> None:
    """Read the key's usage; a failure is told and changes nothing."""
    try:
        data = await fetcher.fetch("key")
        usage = float(data["usage"]) + float(data.get("byok_usage") or 0.0)
        left = data.get("limit_remaining")
    except (EyasError, KeyError, TypeError, ValueError) as error:
        log.warning("GET /key: %s", error)
        return
    first = tally.key.setdefault("usage_start_usd", usage)
    tally.key["usage_now_usd"] = usage
    tally.key["limit_left_usd"] = None if left is None else float(left)
    tally.key["unexplained_usd"] = round(usage - (first or 0.0) - tally.new_usd, 9)


async def key_left_usd(fetcher: Fetcher) -> float | None:
    """Return what the key may still spend; None where it has no limit.

    Raises: EyasError if the key is refused.
    """
    left = (await fetcher.fetch("key")).get("limit_remaining")
    return None if left is None else float(left)


async def settle_lost(fetcher: Fetcher, journal: Journal, tally: Tally) -> None:
    """Ask what became of attempts that may be billed; write what they cost into the journal.

    Only those whose generation id arrived can be asked for. One that is not known there (yet), or
    not within a minute of all, is left for the next run.
    """
    gate = asyncio.Semaphore(_AT_ONCE)

    async def settle(attempt: dict[str, Any]) -> None:
        async with gate:
            record = await _settled(fetcher, attempt)
        if record:
            journal.write("settled", record)
            tally.new_usd += record["cost_usd"]
            tally.settled += 1

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_S):
            await asyncio.gather(*map(settle, journal.books.unsettled()))


async def _settled(fetcher: Fetcher, attempt: dict[str, Any]) -> dict[str, Any] | None:
    try:
        data = await fetcher.fetch(f"generation?id={attempt['generation_id']}")
        tokens = sum(int(data.get(f"native_tokens_{k}") or 0) for k in ("prompt", "completion"))
        usd = float(data.get("total_cost") or 0.0)
    except (EyasError, TypeError, ValueError) as error:
        log.info("%s: not settled (%s)", attempt["generation_id"], error)
        return None
    return attempt | {"cost_usd": usd, "tokens": tokens}
