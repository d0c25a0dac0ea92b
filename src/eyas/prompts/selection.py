"""Choose from parsed rows which become prompts and which are held out; pure and in a fixed order.

Every choice hangs on a row's own id: a row that comes or goes upstream moves no other row across
the held-out split and changes the order of none, so answers already paid for stay in use.
Source: docs/contracts.md (rows in = prompts + held out + rejects by reason + not selected).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eyas.errors import EyasError
from eyas.prompts.rows import ParsedRow, Reject
from eyas.prompts.screening import Screening, screens_of
from eyas.records import Message, Prompt, Tool, Violation, canonical_json, row_id
from eyas.settings import PartitionRule

KINDS = ("prompts", "trajectories")
_DETAIL_CHARS = 120
_SPLIT_BITS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one data set is selected; the fields are its parameters."""

    dataset: str
    kind: str  # prompts | trajectories
    licence: str
    heldout_permille: int
    max_rows: int | None  # of prompts; held-out rows come in addition
    seed: int
    partition: str | None  # null: by prompt length
    partitions: Mapping[str, PartitionRule]
    screening: Screening = field(default_factory=Screening)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What selection asks of the target."""

    count_tokens: Callable[[Sequence[Message], Sequence[Tool]], int]  # of the rendered prompt
    has_special_text: Callable[[str], bool]
    context_tokens: int  # prompt and answer together


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Every row that came in: to be sent, held out, dropped with its reason, or not needed."""

    rows_in: int
    prompts: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    rejects: tuple[Violation, ...]
    not_selected: int


def select(rows: Iterable[ParsedRow | Reject], plan: Plan, target: TargetFacts) -> Selection:
    """Cut, check, deduplicate, hold out, order by a seeded hash, screen, keep the first `max_rows`.

    Raises: EyasError for a plan with an unknown kind or partition, or without a licence.
    """
    check_plan(plan)
    seen: set[bytes] = set()
    kept: list[Prompt] = []
    heldout: list[Prompt] = []
    rejects: list[Violation] = []
    for number, row in enumerate(rows, start=1):
        found = _judge(number, row, plan, target)
        if isinstance(found, Prompt):
            found = _unless_seen(found, seen)
        if isinstance(found, Violation):
            rejects.append(found)
        elif is_heldout(found.conversation or found.id, plan.heldout_permille):
            heldout.append(_for_evaluation(found, target))
        else:
            kept.append(found)
    for side in (kept, heldout):
        side.sort(key=lambda prompt: (_fraction(f"order {plan.seed} {prompt.id}"), prompt.id))
    prompts, refused = _screened(kept, heldout, plan)
    return Selection(
        rows_in=len(kept) + len(heldout) + len(rejects),
        prompts=tuple(prompts),
        heldout=tuple(heldout),
        rejects=(*rejects, *refused),
        not_selected=len(kept) - len(prompts) - len(refused),
    )


def check_plan(plan: Plan) -> None:
    """Refuse a plan that no row could follow.

    Raises: EyasError naming the parameter, what it may be and what it is.
    """
    where = f"datasets.{plan.dataset}"
    if plan.kind not in KINDS:
        raise EyasError(f"{where}.kind: expected {' | '.join(KINDS)}, got '{plan.kind}'")
    if not plan.licence.strip():
        raise EyasError(
            f"{where}.licence: expected a licence, got an empty text",
            hint="name the licence of the upstream rows, as an SPDX identifier",
        )
    if plan.partition is not None and plan.partition not in plan.partitions:
        known = " | ".join(sorted(plan.partitions))
        raise EyasError(
            f"{where}.prepare.partition: expected null | {known}, got '{plan.partition}'"
        )


def cut_at_last_user(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages up to the last user's turn, that turn included; empty if there is none.

    user assistant user assistant -> user assistant user
    user assistant tool assistant -> user
    system                        -> (nothing)
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return tuple(messages[: places[-1] + 1]) if places else ()


def is_heldout(prompt_id: str, permille: int) -> bool:
    """Tell whether a row belongs to the evaluation split, by a hash of its id.

    The word in front keeps it independent of merge's validation split, which hashes the same ids.
    """
    return _fraction(f"heldout {prompt_id}") * 1000 < permille


def partition_of(tokens: int, partitions: Mapping[str, PartitionRule]) -> str | None:
    """Return the narrowest partition that takes a prompt of so many tokens, None if none does."""
    fitting = [
        (rule.max_prompt_tokens is None, rule.max_prompt_tokens or 0, name)
        for name, rule in partitions.items()
        if rule.max_prompt_tokens is None or tokens <= rule.max_prompt_tokens
    ]
    return min(fitting)[2] if fitting else None


def _screened(
    kept: Sequence[Prompt], heldout: Sequence[Prompt], plan: Plan
) -> tuple[list[Prompt], list[Violation]]:
    """Return the first `max_rows` prompts that no screen refuses, and those refused before that."""
    screens = screens_of(plan.screening, heldout)
    prompts, refused = list[Prompt](), list[Violation]()
    for prompt in kept:
        if plan.max_rows is not None and len(prompts) >= plan.max_rows:
            break
        found = next((f for f in (screen(prompt) for screen in screens) if f is not None), None)
        if found is None:
            prompts.append(prompt)
        else:
            refused.append(_violation(plan, prompt.id, found.reason, found.detail))
    return prompts, refused


def _judge(
    number: int, row: ParsedRow | Reject, plan: Plan, target: TargetFacts
) -> Prompt | Violation:
    """Turn a row into a prompt, or tell the first reason against it."""
    if isinstance(row, Reject):
        return _violation(plan, f"row {number}", row.reason, row.detail)
    asked = cut_at_last_user(row.messages)
    messages = asked if plan.kind == "prompts" else row.messages
    identity = row_id(plan.dataset, row.upstream_id, messages, row.tools)
    if not asked:
        return _violation(plan, identity, "no_user_turn", row.upstream_id)
    if plan.kind == "trajectories" and messages[-1]["role"] != "assistant":
        return _violation(plan, identity, "no_final_reply", f"ends with {messages[-1]['role']}")
    for text in _texts([messages, row.tools]):
        if target.has_special_text(text):
            return _violation(plan, identity, "special_token_text", text)
    try:
        tokens = target.count_tokens(messages, row.tools)
    except EyasError as error:
        return _violation(plan, identity, "template_refused", str(error))
    partition = plan.partition or partition_of(tokens, plan.partitions)
    room = _room(plan, target, partition)
    if partition is None or tokens > room:
        return _violation(plan, identity, "too_long", f"{tokens} tokens, room for {room}")
    return Prompt(
        id=identity,
        dataset=plan.dataset,
        upstream_id=row.upstream_id,
        messages=messages,
        tools=row.tools,
        prompt_tokens=tokens,
        partition=partition,
        licence=plan.licence,
        conversation=row.conversation,
    )


def _room(plan: Plan, target: TargetFacts, partition: str | None) -> int:
    """Return how long a prompt may be; a trajectory needs no room for an answer."""
    if partition is None:
        return max((rule.max_prompt_tokens or 0 for rule in plan.partitions.values()), default=0)
    answer = plan.partitions[partition].max_tokens if plan.kind == "prompts" else 0
    return target.context_tokens - answer


def _unless_seen(prompt: Prompt, seen: set[bytes]) -> Prompt | Violation:
    """Drop a row whose messages and tools were there before, whatever its upstream id."""
    content = hashlib.sha256(canonical_json([prompt.messages, prompt.tools])).digest()
    if content in seen:
        return Violation(
            id=prompt.id, dataset=prompt.dataset, rule="duplicate", detail=prompt.upstream_id
        )
    seen.add(content)
    return prompt


def _for_evaluation(prompt: Prompt, target: TargetFacts) -> Prompt:
    """Cut a held-out trajectory at its last user turn, so that it can be answered; its id stays."""
    messages = cut_at_last_user(prompt.messages)
    if messages == prompt.messages:
        return prompt
    tokens = target.count_tokens(messages, prompt.tools)
    return replace(prompt, messages=messages, prompt_tokens=tokens)


def _violation(plan: Plan, identity: str, rule: str, detail: str) -> Violation:
    return Violation(id=identity, dataset=plan.dataset, rule=rule, detail=detail[:_DETAIL_CHARS])


def _texts(value: object) -> Iterator[str]:
    """Yield every string in a JSON value, keys too."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            waiting += item


def _fraction(text: str) -> float:
    """Return a hash of text as a number in [0, 1)."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[: _SPLIT_BITS // 8], "big") / (1 << _SPLIT_BITS)
