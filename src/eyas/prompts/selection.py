"""Choose from parsed rows which become prompts and which are held out; pure and in a fixed order.

Every choice hangs on a row's own id, so a row that comes or goes upstream moves no other row to the
other side of the held-out split and changes the order of none.
Source: docs/contracts.md, design section 3 (rows in = rows out + rejects by reason).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eyas.errors import EyasError
from eyas.prompts.schemas import ParsedRow, Reject
from eyas.records import Message, Prompt, Tool, Violation, canonical_json, row_id
from eyas.settings import PartitionRule

KINDS = ("prompts", "trajectories")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one data set is selected; fields are those of its parameters."""

    dataset: str
    kind: str  # prompts | trajectories
    licence: str
    heldout_permille: int
    max_rows: int | None  # of prompts; held-out rows come in addition
    seed: int
    partition: str | None  # null: by prompt length
    partitions: Mapping[str, PartitionRule]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What selection must know of the target."""

    count_tokens: Callable[[Sequence[Message], Sequence[Tool]], int]  # rendered, header included
    has_special_text: Callable[[str], bool]
    context_tokens: int | None  # prompt and answer together; null: no limit known


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Every row that came in: sent, held out, dropped with its reason, or not needed."""

    prompts: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    rejects: tuple[Violation, ...]
    not_selected: int
    rows_in: int


def select(rows: Iterable[ParsedRow | Reject], plan: Plan, target: TargetFacts) -> Selection:
    """Cut, deduplicate, check, split and draw.

    Raises: EyasError for an unknown kind or partition.
    """
    check_plan(plan)
    seen: set[bytes] = set()
    kept: list[Prompt] = []
    heldout: list[Prompt] = []
    rejects: list[Violation] = []
    rows_in = 0
    for row in rows:
        rows_in += 1
        found = _judge(row, plan, target, seen)
        if isinstance(found, Violation):
            rejects.append(found)
        elif is_heldout(found.id, plan.heldout_permille):
            heldout.append(found)
        else:
            kept.append(found)
    kept.sort(key=lambda prompt: _rank(prompt.id, plan.seed))
    heldout.sort(key=lambda prompt: _rank(prompt.id, plan.seed))
    prompts = kept if plan.max_rows is None else kept[: plan.max_rows]
    return Selection(
        prompts=tuple(prompts),
        heldout=tuple(heldout),
        rejects=tuple(rejects),
        not_selected=len(kept) - len(prompts),
        rows_in=rows_in,
    )
