"""Text back to exact token ids, and the evidence that they are the right ones. Pure.

Prompt ids come from the target's own template; a reply is encoded apart from it, and its length is
compared with what was billed. Nothing searches text for assistant turns: spans are known by
construction. Source: docs/contracts.md; the rule's grounds are in tokens/codecs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.records import Prompt, Response, Sample, Span, Violation
from eyas.settings import Validate
from eyas.tokens.codecs import Codec, ReplyParts

TRUNCATED = "truncated"  # cut by max_tokens: kept, but its last tokens carry no loss
NEAR = "near"  # the count differs from the bill by a little
TRUE_IDS_DIFFER = "true_ids_differ"  # the ids really sampled are known, and are others
_KEPT_FINISHES = ("stop", "length", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A sample (or why there is none) and the evidence that was seen on the way."""

    result: Sample | Violation
    count_delta: int | None = None  # billed completion tokens - rebuilt ids
    prompt_delta: int | None = None  # billed prompt tokens - rendered ids
    identical: bool | None = None  # to the ids really sampled; None where unknown
    rebuilt_tokens: int = 0


def rebuild_response(prompt: Prompt, response: Response, codec: Codec, rules: Validate) -> Rebuilt:
    """Return the sample of one answer, or the reason that it is none."""
    if response.finish_reason not in _KEPT_FINISHES:
        return _rejected(prompt, "finish_reason", response.finish_reason)
    reply = ReplyParts(
        content=response.content, reasoning=response.reasoning, tool_calls=response.tool_calls
    )
    reply_ids = codec.reply_ids(reply, response.finish_reason)
    if not set(reply_ids) - set(codec.stop_ids):
        return _rejected(prompt, "empty_reply", f"finish_reason {response.finish_reason}")
    prompt_ids = codec.render_prompt(prompt.messages, prompt.tools)
    delta = response.completion_tokens - len(reply_ids)
    prompt_delta = response.prompt_tokens - len(prompt_ids)
    evidence = {
        "count_delta": delta,
        "prompt_delta": prompt_delta,
        "identical": None if response.true_ids is None else list(response.true_ids) == reply_ids,
        "rebuilt_tokens": len(reply_ids),
    }
    if prompt_delta:
        detail = f"billed {response.prompt_tokens} prompt tokens, rendered {len(prompt_ids)}"
        return Rebuilt(result=_violation(prompt, "prompt_mismatch", detail), **evidence)
    if abs(delta) > rules.max_count_delta or (delta and not rules.keep_near):
        detail = f"billed {response.completion_tokens} completion tokens, rebuilt {len(reply_ids)}"
        return Rebuilt(result=_violation(prompt, "count_mismatch", detail), **evidence)
    flags = _flags(response, delta, evidence["identical"])
    sample = Sample(
        id=f"{prompt.id}-{response.sample}",
        dataset=prompt.dataset,
        input_ids=(*prompt_ids, *reply_ids),
        spans=((len(prompt_ids), len(prompt_ids) + len(reply_ids)),),
        temperature=float(response.sampling.get("temperature", 1.0)),
        provider=response.provider,
        flags=flags,
        completion_tokens_billed=response.completion_tokens,
        conversation=prompt.id,
    )
    return Rebuilt(result=sample, **evidence)


def rebuild_trajectory(prompt: Prompt, codec: Codec) -> Iterator[Rebuilt]:
    """Yield the samples of a conversation that the target itself wrote.

    One sample holds all its replies as long as each turn's rendered prompt begins with the ids so
    far (ChatML does; a template that rewrites history does not): else a new sample starts.
    """
    ids: list[int] = []
    spans: list[Span] = []
    part = 0
    for index, message in enumerate(prompt.messages):
        if message["role"] != "assistant":
            continue
        rendered = codec.render_prompt(prompt.messages[:index], prompt.tools)
        if spans and rendered[: len(ids)] != ids:
            yield _trajectory_sample(prompt, part, ids, spans)
            spans, part = [], part + 1
        calls = tuple(message.get("tool_calls") or ())
        reply = ReplyParts(
            content=message.get("content"), reasoning=message.get("reasoning"), tool_calls=calls
        )
        reply_ids = codec.reply_ids(reply, "stop")
        ids = [*rendered, *reply_ids]
        spans = [*spans, (len(rendered), len(ids))]
    if not spans:
        yield _rejected(prompt, "no_reply", f"{len(prompt.messages)} messages")
        return
    yield _trajectory_sample(prompt, part, ids, spans)


def _trajectory_sample(prompt: Prompt, part: int, ids: list[int], spans: list[Span]) -> Rebuilt:
    sample = Sample(
        id=f"{prompt.id}-{part}",
        dataset=prompt.dataset,
        input_ids=tuple(ids),
        spans=tuple(spans),
        temperature=1.0,
        provider="imported",
        flags=(),
        completion_tokens_billed=None,
        conversation=prompt.id,
    )
    return Rebuilt(result=sample, rebuilt_tokens=sum(end - start for start, end in spans))


def _flags(response: Response, delta: int, identical: object) -> tuple[str, ...]:
    marks = (
        (TRUNCATED, response.finish_reason == "length"),
        (NEAR, delta != 0),
        (TRUE_IDS_DIFFER, identical is False),
    )
    return tuple(name for name, holds in marks if holds)


def _violation(prompt: Prompt, rule: str, detail: str) -> Violation:
    return Violation(id=prompt.id, dataset=prompt.dataset, rule=rule, detail=detail)


def _rejected(prompt: Prompt, rule: str, detail: str) -> Rebuilt:
    return Rebuilt(result=_violation(prompt, rule, detail))


def evidence_metrics(rebuilt: Sequence[Rebuilt]) -> dict[str, float | int]:
    """Return how far rebuilt ids can be trusted: against the bill, and against the truth if known.

    `mismatches_caught` are replies whose ids are not those sampled and whose count shows it;
    `mismatches_silent` have the right count and other ids.
    """
    counted = [r for r in rebuilt if r.count_delta is not None]
    known = [r for r in rebuilt if r.identical is not None]
    wrong = [r for r in known if not r.identical]
    caught = sum(1 for r in wrong if r.count_delta)
    exact = sum(1 for r in counted if r.count_delta == 0)
    metrics: dict[str, float | int] = {
        "count_exact_share": exact / len(counted) if counted else 1.0,
        "prompt_exact_share": (
            sum(1 for r in counted if r.prompt_delta == 0) / len(counted) if counted else 1.0
        ),
        "replies_of_known_ids": len(known),
    }
    if known:
        metrics |= {
            "identical_share": 1 - len(wrong) / len(known),
            "mismatches_caught": caught,
            "mismatches_silent": len(wrong) - caught,
        }
    return metrics
