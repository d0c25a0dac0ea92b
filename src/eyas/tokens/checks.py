"""The structural rules of a sample, one function each. Pure.

Each takes a sample and the `Context` and returns what is wrong in words, or None.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from eyas.records import Sample, Tool, Violation
from eyas.settings import Validate
from eyas.tokens.codecs import Codec, ReplyParts
from eyas.tokens.differences import REPLACEMENT
from eyas.tokens.rebuild import TRUNCATED
from eyas.tokens.schema import call_fault

_LEAKED_MARKER = re.compile(
    r"<\|(?:im_[a-z]+|tool_calls?_[a-z_]+|media_[a-z]+|endoftext|reserved_token_\d+)\|>|</?think>"
)
# Written as servers do, without spaces: code about such an interface hardly spells them so.
_API_FRAGMENTS = (
    ": OPENROUTER PROCESSING",
    "data: [DONE]",
    'data: {"id":"',
    '{"id":"gen-',
    '"object":"chat.completion',
)
Check = Callable[[Sample, "Context"], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the rules need to know besides the sample."""

    codec: Codec
    rules: Validate
    tools: Mapping[str, Sequence[Tool]] = field(default_factory=dict)  # by prompt id


def check_ids_in_range(sample: Sample, context: Context) -> str | None:
    """Every id is one of the tokenizer's."""
    size, ids = context.codec.vocab_size, sample.input_ids or (-1,)
    worst = max(ids) if min(ids) >= 0 else min(ids)
    return None if 0 <= worst < size else f"id {worst}, expected 0 to {size - 1}"


def check_spans(sample: Sample, context: Context) -> str | None:
    """Spans ascend, do not touch one another's inside, hold something, and lie in the sample."""
    edge = 1
    for start, end in sample.spans:
        if not edge <= start < end <= len(sample.input_ids):
            return f"span [{start}, {end}) in {len(sample.input_ids)} ids"
        edge = end
    return None if sample.spans else "no span"


def check_says_something(sample: Sample, context: Context) -> str | None:
    """Every reply has more than its end and the markers of its parts."""
    nothing = context.codec.markup_ids | set(context.codec.stop_ids)
    silent = [s for s, e in sample.spans if nothing.issuperset(sample.input_ids[s:e])]
    return f"nothing is said in the reply at {silent[0]}" if silent else None


def check_ends_with_stop(sample: Sample, context: Context) -> str | None:
    """Every reply ends with the end-of-turn id, unless the last one was cut."""
    spans = sample.spans[:-1] if TRUNCATED in sample.flags else sample.spans
    open_ends = [e for _, e in spans if sample.input_ids[e - 1] not in context.codec.stop_ids]
    return f"reply ends at {open_ends[0]} without the stop id" if open_ends else None


def check_no_special_inside(sample: Sample, context: Context) -> str | None:
    """No special id stands inside a reply but the stop id at its end."""
    for start, end in sample.spans:
        body = _body(sample.input_ids[start:end], context)
        if bad := context.codec.special_ids.intersection(body):
            return f"special id {min(bad)} inside the reply"
    return None


def check_markup_balanced(sample: Sample, context: Context) -> str | None:
    """Reasoning that began has ended, tool sections are whole and in order; a cut ends anywhere."""
    for number, (start, end) in enumerate(sample.spans, start=1):
        is_cut = TRUNCATED in sample.flags and number == len(sample.spans)
        body = _body(sample.input_ids[start:end], context)
        if fault := context.codec.markup_fault(body, is_cut=is_cut):
            return fault
    return None


def check_no_replacement_character(sample: Sample, context: Context) -> str | None:
    """No reply holds U+FFFD, which stands for lost bytes; rebuild takes it off a cut end."""
    for text in _replies(sample, context):
        if (at := text.find(REPLACEMENT)) >= 0:
            return f"U+FFFD in {text[max(0, at - 30) : at + 30]!r}"
    return None


def check_no_leaked_marker(sample: Sample, context: Context) -> str | None:
    """No reply spells a marker of the chat format as text."""
    for text in _replies(sample, context):
        if found := _LEAKED_MARKER.search(text):
            return f"{found.group()!r} as text"
    return None


def check_no_api_fragment(sample: Sample, context: Context) -> str | None:
    """No reply holds a piece of the answer that carried it."""
    for text in _replies(sample, context):
        if found := [fragment for fragment in _API_FRAGMENTS if fragment in text]:
            return f"{found[0]!r} in the text"
    return None


def check_no_repetition_loop(sample: Sample, context: Context) -> str | None:
    """No reply ends in a loop of at most `repeat_ngram` tokens."""
    rules = context.rules
    for start, end in sample.spans:
        ids = _body(sample.input_ids[start:end], context)
        if period := loop_period(ids, rules.repeat_ngram, rules.repeat_times):
            window = rules.repeat_ngram * rules.repeat_times
            return f"the last {window} tokens have a period of {period}"
    return None


def loop_period(ids: Sequence[int], max_ngram: int, times: int) -> int:
    """Return the period of the last `max_ngram * times` ids if it is at most `max_ngram`, or 0.

    The window is one for all periods: an answer of 10000, or a line of ten dashes, is no loop.

    | max_ngram, times | last ids    | period |
    |------------------|-------------|--------|
    | 3, 2             | 1 2 1 2 1 2 | 2      |
    | 3, 2             | 1 2 3 1 2 3 | 3      |
    | 3, 2             | 9 9 9 7 7 7 | 0      |
    """
    window = ids[-max_ngram * times :]
    if len(window) < max_ngram * times:
        return 0
    periods = range(1, max_ngram + 1)
    return next((p for p in periods if window[p:] == window[:-p]), 0)


def check_arguments_fit(sample: Sample, context: Context) -> str | None:
    """The arguments of every call are JSON that the declared schema allows; a flag."""
    tools = context.tools.get(sample.id.rpartition("-")[0], ())
    for part in _parsed(sample, context):
        for call in part.tool_calls:
            if fault := call_fault(call, tools):
                return fault
    return None


CHECKS: tuple[Check, ...] = (
    check_ids_in_range,
    check_spans,
    check_says_something,
    check_ends_with_stop,
    check_no_special_inside,
    check_markup_balanced,
    check_no_replacement_character,
    check_no_leaked_marker,
    check_no_api_fragment,
    check_no_repetition_loop,
    check_arguments_fit,
)
_FIRST = (check_ids_in_range, check_spans)  # the others index by spans and decode ids


def violations_of(sample: Sample, context: Context) -> list[Violation]:
    """Apply every rule up to the first that rejects; ids and spans are both told."""
    found: list[Violation] = []
    for check in CHECKS:
        if check not in _FIRST and any(v.severity == "reject" for v in found):
            break
        if detail := check(sample, context):
            found.append(
                Violation(
                    id=sample.id,
                    dataset=sample.dataset,
                    rule=check.__name__.removeprefix("check_"),
                    detail=detail,
                    severity="flag" if _only_flags(check, context) else "reject",
                )
            )
    return found


def _only_flags(check: Check, context: Context) -> bool:
    """Tell whether a rule marks: faulty arguments are what the target says, loops by setting."""
    if check is check_no_repetition_loop:
        return not context.rules.drop_loops
    return check is check_arguments_fit


def _body(reply: Sequence[int], context: Context) -> Sequence[int]:
    """Return a reply without the stop id at its end."""
    return reply[:-1] if reply[-1] in context.codec.stop_ids else reply


def _replies(sample: Sample, context: Context) -> list[str]:
    """Return all text of each reply: reasoning, content, and the calls' names and arguments."""
    texts = []
    for part in _parsed(sample, context):
        functions = [call["function"] for call in part.tool_calls]
        texts.append(f"{part.reasoning or ''}{part.content or ''}")
        texts += [text for f in functions for text in (f["name"], f["arguments"])]
    return texts


def _parsed(sample: Sample, context: Context) -> list[ReplyParts]:
    return [_parse(context.codec, tuple(sample.input_ids[s:e])) for s, e in sample.spans]


@lru_cache(maxsize=64)  # several rules read the same replies
def _parse(codec: Codec, ids: tuple[int, ...]) -> ReplyParts:
    return codec.parse_reply(ids)
