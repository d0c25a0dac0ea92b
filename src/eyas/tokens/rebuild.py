"""Text back to exact token ids, and the evidence that they are the right ones. Pure.

Prompt ids come from the target's own template; a reply is encoded apart from it, and its length is
compared with what was billed. Nothing searches text for assistant turns: spans are known by
construction. Source: docs/contracts.md; the rule's grounds are in tokens/codecs.

Text does not determine ids: a sampler may spell a word in other tokens than the tokenizer would.
The count shows most of these replies, never all, so the share that it misses is measured wherever
the true ids are known. Token texts settle it where the endpoint gives them (tokens/witness.py).
What a provider does to every reply and its bill is in its `ProviderRule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from eyas.errors import EyasError
from eyas.records import Message, Prompt, Response, Sample, Span, Violation
from eyas.settings import Validate
from eyas.tokens.borders import edit_reply
from eyas.tokens.codecs import Codec, ReplyParts
from eyas.tokens.codecs.replies import IMPLICIT_THINK_END
from eyas.tokens.differences import REPLACEMENT, difference, num_identical
from eyas.tokens.providers import AS_GIVEN, KEPT_FINISHES, ProviderRule, parts_of
from eyas.tokens.spellings import SPELLINGS, spell
from eyas.tokens.witness import Reading, RefusedError, read_witness

TRUNCATED = "truncated"  # cut by max_tokens: kept, but its last tokens carry no loss
HALF_CHARACTER = "half_character"  # cut inside a character, whose tokens are left out
NEAR = "near"  # the count differs from the bill by a little
TRUE_IDS_DIFFER = "true_ids_differ"  # the ids really sampled are known, and are others
WITNESS_REFUSED = "witness_refused"  # token texts came that do not prove right; the text decided
_HALF_CHARACTER_TOKENS = range(1, 4)  # a character has at most 4 bytes, one at least is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen when a reply was held against its bill, and against the truth if known."""

    provider: str
    billed_tokens: int
    rebuilt_tokens: int
    count_delta: int  # billed - offset - rebuilt, 0 where half a character explains it
    prompt_delta: int  # billed prompt tokens - offset - rendered ids
    half_character: bool
    identical: bool | None  # to the ids really sampled; None where unknown
    difference: str = ""  # from them: its cause, where it begins, both sides
    sampled_tokens: int = 0  # ids really sampled, where known
    same_tokens: int = 0  # of these, the rebuilt ones that are the same
    offset: int = 0  # what the provider bills a reply beyond its tokens
    text_identical: bool | None = None  # what `identical` would be without the token texts
    refused: str | None = None  # why token texts were; empty: they gave the ids; None: none came


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A sample, or why there is none; no evidence where nothing was billed or rebuilt."""

    result: Sample | Violation
    evidence: Evidence | None = None


def rebuild_response(
    prompt: Prompt,
    response: Response,
    codec: Codec,
    rules: Validate,
    provider: ProviderRule = AS_GIVEN,
) -> Rebuilt:
    """Return the sample of one answer, or the reason that it is none."""
    finish = response.finish_reason
    if finish not in KEPT_FINISHES:
        return _rejected(prompt, "finish_reason", finish)
    said = edit_reply(codec.normalise(parts_of(prompt, response)), finish, provider.edits)
    whole = _without_half_character(said) if finish == "length" else said
    try:
        prompt_ids = codec.render_prompt(prompt.messages, prompt.tools)
        if response.source == "imported" and response.true_ids is not None:
            return _imported(prompt, response, prompt_ids, response.true_ids)
        by_text = partial(_spelled, whole, response, codec, provider, is_half=whole != said)
        try:
            reading, refused = read_witness(response, whole, codec, provider), ""
        except RefusedError as error:
            reading, refused = by_text(), str(error)
        text = reading if refused or response.true_ids is None else by_text()
    except EyasError as error:
        return _rejected(prompt, "not_of_this_format", str(error))
    if _is_empty(reading.ids, codec):
        return _rejected(prompt, "empty_reply", f"finish_reason {finish}")
    evidence = _weigh(response, prompt_ids, reading, provider)
    if response.pieces is not None:
        identical = _weigh(response, prompt_ids, text, provider).identical
        evidence = replace(evidence, refused=refused, text_identical=identical)
    if evidence.identical is False:
        told = difference(response.true_ids or (), reading.ids, codec.decode)
        evidence = replace(evidence, difference=told)
    if reason := _reason_to_reject(response, evidence, rules, provider):
        return Rebuilt(result=_violation(prompt, *reason), evidence=evidence)
    flags = (*_flags(response, evidence), *reading.flags)
    return Rebuilt(
        result=_sample(prompt, response, prompt_ids, reading.ids, flags), evidence=evidence
    )


def _imported(
    prompt: Prompt, response: Response, prompt_ids: list[int], true_ids: Sequence[int]
) -> Rebuilt:
    """Return the sample of an answer that came with the ids really sampled: nothing is rebuilt."""
    flags = (TRUNCATED,) if response.finish_reason == "length" else ()
    return Rebuilt(result=_sample(prompt, response, prompt_ids, list(true_ids), flags))


def _spelled(
    reply: ReplyParts,
    response: Response,
    codec: Codec,
    provider: ProviderRule,
    *,
    is_half: bool,
) -> Reading:
    """Return the ids in the provider's first spelling if they fit the bill, or in what alone does.

    Tried are the spellings of arguments, and a thought that the calls ended without `</think>`,
    which no API tells. If none fits, or two do that differ, the first is taken, as it is.
    """
    finish = response.finish_reason
    offset = provider.offset_of(finish)

    def read(said: ReplyParts) -> Reading:
        ids = codec.reply_ids(said, finish)
        return Reading(ids=ids, flags=said.flags, offset=offset, half_character=is_half)

    def fits(reading: Reading) -> bool:
        return len(reading.ids) == response.completion_tokens - offset

    first = read(spell(reply, provider.spellings[0]))
    if fits(first) or not reply.tool_calls:
        return first
    endings = [reply]
    if reply.reasoning and not reply.content and IMPLICIT_THINK_END not in reply.flags:
        endings.append(replace(reply, flags=(*reply.flags, IMPLICIT_THINK_END)))
    tried = [read(spell(said, name)) for said in endings for name in provider.spellings]
    fitting = {tuple(reading.ids): reading for reading in tried if fits(reading)}
    return next(iter(fitting.values())) if len(fitting) == 1 else first


def _sample(
    prompt: Prompt,
    response: Response,
    prompt_ids: list[int],
    reply_ids: list[int],
    flags: tuple[str, ...],
) -> Sample:
    return Sample(
        id=f"{prompt.id}-{response.sample}",
        dataset=prompt.dataset,
        input_ids=(*prompt_ids, *reply_ids),
        spans=((len(prompt_ids), len(prompt_ids) + len(reply_ids)),),
        temperature=float(response.sampling.get("temperature", 1.0)),
        provider=response.provider,
        flags=flags,
        completion_tokens_billed=response.completion_tokens,
        conversation=prompt.conversation or prompt.id,
    )


def _without_half_character(reply: ReplyParts) -> ReplyParts:
    """Take the replacement characters off the last text."""
    if reply.content:
        return replace(reply, content=reply.content.rstrip(REPLACEMENT))
    return replace(reply, reasoning=reply.reasoning and reply.reasoning.rstrip(REPLACEMENT))


def _weigh(
    response: Response, prompt_ids: list[int], reading: Reading, provider: ProviderRule
) -> Evidence:
    reply_ids = reading.ids
    delta = response.completion_tokens - reading.offset - len(reply_ids)
    explained = reading.half_character and delta in _HALF_CHARACTER_TOKENS
    identical, known = None, list(response.true_ids or ())
    if response.true_ids is not None:
        known = known[: len(reply_ids)] if explained else known
        identical = known == reply_ids
    return Evidence(
        provider=response.provider,
        billed_tokens=response.completion_tokens,
        rebuilt_tokens=len(reply_ids),
        count_delta=0 if explained else delta,
        prompt_delta=response.prompt_tokens - provider.prompt_offset - len(prompt_ids),
        half_character=reading.half_character,
        identical=identical,
        sampled_tokens=len(known),
        same_tokens=len(known) if identical else num_identical(known, reply_ids),
        offset=reading.offset,
    )


def _reason_to_reject(
    response: Response, evidence: Evidence, rules: Validate, provider: ProviderRule
) -> tuple[str, str] | None:
    """Return the rule and what was seen; None for a reply to keep."""
    billed, off = response.prompt_tokens, evidence.count_delta
    if provider.rejected is not None:
        return "provider_template", provider.rejected
    if evidence.prompt_delta:
        rendered = billed - evidence.prompt_delta - provider.prompt_offset
        return "prompt_mismatch", f"billed {billed} prompt tokens, rendered {rendered}"
    if off and not (rules.keep_near and abs(off) <= rules.max_count_delta):
        seen = f"billed {evidence.billed_tokens} tokens, rebuilt {evidence.rebuilt_tokens}"
        offset = f", k = {evidence.offset:+d}" if evidence.offset else ""
        return "count_mismatch", seen + offset
    return None


def rebuild_trajectory(prompt: Prompt, codec: Codec) -> list[Rebuilt]:
    """Return the samples of a conversation that the target itself wrote, or one violation.

    One sample holds all replies as long as each turn's rendered prompt begins with the ids so far
    (ChatML does; a template that rewrites history does not): where it does not, a new one starts.
    Calls have the ids and the spelling of arguments that the next turn's prompt gives them.
    """
    samples: list[Rebuilt] = []
    spans: list[Span] = []
    start, tried = 0, list[list[int]]()  # of the last reply: where it begins, and all ids so far
    messages = _with_own_ids(prompt.messages, codec)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            rendered = codec.render_prompt(messages[:index], prompt.tools)
            replies = _spellings_of(message, codec)
        except EyasError as error:
            return [_rejected(prompt, "not_of_this_format", str(error))]
        if _is_empty(replies[0], codec):
            return [_rejected(prompt, "empty_reply", f"message {index}")]
        if tried:
            ids = next((ids for ids in tried if rendered[: len(ids)] == ids), None)
            spans.append((start, len(ids or tried[0])))
            if ids is None:
                samples.append(_trajectory_sample(prompt, len(samples), tried[0], spans))
                spans = []
        start, tried = len(rendered), [[*rendered, *reply] for reply in replies]
    if not tried:
        return [_rejected(prompt, "no_reply", f"{len(messages)} messages")]
    spans.append((start, len(tried[0])))
    return [*samples, _trajectory_sample(prompt, len(samples), tried[0], spans)]


def _with_own_ids(messages: Sequence[Message], codec: Codec) -> list[Message]:
    """Return the messages with calls, and what answers them, under the ids of the target's form."""
    own, number = dict[str, str](), 0
    renamed = []
    for message in messages:
        if calls := tuple(message.get("tool_calls") or ()):
            given = ReplyParts(content=None, tool_calls=calls, calls_before=number)
            named = codec.normalise(given).tool_calls
            own |= {c["id"]: n["id"] for c, n in zip(calls, named, strict=True) if "id" in c}
            message, number = message | {"tool_calls": list(named)}, number + len(calls)
        elif message.get("tool_call_id") in own:
            message = message | {"tool_call_id": own[message["tool_call_id"]]}
        renamed.append(message)
    return renamed


def _spellings_of(message: Message, codec: Codec) -> list[list[int]]:
    """Return the ids of a reply in every spelling of its arguments, as given first."""
    said = codec.normalise(_parts_of(message))
    names = SPELLINGS if said.tool_calls else SPELLINGS[:1]
    return [codec.reply_ids(spell(said, name), "stop") for name in names]


def _parts_of(message: Message) -> ReplyParts:
    return ReplyParts(
        content=message.get("content"),
        reasoning=message.get("reasoning_content") or message.get("reasoning"),
        tool_calls=tuple(message.get("tool_calls") or ()),
    )


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
        conversation=prompt.conversation or prompt.id,
    )
    return Rebuilt(result=sample)


def _is_empty(reply_ids: Sequence[int], codec: Codec) -> bool:
    """Tell whether a reply says nothing: a stop id and markers of parts are no words."""
    return all(i in codec.markup_ids or i in codec.stop_ids for i in reply_ids)


def _flags(response: Response, evidence: Evidence) -> tuple[str, ...]:
    marks = (
        (TRUNCATED, response.finish_reason == "length"),
        (HALF_CHARACTER, evidence.half_character),
        (NEAR, evidence.count_delta != 0),
        (TRUE_IDS_DIFFER, evidence.identical is False),
        (WITNESS_REFUSED, bool(evidence.refused)),
    )
    return tuple(name for name, holds in marks if holds)


def _violation(prompt: Prompt, rule: str, detail: str) -> Violation:
    return Violation(id=prompt.id, dataset=prompt.dataset, rule=rule, detail=detail)


def _rejected(prompt: Prompt, rule: str, detail: str) -> Rebuilt:
    return Rebuilt(result=_violation(prompt, rule, detail))
