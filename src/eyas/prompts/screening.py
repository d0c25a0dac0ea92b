"""Screens that a prompt passes on its way into the selection; each knows one reason to refuse it.

Pure. A screen is asked in the selection's own order, which hangs on ids and not on the order of the
upstream rows, and it is asked no more once `max_rows` prompts are found.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from eyas.prompts.chat import asked_text
from eyas.prompts.rows import ParsedRow, Reject
from eyas.records import Prompt

Screen = Callable[[Prompt], Reject | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """What is looked for, beyond equal rows; None and empty look for nothing."""

    near_duplicate_jaccard: float | None = None
    passage_words: int | None = None
    against_heldout: bool = True
    evaluation: tuple[ParsedRow, ...] = ()


def screens_of(screening: Screening, heldout: Sequence[Prompt]) -> list[Screen]:
    """Return the screens to be asked, the cheaper one first."""
    screens: list[Screen] = []
    if screening.passage_words is not None:
        own = heldout if screening.against_heldout else ()
        screens.append(_against([*screening.evaluation, *own], screening.passage_words))
    if screening.near_duplicate_jaccard is not None:
        screens.append(_near(heldout, screening.near_duplicate_jaccard))
    return screens


def _against(evaluation: Iterable[ParsedRow | Prompt], num_words: int) -> Screen:
    from eyas.prompts.overlap import passages_of  # needs numpy: only where asked for

    passages = passages_of((asked_text(row.messages) for row in evaluation), num_words)

    def screen(prompt: Prompt) -> Reject | None:
        found = passages.found_in(asked_text(prompt.messages))
        return Reject(reason="evaluation_overlap", detail=found) if found else None

    return screen


def _near(heldout: Iterable[Prompt], jaccard: float) -> Screen:
    from eyas.prompts.near import Seen  # needs scipy: only where asked for

    seen = Seen(jaccard)
    for prompt in heldout:
        seen.like(prompt.id, _compared_text(prompt))

    def screen(prompt: Prompt) -> Reject | None:
        found = seen.like(prompt.id, _compared_text(prompt))
        return Reject(reason="near_duplicate", detail=f"of {found}") if found else None

    return screen


def _compared_text(prompt: Prompt) -> str:
    """Return what sets a prompt apart: the turns and the names of its tools, no system prompt."""
    said = [str(m["content"] or "") for m in prompt.messages if m["role"] != "system"]
    return "\n".join([*said, *(tool["function"]["name"] for tool in prompt.tools)])
