"""Turn prompts into requests: body, fingerprint, and the order in which they are asked.

Pure: the seed decides everything.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.generation.budget import rows_within
from eyas.records import Prompt, request_fingerprint
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Sampling

_SEED_BITS = 0x7FFFFFFF  # providers take a signed 32-bit seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What every request of a data set has in common."""

    endpoint: Endpoint
    sampling: Sampling
    generate: DatasetGenerate
    partition: Mapping[str, PartitionRule]
    target_revision: str | None  # local endpoint only: another target gives other replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One wanted answer: the n-th sample of a prompt."""

    prompt: Prompt
    sample: int
    max_tokens: int
    fingerprint: str


def build_jobs(prompts: Iterable[Prompt], wish: Wish) -> list[Job]:
    """Return a job for each sample of each prompt, in the order of the file."""
    jobs = []
    for prompt in prompts:
        rule = wish.partition[prompt.partition]
        for sample in range(wish.generate.samples_per_prompt):
            body = build_body(prompt, sample, wish)
            jobs.append(
                Job(
                    prompt=prompt,
                    sample=sample,
                    max_tokens=wish.generate.max_tokens or rule.max_tokens,
                    fingerprint=request_fingerprint(body, prompt.id, sample),
                )
            )
    return jobs


def admission_order(jobs: Iterable[Job], seed: int) -> list[Job]:
    """Shuffle by hash, so that a budget keeps a fair sample and a new prompt moves no other."""
    return sorted(jobs, key=lambda job: _digest(seed, "order", job.prompt.id, job.sample))


def build_body(
    prompt: Prompt, sample: int, wish: Wish, *, avoid: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the JSON body of a request; its keys' order is part of OpenRouter's cache key.

    `avoid`: providers that refused; they change no fingerprint, which is taken without them.
    """
    endpoint, sampling = wish.endpoint, wish.sampling
    body: dict[str, Any] = {"model": endpoint.model, "messages": list(prompt.messages)}
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    body |= {
        "max_tokens": wish.generate.max_tokens or wish.partition[prompt.partition].max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": _number(sampling.seed, prompt.id, sample),
    }
    if endpoint.logprobs:
        body["logprobs"] = True
    if sampling.reasoning is not None:
        body["reasoning"] = sampling.reasoning
    if ignored := sorted({*endpoint.provider.get("ignore", ()), *avoid}):
        body["provider"] = endpoint.provider | {"ignore": ignored}
    elif endpoint.provider:
        body["provider"] = endpoint.provider
    if endpoint.name == "local":
        body |= {"return_token_ids": True, "target_revision": wish.target_revision}
    else:  # a prompt that is silently shortened would be another prompt
        body["plugins"] = [{"id": "context-compression", "enabled": False}]
    return body


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a Response keeps of its request."""
    return {name: body[name] for name in ("temperature", "top_p", "seed", "max_tokens")}


def _number(seed: int, prompt_id: str, sample: int) -> int:
    return int.from_bytes(_digest(seed, "sampling", prompt_id, sample)[:4]) & _SEED_BITS


def _digest(seed: int, use: str, prompt_id: str, sample: int) -> bytes:
    return hashlib.sha256(f"{seed}/{use}/{prompt_id}/{sample}".encode()).digest()


def split_jobs(
    ordered: Sequence[Job],
    sizes: Mapping[str, tuple[int, float]],
    final: Container[str],
    generate: DatasetGenerate,
) -> tuple[list[Job], list[Job]]:
    """Return the stored jobs that count within the budgets, and those to be asked, both in order.

    `sizes`: fingerprint -> tokens and dollars of a stored answer; `final`: not asked again.
    """
    stored = [job for job in ordered if job.fingerprint in sizes]
    tokens, usd = (
        zip(*(sizes[job.fingerprint] for job in stored), strict=True) if stored else ((), ())
    )
    count = min(rows_within(generate.budget_tokens, tokens), rows_within(generate.budget_usd, usd))
    missing = (job for job in ordered if job.fingerprint not in sizes)
    return stored[:count], [job for job in missing if job.fingerprint not in final]
