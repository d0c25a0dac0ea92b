"""A server that drafts for itself: asked for greedy replies, its own counts read.

SGLang counts by request: `spec_verify_ct` verifications, and a histogram of how many drafts each
accepted. Its `spec_accept_length` counts the token of the prefill too; ours does not. Drafts past
the end of a reply count in the histogram, so the last verification's gain is cut here.
Source: SGLang 0.5.23, POST /generate with ids, GET /server_info.
"""

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from eyas.drafter.acceptance import Verified
from eyas.errors import EyasError

IN_FLIGHT = 16
_ANSWER_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the server answered; no verification where the prefill was enough."""

    ids: tuple[int, ...]
    verifications: int
    histogram: tuple[int, ...]  # verifications by drafts accepted

    def verified(self, num_drafts: int) -> Verified:
        """Return the verifications, fewest accepted drafts first, as their order is not known."""
        accepted = [k for k, count in enumerate(self.histogram) for _ in range(count)]
        gains = [drafts + 1 for drafts in accepted]
        if gains:
            gains[-1] -= sum(gains) - (len(self.ids) - 1)
        return Verified(
            gains=tuple(gains),
            accepted=tuple(accepted),
            judged=tuple(min(drafts + 1, num_drafts) for drafts in accepted),
        )


def ask_all(
    url: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> list[Reply]:
    """Send all prompts as ids, `IN_FLIGHT` at once; replies in order."""
    ends = {"max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_ids)}

    def ask(ids: Sequence[int]) -> Reply:
        body = {"input_ids": list(ids), "sampling_params": {"temperature": 0, **ends}}
        return reply_of(_fetch(f"{url}/generate", body))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(ask, prompts))


def reply_of(answer: Mapping[str, Any]) -> Reply:
    """Return ids and counts; the counts are left out of an answer without a verification.

    Raises: EyasError if the histogram of accepted drafts does not add up to the verifications.
    """
    meta = answer["meta_info"]
    count = meta.get("spec_verify_ct", 0)
    histogram = meta.get("spec_correct_drafts_histogram", ())
    if sum(histogram) != count:
        raise EyasError(
            f"/generate: expected a histogram of {count} verifications, got {list(histogram)}",
            hint="this reads SGLang 0.5.23; is the server another version, or without a drafter?",
        )
    return Reply(ids=tuple(answer["output_ids"]), verifications=count, histogram=tuple(histogram))


def server_info(url: str) -> dict[str, Any]:
    """Return the server's settings, and its counts under `internal_states`."""
    return _fetch(f"{url}/server_info", None)


def check_server(info: Mapping[str, Any], num_drafts: int) -> None:
    """Refuse a server that drafts by other rules.

    Raises: EyasError naming the setting.
    """
    names = ("algorithm", "num_steps", "eagle_topk")
    for name, expected in zip(names, ("EAGLE3", num_drafts, 1), strict=True):
        if (got := info.get(f"speculative_{name}")) != expected:
            raise EyasError(
                f"/server_info: speculative_{name}: expected {expected}, got {got}",
                hint="start the server with the exported drafter and evaluate.headline_steps",
            )


def _fetch(url: str, body: object) -> dict[str, Any]:
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise EyasError(f"{url}: HTTP {error.code}: {error.read(500).decode()}") from None
    except OSError as error:
        raise EyasError(f"{url}: no answer ({error})", hint="runtime.sglang_url") from None
