"""A row on its way to an answer, and what the journal says about it. Pure, but for the time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.generation.jobs import Job, sampling_of
from eyas.generation.outcomes import Outcome
from eyas.records import Response


@dataclass(slots=True)
class Row:
    """An admitted row."""

    job: Job
    ticket: int  # of its reservation
    sends: int = 0
    failures: int = 0  # attempts used up; a rate limit uses none
    maybe_billed: int = 0
    first_s: float = 0.0
    sent_s: float = 0.0  # of the attempt in flight
    waits_for: str = ""
    avoid: set[str] = field(default_factory=set)  # providers that refused it


def head_of(row: Row) -> dict[str, Any]:
    """Return what every journal line but an answer starts with."""
    return {
        "fingerprint": row.job.fingerprint,
        "id": row.job.prompt.id,
        "sample": row.job.sample,
        "attempt": row.sends,
        "time_s": round(time.time(), 3),
    }


def failure_of(row: Row, outcome: Outcome, *, charged_tokens: int, final: bool) -> dict[str, Any]:
    """Return the line of a failed attempt; the body stands in it where its shape is unknown."""
    return head_of(row) | {
        "kind": outcome.kind,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "provider": outcome.provider,
        "generation_id": outcome.generation_id,
        "maybe_billed": outcome.maybe_billed,
        "cost_usd": outcome.cost_usd,
        "usage": outcome.usage,
        "raw": outcome.raw,
        "charged_tokens": charged_tokens,
        "final": final,
    }


def response_of(
    row: Row,
    outcome: Outcome,
    body: Mapping[str, Any],
    *,
    source: str,
    latency_s: float,
    quantizations: Mapping[str, str],
) -> Response:
    """Return the record of an answer; counts that the endpoint did not report are 0."""
    reply, job = outcome.reply, row.job
    assert reply is not None
    return Response(
        id=job.prompt.id,
        fingerprint=job.fingerprint,
        sample=job.sample,
        model=reply.model,
        provider=reply.provider,
        generation_id=reply.generation_id,
        reasoning=reply.reasoning,
        content=reply.content,
        tool_calls=reply.tool_calls,
        finish_reason=reply.finish_reason,
        native_finish_reason=reply.native_finish_reason,
        prompt_tokens=outcome.prompt_tokens or 0,
        completion_tokens=outcome.completion_tokens or 0,
        cost_usd=outcome.cost_usd,
        latency_s=round(latency_s, 3),
        attempts=row.sends,
        source=source,
        sampling=sampling_of(body),
        usage=dict(outcome.usage or {}),
        true_ids=reply.true_ids,
        quantization=quantizations.get(reply.provider),
        pieces=reply.pieces,
    )
