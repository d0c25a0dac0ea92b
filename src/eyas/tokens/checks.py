"""The structural rules of a sample, one function each. Pure.

Each takes a sample and the `Context` and returns what is wrong in words, or None.
"""

from collections.abc import Callable
from dataclasses import dataclass

from eyas.records import Sample, Violation
from eyas.settings import Validate
from eyas.tokens.codecs import Codec
from eyas.tokens.rebuild import TRUNCATED

REPLACEMENT = "�"
LEAKED_MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>")
Check = Callable[[Sample, "Context"], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the rules need to know besides the sample."""

    codec: Codec
    rules: Validate


def check_ids_in_range(sample: Sample, context: Context) -> str | None:
    """Every id is one of the tokenizer's."""
    bad = [i for i in sample.input_ids if not 0 <= i < context.codec.vocab_size]
    return f"id {bad[0]} of {context.codec.vocab_size}" if bad else None


def check_spans(sample: Sample, context: Context) -> str | None:
    """Spans ascend, do not touch one another's inside, hold something, and lie in the sample."""
    edge = 1
    for start, end in sample.spans:
        if not edge <= start < end <= len(sample.input_ids):
            return f"span [{start}, {end}) in {len(sample.input_ids)} ids"
        edge = end
    return None if sample.spans else "no span"


def check_ends_with_stop(sample: Sample, context: Context) -> str | None:
    """Every reply ends with the end-of-turn id, unless the last one was cut."""
    spans = sample.spans[:-1] if TRUNCATED in sample.flags else sample.spans
    open_ends = [e for _, e in spans if sample.input_ids[e - 1] not in context.codec.stop_ids]
    return f"reply ends at {open_ends[0]} without the stop id" if open_ends else None


def check_no_special_inside(sample: Sample, context: Context) -> str | None:
    """No special id stands inside a reply but the stop id at its end."""
    for start, end in sample.spans:
        inside = sample.input_ids[start:end]
        body = inside[:-1] if inside[-1] in context.codec.stop_ids else inside
        if bad := context.codec.special_ids & set(body):
            return f"special id {min(bad)} inside the reply"
    return None


def check_no_replacement_character(sample: Sample, context: Context) -> str | None:
    """No reply holds U+FFFD; one that was cut may end in half a character."""
    for number, text in enumerate(_replies(sample, context)):
        last_of_cut = TRUNCATED in sample.flags and number == len(sample.spans) - 1
        if REPLACEMENT in (text.rstrip(REPLACEMENT) if last_of_cut else text):
            return f"U+FFFD in {text[:60]!r}"
    return None


def check_no_leaked_marker(sample: Sample, context: Context) -> str | None:
    """No reply spells a marker of the chat format as text."""
    for text in _replies(sample, context):
        if found := [m for m in LEAKED_MARKERS if m in text]:
            return f"{found[0]!r} as text"
    return None


def check_no_repetition_loop(sample: Sample, context: Context) -> str | None:
    """No reply ends in `repeat_times` equal runs of at most `repeat_ngram` tokens."""
    rules = context.rules
    for start, end in sample.spans:
        ids = sample.input_ids[start:end]
        if size := loop_size(ids, rules.repeat_ngram, rules.repeat_times):
            return f"the last {size} tokens repeat {rules.repeat_times} times"
    return None


def loop_size(ids: tuple[int, ...], max_ngram: int, times: int) -> int:
    """Return the length of the run that the ids end in `times` copies of, or 0."""
    for size in range(1, max_ngram + 1):
        tail = ids[-size * times :]
        if len(tail) == size * times and tail == tail[:size] * times:
            return size
    return 0


CHECKS: tuple[Check, ...] = (
    check_ids_in_range,
    check_spans,
    check_ends_with_stop,
    check_no_special_inside,
    check_no_replacement_character,
    check_no_leaked_marker,
    check_no_repetition_loop,
)
_FIRST = (check_ids_in_range, check_spans)  # the others index by spans and decode ids


def violations_of(sample: Sample, context: Context) -> list[Violation]:
    """Apply every rule; a loop is a flag unless `drop_loops`, all else is a rejection."""
    found: list[Violation] = []
    for check in CHECKS:
        if found and check not in _FIRST:
            break
        if detail := check(sample, context):
            rule = check.__name__.removeprefix("check_")
            is_loop = check is check_no_repetition_loop
            severity = "flag" if is_loop and not context.rules.drop_loops else "reject"
            found.append(
                Violation(
                    id=sample.id,
                    dataset=sample.dataset,
                    rule=rule,
                    detail=detail,
                    severity=severity,
                )
            )
    return found


def _replies(sample: Sample, context: Context) -> list[str]:
    parts = (context.codec.parse_reply(sample.input_ids[s:e]) for s, e in sample.spans)
    return [f"{part.reasoning or ''}{part.content or ''}" for part in parts]
