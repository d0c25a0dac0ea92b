"""The records that pass between the wings, and their ids.

Source: docs/contracts.md. A record is what a file on disk holds; nothing is keyed by line number.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

Message = dict[
    str, Any
]  # {"role", "content", "name"?, "tool_calls"?, "tool_call_id"?}, OpenAI's form
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Span = tuple[int, int]  # [start, end) of a reply in input_ids, the end-of-turn token included
Piece = str | Sequence[int]  # what an engine says of a sampled token: its text, else its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row to be answered (`prompts`) or a conversation the target wrote (`trajectories`)."""

    id: str
    dataset: str
    upstream_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    prompt_tokens: int
    partition: str  # short | long
    licence: str
    conversation: str = ""  # what upstream split into several rows; empty: this row is whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One paid (or local, or imported) answer with everything the endpoint said about it."""

    id: str  # of the prompt
    fingerprint: str  # of the request
    sample: int
    model: str
    provider: str
    generation_id: str
    reasoning: str | None
    content: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    native_finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    latency_s: float
    attempts: int
    source: str  # openrouter | local | imported
    sampling: dict[str, Any]
    usage: dict[str, Any]
    true_ids: tuple[int, ...] | None = None  # the ids really sampled; local endpoint only
    quantization: str | None = None  # of the provider's weights, where all its offers agree
    pieces: tuple[Piece, ...] | None = None  # of the sampled tokens, where `logprobs` were asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Exact token ids of a conversation and where its replies lie."""

    id: str
    dataset: str
    input_ids: Sequence[int]  # a tuple; an int32 array where many are held: `packed`
    spans: tuple[Span, ...]
    temperature: float
    provider: str
    flags: tuple[str, ...]
    completion_tokens_billed: int | None  # None where nobody was billed (trajectories)
    conversation: str = ""  # groups samples that must stay on one side of a split; the prompt id


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Why a row was dropped (`reject`) or marked (`flag`), with the text that shows it."""

    id: str
    dataset: str
    rule: str
    detail: str
    severity: str = field(default="reject")  # reject | flag


def packed(sample: Sample) -> Sample:
    """Return the sample with its ids as an int32 array: 4 bytes a token, where a tuple takes 36."""
    return replace(sample, input_ids=array("i", sample.input_ids))


def unpacked(sample: Sample) -> Sample:
    """Return the sample with its ids as a tuple."""
    return replace(sample, input_ids=tuple(sample.input_ids))


def outlined(sample: Sample) -> Sample:
    """Return the sample without its ids but with their number: for what is told of many."""
    return replace(sample, input_ids=range(len(sample.input_ids)))


def canonical_json(value: object) -> bytes:
    """Serialise with sorted keys and no spaces, so that equal values give equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def row_id(dataset: str, upstream_id: str, messages: object, tools: object = ()) -> str:
    """Return the content hash (32 hex digits) that names a prompt for good."""
    return hashlib.sha256(canonical_json([dataset, upstream_id, messages, tools])).hexdigest()[:32]


def request_fingerprint(body: Mapping[str, Any], prompt_id: str, sample: int) -> str:
    """Return the sha256 (64 hex digits) of a request: canonical body, row id, sample number."""
    return hashlib.sha256(canonical_json([dict(body), prompt_id, sample])).hexdigest()
