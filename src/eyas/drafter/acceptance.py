"""Acceptance by real draft-verify decoding, greedy, a batch of sequences at once, and by replay.

A verification is one forward pass of the target over the newest token and a chain of K drafts; it
gains the drafts that equal the target's own choices, and one token more (the bonus). Acceptance
length (tau) = tokens gained / verifications; the token of the prefill is not counted. In a replay
the target's answers are read from its plain greedy path; greedy drafts depend on committed tokens
alone, so its verifications are those of the real loop (a test and the evaluate stage assert it).

Legend: T tokens, L aux layers, D hidden size, V target vocabulary.
Source: speculative decoding https://arxiv.org/abs/2211.17192, EAGLE-3 https://arxiv.org/abs/2503.01840.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.inference import DraftRunner
from eyas.drafter.lookup import Lookup
from eyas.drafter.verifier import Target

BOOTSTRAP_ROUNDS = 1000
LOOP_NGRAM, LOOP_TIMES = 16, 3  # a reply that ends in three equal runs of at most 16 tokens
Propose = Callable[[list[int], Tensor, int], list[int]]  # ids, aux of all but the last, K


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The verifications of one reply, in order."""

    gains: tuple[int, ...]  # accepted drafts + bonus token
    accepted: tuple[int, ...]  # drafts that are the reply's tokens
    judged: tuple[int, ...]  # drafts up to the first refused one, those past the end left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One reply, and from plain decoding the logits' leads and the aux states along its path."""

    ids: tuple[int, ...]
    forward_passes: int
    verified: Verified = Verified(gains=(), accepted=(), judged=())
    gaps: tuple[float, ...] = ()  # per token: lead of the best logit over the second
    aux_TLD: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _Reply:
    """A reply being decoded."""

    path: list[int]  # prompt and reply
    start: int
    end: int
    stop_ids: Sequence[int]
    aux: list[Tensor] = field(default_factory=list)  # of plain decoding: of all but the last token
    gaps: list[float] = field(default_factory=list)
    verdicts: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.path) >= self.end or self.path[-1] in self.stop_ids

    def take(self, logits_V: Tensor) -> None:
        """Append the best token."""
        best, second = logits_V.topk(2)[0].tolist()
        self.gaps.append(best - second)
        self.path.append(int(logits_V.argmax()))


@torch.inference_mode()
def decode_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> list[Decoded]:
    """Decode a batch greedily, one token a forward pass."""
    replies = _prefill(target, prompts, max_new_tokens, stop_ids)
    while busy := [row for row, reply in enumerate(replies) if not reply.done]:
        seen = target.forward(busy, [replies[row].path[-1:] for row in busy])
        for row, (logits_TV, aux_TLD) in zip(busy, seen, strict=True):
            target.commit(row, 1)
            replies[row].aux.append(aux_TLD)
            replies[row].take(logits_TV[-1])
    return [
        Decoded(
            ids=tuple(reply.path[reply.start :]),
            forward_passes=len(reply.aux),
            gaps=tuple(reply.gaps),
            aux_TLD=torch.cat(reply.aux),
        )
        for reply in replies
    ]


@torch.inference_mode()
def decode_drafted(
    target: Target,
    proposing: Callable[[], Propose],
    prompts: Sequence[Sequence[int]],
    *,
    num_drafts: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> list[Decoded]:
    """Decode a batch greedily with drafts verified by the target; ids as by plain decoding.

    `proposing` makes what proposes drafts for one sequence.
    """
    replies = _prefill(target, prompts, max_new_tokens, stop_ids, room=num_drafts)
    proposals = [proposing() for _ in replies]
    while busy := [row for row, reply in enumerate(replies) if not reply.done]:
        chains = [
            proposals[row](replies[row].path, replies[row].aux.pop(), num_drafts) for row in busy
        ]
        fed = [[replies[row].path[-1], *chain] for row, chain in zip(busy, chains, strict=True)]
        for row, drafts, (logits_TV, aux_TLD) in zip(
            busy, chains, target.forward(busy, fed), strict=True
        ):
            new = _verify(replies[row], drafts, logits_TV.argmax(-1).tolist())
            target.commit(row, new)
            replies[row].aux.append(aux_TLD[:new])
    return [
        Decoded(
            ids=tuple(reply.path[reply.start :]),
            forward_passes=1 + len(reply.verdicts),
            verified=_verified(reply.verdicts),
        )
        for reply in replies
    ]


def _prefill(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    room: int = 0,
) -> list[_Reply]:
    """Run each prompt by itself and take its first token; `room` is for drafts past the end."""
    target.start(len(prompts), max(map(len, prompts)) + max_new_tokens + room)
    replies = []
    for row, prompt in enumerate(prompts):
        reply = _Reply(
            path=list(prompt),
            start=len(prompt),
            end=len(prompt) + max_new_tokens,
            stop_ids=stop_ids,
        )
        ((logits_TV, aux_TLD),) = target.forward([row], [list(prompt)], last_only=True)
        target.commit(row, len(prompt))
        reply.aux.append(aux_TLD)
        reply.take(logits_TV[-1])
        replies.append(reply)
    return replies


def _verify(reply: _Reply, drafts: Sequence[int], choices: list[int]) -> int:
    """Append what a verification gains, up to a stop id or the end; return its number."""
    gained = choices[: _matching(drafts, choices) + 1]
    stop = next((i + 1 for i, token in enumerate(gained) if token in reply.stop_ids), len(gained))
    new = gained[: min(stop, reply.end - len(reply.path))]
    reply.verdicts.append(_judge(drafts, new))
    reply.path += new
    return len(new)


def drafting(runner: DraftRunner) -> Propose:
    """Return the proposals of an EAGLE-3 drafter for one sequence."""
    own = runner.fresh()
    rows = 0

    def propose(path: list[int], aux_TLD: Tensor, num_drafts: int) -> list[int]:
        nonlocal rows
        next_ids = path[rows + 1 :]
        rows = len(path) - 1
        return own.propose(next_ids, aux_TLD, num_drafts)

    return propose


def looking_up(lookup: Lookup) -> Propose:
    """Return the proposals of prompt lookup."""
    return lambda path, _aux, num_drafts: lookup.propose(path, num_drafts)


def replay(
    path: Sequence[int], reply_start: int, chains: Callable[[int], Sequence[int]], num_drafts: int
) -> Verified:
    """Return the verifications along a known path.

    `chains(n)` is the chain drafted once path[:n] is committed. Worked example: a path whose reply
    is `a b c d`, chains right for one token, K = 2: `a` is the prefill's; the first verification
    gains `b` and the bonus `c`, the second gains `d` alone: gains 2, 1, tau 1.5.
    """
    committed = reply_start + 1
    verdicts: list[tuple[int, int, int]] = []
    while committed < len(path):
        drafts = list(chains(committed))[:num_drafts]
        verdicts.append(_judge(drafts, path[committed:]))
        committed += verdicts[-1][0]
    return _verified(verdicts)


def _judge(drafts: Sequence[int], rest: Sequence[int]) -> tuple[int, int, int]:
    """Return gain, accepted and judged drafts of a chain before the rest of the reply."""
    accepted = _matching(drafts, rest)
    return (
        min(accepted + 1, len(rest)),
        accepted,
        min(len(drafts), len(rest), accepted + 1),
    )


def _verified(verdicts: Sequence[tuple[int, int, int]]) -> Verified:
    gains, accepted, judged = zip(*verdicts, strict=True) if verdicts else ((), (), ())
    return Verified(gains=gains, accepted=accepted, judged=judged)


def _matching(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """Return how many drafts equal the target's choices before the first that does not."""
    same = [draft == choice for draft, choice in zip(drafts, choices, strict=False)]
    return next((i for i, equal in enumerate(same) if not equal), len(same))


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place where two replies differ, in tokens; None if they are equal."""
    place = _matching(ids, other)
    return None if place == len(ids) == len(other) else place


def tau_of(gains: Sequence[Sequence[int]]) -> float:
    """Return the acceptance length over prompts: all tokens gained / all verifications."""
    verifications = sum(len(g) for g in gains)
    return sum(sum(g) for g in gains) / verifications if verifications else 1.0


def interval_of(gains: Sequence[Sequence[int]], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of tau, by bootstrap over prompts."""
    draw = random.Random(seed)
    taus = sorted(tau_of(draw.choices(gains, k=len(gains))) for _ in range(BOOTSTRAP_ROUNDS))
    return taus[int(0.025 * BOOTSTRAP_ROUNDS)], taus[int(0.975 * BOOTSTRAP_ROUNDS)]


def acceptance_by_position(replies: Sequence[Verified], num_drafts: int) -> list[float]:
    """Return for draft k the share accepted where 1..k-1 were; drafts past the end are left out."""
    pairs = [pair for r in replies for pair in zip(r.accepted, r.judged, strict=True)]
    shares = []
    for k in range(1, num_drafts + 1):
        reached = [accepted for accepted, judged in pairs if judged >= k]
        shares.append(sum(a >= k for a in reached) / len(reached) if reached else 0.0)
    return shares


def figures_of(
    replies: Sequence[tuple[Sequence[int], Verified]], num_drafts: int
) -> dict[str, Any]:
    """Return the table's figures over prompts, given as (reply, its verifications)."""
    gains = [r.gains for _, r in replies]
    calm = [r.gains for ids, r in replies if not ends_in_loop(ids)]
    low, high = interval_of(gains)
    return {
        "draft_steps": num_drafts,
        "tau": tau_of(gains),
        "tau_low": low,
        "tau_high": high,
        "tau_without_loops": tau_of(calm),
        "acceptance_by_position": acceptance_by_position([r for _, r in replies], num_drafts),
        "prompts": len(replies),
        "prompts_in_loops": len(replies) - len(calm),
        "verifications": sum(len(g) for g in gains),
        "tokens": sum(sum(g) for g in gains),
    }


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Tell whether a reply ends in `LOOP_TIMES` equal runs of at most `LOOP_NGRAM` tokens."""
    ids = list(ids)
    return any(
        len(ids) >= size * LOOP_TIMES and ids[-size * LOOP_TIMES :] == ids[-size:] * LOOP_TIMES
        for size in range(1, LOOP_NGRAM + 1)
    )
