"""Send one request at a time over one shared session; the only import of httpx.

Plain httpx cannot serve more than about 200 concurrent requests (45 CPU-s per 1000 answers against
1.0 with the aiohttp transport, shared/facts/generation.md section 2).
"""

import asyncio
import dataclasses
import logging
import os
import time
import urllib.request
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from eyas.errors import EyasError
from eyas.generation.outcomes import Outcome, classify, lost

_CONNECT_S = 30.0


def read_key(variable: str | None) -> str | None:
    """Return the API key from the environment variable of that name; None if none is named.

    Raises: EyasError, which never holds the key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EyasError(
            f"environment variable {variable}: expected the API key, got nothing",
            hint=f"export {variable}=...; nothing was sent",
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EyasError(f"environment variable {variable}: not a key (spaces or odd characters)")
    return key


class Client:
    """An endpoint of OpenRouter's form, asked without streaming."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        connections: int,
        timeout_s: float,
        cache_ttl_s: int | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EyasError(
                f"runtime.connection.url: expected http(s)://host/api/v1, got '{url}'",
            )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for each request
        self._url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=connections, keepalive_expiry=30.0)
        transport = AiohttpTransport(limits=limits, proxy=_proxy(parts.scheme, parts.hostname))
        self._http = httpx.AsyncClient(
            transport=transport,
            headers=_headers(key, cache_ttl_s),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def ask(self, body: bytes) -> Outcome:
        """Send one request and classify what comes back, within the wall deadline.

        Keep-alive blank lines defeat idle timeouts, so the deadline is on the whole request. The
        generation's id stands in a header, known even if the body never arrives whole.
        """
        name = ""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream("POST", f"{self._url}/chat/completions", content=body) as answer,
            ):
                name = answer.headers.get("x-generation-id", "")
                content = await answer.aread()
        except TimeoutError:
            detail = f"no answer in {self._timeout_s:g} s"
            return lost("deadline", detail, maybe_billed=True, generation_id=name)
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            return self._lost(error, name)
        text = self._without_key(content.decode("utf-8", errors="replace"))
        outcome = classify(answer.status_code, answer.headers, text, now_s=time.time())
        if source := answer.headers.get("x-openrouter-cache-source-id"):
            return await self._out_of_cache(outcome, source)
        if outcome.reply and outcome.completion_tokens is None and outcome.reply.generation_id:
            return await self._counted(outcome, outcome.reply.generation_id)
        return dataclasses.replace(outcome, generation_id=name) if name else outcome

    async def _out_of_cache(self, outcome: Outcome, source: str) -> Outcome:
        """Give an answer out of the cache the counts of the one that was billed; it costs nothing.

        A hit reports no tokens. Without their counts it is asked for again.
        """
        counted = await self._counted(dataclasses.replace(outcome, usage=None), source)
        if counted.usage is None:
            return lost("cache_without_counts", f"generation {source}", maybe_billed=False)
        usage = {**counted.usage, "cached_from": source}
        return dataclasses.replace(counted, usage=usage, cost_usd=0.0)

    async def _counted(self, outcome: Outcome, generation_id: str) -> Outcome:
        """Fetch the counts that an answer lacks; keep it as it is where they are not to be had."""
        try:
            data = await self.fetch(f"generation?id={generation_id}")
            counts = {k: int(data[f"native_tokens_{k}"]) for k in ("prompt", "completion")}
            usd = float(data.get("total_cost") or 0.0)
        except (EyasError, KeyError, TypeError, ValueError) as error:
            logging.getLogger("eyas").warning("%s: no counts (%s)", generation_id, error)
            return outcome
        usage = {f"{k}_tokens": number for k, number in counts.items()} | {"cost": usd}
        return dataclasses.replace(outcome, usage=usage, cost_usd=usd, generation_id=generation_id)

    async def fetch(self, path: str) -> dict[str, Any]:
        """GET an address below the base URL and return its `data`.

        Raises: EyasError if it does not answer with a JSON object within 30 s.
        """
        try:
            answer = await self._http.get(f"{self._url}/{path}", timeout=_CONNECT_S)
            value = orjson.loads(answer.content)
        except (httpx.HTTPError, aiohttp.ClientError, OSError, orjson.JSONDecodeError) as error:
            what = self._without_key(f"{type(error).__name__}: {error}")
            raise EyasError(f"GET {self._url}/{path}: {what}") from None
        data = value.get("data") if isinstance(value, dict) else None
        if answer.status_code != 200 or not isinstance(data, dict):
            text = self._without_key(answer.text)[:300]
            raise EyasError(f"GET {self._url}/{path}: HTTP {answer.status_code}: {text}")
        return data

    def _lost(self, error: Exception, generation_id: str) -> Outcome:
        """Tell a request that never left from one that may have been answered and billed.

        The transport maps both to httpx.ConnectTimeout, so its cause is asked.
        """
        cause = error.__cause__ or error
        unsent = isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return lost(
            "connect" if unsent else "connection_lost",
            self._without_key(f"{type(cause).__name__}: {cause}"),
            maybe_billed=not unsent,
            generation_id=generation_id,
        )

    def _without_key(self, text: str) -> str:
        """Blank the key, should an endpoint echo it in its error."""
        return text.replace(self._key, "[key]") if self._key else text


def _headers(key: str | None, cache_ttl_s: int | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-OpenRouter-Title": "eyas"}
    if cache_ttl_s is not None:
        headers |= {"X-OpenRouter-Cache": "true", "X-OpenRouter-Cache-TTL": str(cache_ttl_s)}
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def _proxy(scheme: str, host: str) -> httpx.Proxy | None:
    """Return the environment's proxy; aiohttp's transport does not look for it itself."""
    address = urllib.request.getproxies().get(scheme)
    loopback = host in ("localhost", "127.0.0.1", "::1")
    if not address or loopback or urllib.request.proxy_bypass(host):
        return None
    return httpx.Proxy(address)
