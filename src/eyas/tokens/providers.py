"""What each provider does to replies and to their bill, found from statistics alone. Pure.

A provider's rule is the edits at the borders of texts that undo its white space, the offset `k`
(billed - rebuilt), and the offset of its prompt counts. A rule is sought in a sample of replies:

1. A space at 90 % of the borders of a kind is an artefact: a server that joins tokens with spaces
   left it. One is stripped, unless fewer replies then match the bill.
   Assumption: no target begins 90 % of its texts with a space; counts hardly show it (` The` is
   one token, as `The` is), so `eyas` trusts the share.
2. Any other edit must show in the bill: it makes clearly more replies match, at whatever constant
   offset. Of two that match alike nobody can choose: then there is no rule.
3. A spelling of arguments that fits nine in ten calls is the provider's; if none does, each reply
   takes the one that fits it.
4. `k` is the offset at which most replies match. The stop token may go unbilled, so replies that
   were cut may have k + 1.

A rule under which less than 60 % of the replies match is none. Without a rule texts and bill are
taken as given, so most rows fail the bill, and the gate tells. What no count shows stays unknown:
white space that the text's last token swallows (`.` and newline are one), or a token that is lost
from every reply, which looks like an offset; the verdict then names both.
A provider whose prompt counts do not follow our rendering has another template, and is rejected.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from eyas.errors import EyasError
from eyas.records import Prompt, Response
from eyas.tokens.borders import EDITS, PLACES, STRIP_SPACE, Edit, edit_text, has_space
from eyas.tokens.borders import places_of as borders_of
from eyas.tokens.codecs import Codec, ReplyParts, num_calls
from eyas.tokens.spellings import SPELLINGS, spell

R = TypeVar("R")
KEPT_FINISHES = ("stop", "length", "tool_calls")
MIN_REPLIES = 20  # fewer tell nothing
_TOLD_CALLS = 10  # the same of replies whose count depends on the spelling
_SAMPLE, _DELTAS_SHOWN = 200, 5
_WINDOW = 80  # characters: an edit at a border changes no token beyond
_MAX_OFFSET = 4
_MAX_PROMPT_OFFSET = 3  # Moonshot's verifier of its vendors accepts 0 to 3 tokens over
_ARTEFACT_SHARE = 0.9
_CLEAR_SHARE = 0.6
_TEMPLATE_SHARE = 0.5
_MARGIN_SHARE, _MARGIN_REPLIES = 0.05, 3  # how many more must match before an edit is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderRule:
    """How to read one provider's replies and bill; the default takes both as given."""

    edits: tuple[Edit, ...] = ()
    offset: int = 0  # k, tokens: billed - rebuilt
    cut_offset: int = 0  # the same where max_tokens cut the reply: no stop token to bill
    prompt_offset: int = 0
    spellings: tuple[str, ...] = SPELLINGS  # of arguments, in the order in which they are tried
    rejected: str | None = None  # why no reply of this provider can be used

    def offset_of(self, finish_reason: str) -> int:
        """Return the offset of a reply."""
        return self.cut_offset if finish_reason == "length" else self.offset


AS_GIVEN = ProviderRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A hypothesis and how many of the sampled replies match the bill under it."""

    edits: tuple[Edit, ...]
    offset: int
    cut_offset: int
    matched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A provider's rule and what it rests on."""

    rule: ProviderRule
    replies: int  # sampled, of those that this format can spell
    best: Tried  # taken if it is clear
    as_given: Tried
    runner_up: Tried  # the same edits at the next best offset
    verdict: str  # in words: what was taken, or why nothing was
    spaced_share: Mapping[str, float]  # borders with a space / borders, by place
    prompt_deltas: Mapping[str, int]  # the most common: billed - rendered prompt tokens -> replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a reply tells: its bill, its count in each spelling, and what edits would change."""

    finished: bool
    billed: int
    prompt_delta: int
    counts: Mapping[str, int]  # ids, by spelling of the arguments
    changes: Mapping[Edit, int] = field(default_factory=dict)  # borders that are not there: absent
    spaced: frozenset[str] = frozenset()


def rows_to_look_at(responses: Iterable[Response]) -> frozenset[int]:
    """Return the numbers of the replies that `find_rules` looks at: the others need not be held."""
    held: dict[str, list[int]] = defaultdict(list)
    for number, response in enumerate(responses):
        if response.finish_reason in KEPT_FINISHES:
            held[response.provider].append(number)
    return frozenset(number for numbers in held.values() for number in _spread(numbers))


def _spread(rows: Sequence[R]) -> list[R]:
    num = min(len(rows), _SAMPLE)
    return [rows[i * len(rows) // num] for i in range(num)]


def find_rules(pairs: Iterable[tuple[Prompt, Response]], codec: Codec) -> dict[str, Finding]:
    """Return what there is to know of each provider, from a sample of its replies."""
    held: dict[str, list[tuple[Prompt, Response]]] = defaultdict(list)
    for prompt, response in pairs:
        if response.finish_reason in KEPT_FINISHES:
            held[response.provider].append((prompt, response))
    found = {}
    for provider, rows in sorted(held.items()):
        seen = [s for p, r in _spread(rows) if (s := look_at(p, r, codec)) is not None]
        found[provider] = find_rule(provider, seen)
    return found


def parts_of(prompt: Prompt, response: Response) -> ReplyParts:
    """Return the parts of a reply as they came."""
    return ReplyParts(
        content=response.content,
        reasoning=response.reasoning,
        tool_calls=response.tool_calls,
        calls_before=num_calls(prompt.messages),
    )


def look_at(prompt: Prompt, response: Response, codec: Codec) -> Seen | None:
    """Return what a reply tells, or None where this format cannot spell it."""
    reply, finish = codec.normalise(parts_of(prompt, response)), response.finish_reason
    try:
        counts = {
            name: len(codec.reply_ids(spell(reply, name), finish))
            for name in (SPELLINGS if reply.tool_calls else SPELLINGS[:1])
        }
        rendered = len(codec.render_prompt(prompt.messages, prompt.tools))
        places = borders_of(reply, finish)
        texts = {place: getattr(reply, place.partition("_")[0]) for place in places}
        changes = {
            (place, edit): _change(text, place, edit, codec)
            for place, text in texts.items()
            for edit in EDITS
        }
    except EyasError:
        return None
    return Seen(
        finished=finish != "length",
        billed=response.completion_tokens,
        prompt_delta=response.prompt_tokens - rendered,
        counts=counts,
        changes=changes,
        spaced=frozenset(place for place, text in texts.items() if has_space(text, place)),
    )


def _change(text: str, place: str, edit: str, codec: Codec) -> int:
    """Return how many ids an edit adds to a text, from the characters near the border."""
    near = text[:_WINDOW] if place.endswith("_start") else text[-_WINDOW:]
    edited = edit_text(near, place, edit)
    if edited == near:
        return 0
    before, after = (
        len(codec.reply_ids(ReplyParts(content=text), "length")) for text in (near, edited or near)
    )
    return after - before if edited else -1


def find_rule(provider: str, seen: Sequence[Seen]) -> Finding:
    """Return the rule of one provider, from what its replies tell."""
    shares = _spaced_shares(seen)
    stripped = _with_artefacts_stripped(seen, shares)
    best = _with_shown_edits(seen, stripped)
    rival = _rival(seen, stripped, best)
    is_many = len(seen) >= MIN_REPLIES and best.matched >= _CLEAR_SHARE * len(seen)
    is_clear = is_many and rival is None
    rival = rival or _plainer_offset(seen, best)
    deltas = Counter(one.prompt_delta for one in seen)
    prompt_offset, rejected = _prompt_rule(provider, deltas)
    rule = ProviderRule(prompt_offset=prompt_offset, rejected=rejected)
    if is_clear:
        rule = replace(
            rule,
            edits=best.edits,
            offset=best.offset,
            cut_offset=best.cut_offset,
            spellings=_spellings(seen, best),
        )
    others = [t for t in _offsets(seen, best.edits) if t.offset != best.offset]
    return Finding(
        rule=rule,
        replies=len(seen),
        best=best,
        as_given=_best(seen, ()),
        runner_up=max(others, key=lambda t: t.matched),
        verdict=_verdict(best, rival, len(seen), is_clear=is_clear),
        spaced_share=shares,
        prompt_deltas={f"{d:+d}": n for d, n in deltas.most_common(_DELTAS_SHOWN)},
    )


def _best(seen: Sequence[Seen], edits: Sequence[Edit]) -> Tried:
    """Return the offsets at which most replies match; of equals the plainest."""
    return max(_offsets(seen, edits), key=lambda t: (t.matched, -_oddity(t)))


def _oddity(tried: Tried) -> int:
    return 2 * abs(tried.offset) + (tried.offset != tried.cut_offset)


def _offsets(seen: Sequence[Seen], edits: Sequence[Edit]) -> list[Tried]:
    """Return how many replies match at each offset, with the stop token billed and unbilled."""
    ended, cut = Counter[int](), Counter[int]()
    for one in seen:
        changed = one.billed - _change_of(one, edits)
        deltas = {changed - count for count in one.counts.values()}
        (ended if one.finished else cut).update(deltas)
    return [
        Tried(edits=tuple(edits), offset=k, cut_offset=c, matched=ended[k] + cut[c])
        for k in range(-_MAX_OFFSET, _MAX_OFFSET + 1)
        for c in (k, k + 1)
    ]


def _change_of(one: Seen, edits: Sequence[Edit]) -> int:
    return sum(one.changes.get(edit, 0) for edit in edits)


def _spellings(seen: Sequence[Seen], best: Tried) -> tuple[str, ...]:
    """Return the spelling that nearly all calls have, or all of them, the most common first."""
    fits, told = Counter[str](), 0
    for one in seen:
        offset = best.offset if one.finished else best.cut_offset
        wanted = one.billed - offset - _change_of(one, best.edits)
        fitting = [name for name, count in one.counts.items() if count == wanted]
        if fitting and len(set(one.counts.values())) > 1:
            fits.update(fitting)
            told += 1
    ordered = tuple(sorted(SPELLINGS, key=lambda name: -fits[name]))
    is_one = told >= _TOLD_CALLS and fits[ordered[0]] >= _ARTEFACT_SHARE * told
    return ordered[:1] if is_one else ordered


def _spaced_shares(seen: Sequence[Seen]) -> dict[str, float]:
    """Return by place the share of the borders that have a space."""
    there = Counter(place for one in seen for place in {place for place, _ in one.changes})
    spaced = Counter(place for one in seen for place in one.spaced)
    return {p: round(spaced[p] / there[p], 4) for p in PLACES if there[p] >= MIN_REPLIES}


def _with_artefacts_stripped(seen: Sequence[Seen], shares: Mapping[str, float]) -> Tried:
    """Strip the space at the places where nearly all have one, unless the bill objects."""
    best, slack = _best(seen, ()), len(seen) // 100
    for place, share in shares.items():
        if share >= _ARTEFACT_SHARE:
            stripped = _best(seen, (*best.edits, (place, STRIP_SPACE)))
            best = stripped if stripped.matched >= best.matched - slack else best
    return best


def _with_shown_edits(seen: Sequence[Seen], best: Tried) -> Tried:
    """Add the edits that make clearly more replies match, the best one first."""
    while free := _free_edits(best.edits):
        edited = max((_best(seen, (*best.edits, e)) for e in free), key=lambda t: t.matched)
        if edited.matched < best.matched + _margin(seen):
            break
        best = edited
    return best


def _rival(seen: Sequence[Seen], stripped: Tried, shown: Tried) -> Tried | None:
    """Return a hypothesis that matches about as well with one of the shown edits replaced."""
    for edit in shown.edits[len(stripped.edits) :]:
        kept = tuple(e for e in shown.edits if e != edit)
        others = [_best(seen, (*kept, e)) for e in _free_edits(kept) if e != edit]
        best = max(others, key=lambda t: t.matched)
        if best.matched > shown.matched - _margin(seen):
            return best
    return None


def _plainer_offset(seen: Sequence[Seen], best: Tried) -> Tried | None:
    """Return a hypothesis that explains a part of the offset by an edit: one token lost a reply.

    The rule stays, since nothing tells the two apart; a reader of the account may know better.
    """
    if not best.offset:
        return None
    others = [_best(seen, (*best.edits, edit)) for edit in _free_edits(best.edits)]
    plainer = [t for t in others if abs(t.offset) < abs(best.offset)]
    rival = max(plainer, key=lambda t: t.matched, default=None)
    return rival if rival and rival.matched > best.matched - _margin(seen) else None


def _free_edits(edits: Sequence[Edit]) -> list[Edit]:
    edited = {place for place, _ in edits}
    return [(place, edit) for place in PLACES if place not in edited for edit in EDITS]


def _margin(seen: Sequence[Seen]) -> int:
    return max(_MARGIN_REPLIES, int(_MARGIN_SHARE * len(seen)))


def _prompt_rule(provider: str, deltas: Counter[int]) -> tuple[int, str | None]:
    """Return the constant by which prompts are billed over, and why the provider is rejected."""
    replies = deltas.total()
    if replies < MIN_REPLIES:
        return 0, None
    mode, count = deltas.most_common(1)[0]
    is_constant = 0 < mode <= _MAX_PROMPT_OFFSET and count >= _CLEAR_SHARE * replies
    offset = mode if is_constant else 0
    if deltas[offset] >= _TEMPLATE_SHARE * replies:
        return offset, None
    off = replies - deltas[offset]
    return 0, (
        f"provider '{provider}': prompts billed otherwise than rendered in {off} of {replies} "
        f"replies, most often by {mode:+d} tokens: another prompt template than the target's"
    )


def _verdict(best: Tried, rival: Tried | None, replies: int, *, is_clear: bool) -> str:
    """Return in words which rule was taken, or why none was."""
    if replies < MIN_REPLIES:
        return f"no rule: {replies} replies, at least {MIN_REPLIES} are needed"
    words = f"{_named(best)} in {best.matched} of {replies} replies ({best.matched / replies:.1%})"
    if rival is not None:
        words += f"; not told apart from others: {_named(rival)} in {rival.matched}"
    return words if is_clear else f"no rule: at best {words}"


def _named(tried: Tried) -> str:
    edits = ", ".join(f"{edit} at {place}" for place, edit in tried.edits) or "as given"
    cut = "" if tried.cut_offset == tried.offset else f" ({tried.cut_offset:+d} where cut)"
    return f"{edits}, k = {tried.offset:+d}{cut}"
