"""Held-out prompts: decoded plainly and with drafts, compared, and timed.

Source: eyas.drafter.acceptance says what a verification is and what it gains.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from eyas.drafter import acceptance as ac
from eyas.drafter.inference import DraftRunner
from eyas.drafter.verifier import Target
from eyas.records import Prompt

_BATCH = 16  # prompts decoded together
_TIMED_PER_SET = 2  # prompts of each data set that are decoded again, alone, for the clock
log = logging.getLogger("eyas")


class Decoding(TypedDict):
    """How long replies get, and what ends them."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One held-out prompt and what the target answers."""

    dataset: str
    prompt_id: str
    prompt: list[int]
    plain: ac.Decoded
    drafted: ac.Decoded

    @property
    def ids(self) -> list[int]:
        """Prompt and reply."""
        return [*self.prompt, *self.plain.ids]

    @property
    def lost_at(self) -> int | None:
        """The first token of the reply that drafting changed; None if it is lossless."""
        return ac.first_difference(self.plain.ids, self.drafted.ids)


def decode_all(
    target: Target,
    runner: DraftRunner,
    rendered: Sequence[tuple[Prompt, list[int]]],
    num_drafts: int,
    decoding: Decoding,
) -> list[HeldOut]:
    """Decode every prompt plainly and with the drafter; `rendered` pairs it with its ids."""
    paths: list[HeldOut] = []
    for begin in range(0, len(rendered), _BATCH):
        batch = rendered[begin : begin + _BATCH]
        prompts = [ids for _, ids in batch]
        plain = ac.decode_plain(target, prompts, **decoding)
        drafted = ac.decode_drafted(
            target, lambda: ac.drafting(runner), prompts, num_drafts=num_drafts, **decoding
        )
        paths += [
            HeldOut(dataset=p.dataset, prompt_id=p.id, prompt=ids, plain=one, drafted=other)
            for (p, ids), one, other in zip(batch, plain, drafted, strict=True)
        ]
        log.info("evaluate: %d of %d prompts decoded twice", len(paths), len(rendered))
    return paths


def wall_clock(
    target: Target,
    runner: DraftRunner,
    paths: Sequence[HeldOut],
    num_drafts: int,
    decoding: Decoding,
) -> dict[str, float | int]:
    """Time plain and drafted decoding, one sequence at a time, on a few prompts of each set.

    Passes are those of all prompts. `ids_equal` counts timed replies that equal the batch's.
    """
    timed = [
        path
        for dataset in dict.fromkeys(path.dataset for path in paths)
        for path in [p for p in paths if p.dataset == dataset][:_TIMED_PER_SET]
    ]
    plain_s = drafted_s = 0.0
    ids_equal = 0
    for path in timed:
        begun_s = time.perf_counter()
        (plain,) = ac.decode_plain(target, [path.prompt], **decoding)
        between_s = time.perf_counter()
        (drafted,) = ac.decode_drafted(
            target, lambda: ac.drafting(runner), [path.prompt], num_drafts=num_drafts, **decoding
        )
        plain_s += between_s - begun_s
        drafted_s += time.perf_counter() - between_s
        ids_equal += plain.ids == drafted.ids == path.plain.ids
    return {
        "plain_s": round(plain_s, 3),
        "drafted_s": round(drafted_s, 3),
        "ratio": round(plain_s / drafted_s, 4),
        "prompts": len(timed),
        "ids_equal": ids_equal,
        "batch_size": 1,
        "draft_steps": num_drafts,
        "forward_passes_plain": sum(path.plain.forward_passes for path in paths),
        "forward_passes_drafted": sum(path.drafted.forward_passes for path in paths),
    }


def describe(path: HeldOut, replayed: ac.Verified) -> dict[str, Any]:
    """Return one prompt's line: where its ids left plain decoding, and how near a tie was there."""
    lost_at, gaps = path.lost_at, path.plain.gaps
    return {
        "id": path.prompt_id,
        "dataset": path.dataset,
        "prompt_tokens": len(path.prompt),
        "reply_tokens": len(path.plain.ids),
        "lossless": lost_at is None,
        "lost_at_token": lost_at,
        "logit_gap_there": None if lost_at is None else gaps[min(lost_at, len(gaps) - 1)],
        "smallest_logit_gap": min(gaps),
        "ends_in_loop": ac.ends_in_loop(path.plain.ids),
        "verifications": len(path.drafted.verified.gains),
        "replay_equal": path.drafted.verified == replayed,
    }
