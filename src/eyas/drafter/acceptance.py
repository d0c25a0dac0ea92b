"""Acceptance by real draft-verify decoding, a batch of sequences at once, and by replay.

A verification is one forward pass of the target over the newest token and drafts, a chain of K or a
tree; it gains the drafts that are the target's own choices, and one token more (the bonus).
Choices are greedy, or sampled without changing their distribution (eyas.drafter.trees). Acceptance
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
from eyas.drafter.trees import ROOT, Pick, Tree, Walk, chain, greedy, walk
from eyas.drafter.verifier import Target

BOOTSTRAP_ROUNDS = 1000
LOOP_NGRAM, LOOP_TIMES = 16, 3  # a reply that ends in three equal runs of at most 16 tokens
Propose = Callable[[list[int], Tensor, int], Tree]  # ids, aux of the new ones but the last, K


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

    def take(self, logits_V: Tensor, pick: Pick) -> None:
        """Append the target's choice."""
        best, second = logits_V.topk(2)[0].tolist()
        self.gaps.append(best - second)
        self.path.append(pick(logits_V, (), None))


@torch.inference_mode()
def decode_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pick: Pick = greedy,
) -> list[Decoded]:
    """Decode a batch, one token a forward pass."""
    replies = _prefill(target, prompts, max_new_tokens, stop_ids, pick)
    while busy := [row for row, reply in enumerate(replies) if not reply.done]:
        seen = target.forward(busy, [replies[row].path[-1:] for row in busy])
        for row, (logits_TV, aux_TLD) in zip(busy, seen, strict=True):
            target.commit(row, [0])
            replies[row].aux.append(aux_TLD)
            replies[row].take(logits_TV[-1], pick)
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
    pick: Pick = greedy,
) -> list[Decoded]:
    """Decode a batch with drafts verified by the target; greedily the ids are those of plain.

    `proposing` makes what proposes drafts for one sequence.
    """
    replies = _prefill(target, prompts, max_new_tokens, stop_ids, pick)
    proposals = [proposing() for _ in replies]
    while busy := [row for row, reply in enumerate(replies) if not reply.done]:
        trees = [
            proposals[row](replies[row].path, replies[row].aux.pop(), num_drafts) for row in busy
        ]
        seen = target.forward(
            busy,
            [[replies[row].path[-1], *tree.ids] for row, tree in zip(busy, trees, strict=True)],
            parents=[[ROOT, *(above + 1 for above in tree.parents)] for tree in trees],
        )
        for row, tree, (logits_TV, aux_TLD) in zip(busy, trees, seen, strict=True):
            walked = walk(tree, lambda index, rows=logits_TV: rows[index + 1], pick)
            kept = [0, *(index + 1 for index in walked.kept)][: _extend(replies[row], walked)]
            target.commit(row, kept)
            replies[row].aux.append(aux_TLD[kept])
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
    pick: Pick,
) -> list[_Reply]:
    """Run each prompt by itself and take its first token."""
    target.start(len(prompts), max(map(len, prompts)) + max_new_tokens)
    replies = []
    for row, prompt in enumerate(prompts):
        reply = _Reply(
            path=list(prompt),
            start=len(prompt),
            end=len(prompt) + max_new_tokens,
            stop_ids=stop_ids,
        )
        ((logits_TV, aux_TLD),) = target.forward([row], [list(prompt)], last_only=True)
        target.commit(row, range(len(prompt)))
        reply.aux.append(aux_TLD)
        reply.take(logits_TV[-1], pick)
        replies.append(reply)
    return replies


def _extend(reply: _Reply, walked: Walk) -> int:
    """Append what a verification gains, up to a stop id or the end; return its number."""
    gained = walked.gained
    stop = next((i + 1 for i, token in enumerate(gained) if token in reply.stop_ids), len(gained))
    new = min(stop, reply.end - len(reply.path))
    reply.verdicts.append((new, min(len(walked.kept), new), min(walked.judged, new)))
    reply.path += gained[:new]
    return new


def drafting(runner: DraftRunner) -> Propose:
    """Return the chains of an EAGLE-3 drafter for one sequence."""
    return _following(runner, lambda own, ids, aux_TLD, k: chain(own.propose(ids, aux_TLD, k)))


def branching(runner: DraftRunner, top_k: int, num_nodes: int) -> Propose:
    """Return its trees: the `top_k` best after each draft, `num_nodes` of all that kept."""
    return _following(
        runner, lambda own, ids, aux_TLD, k: own.propose_tree(ids, aux_TLD, k, top_k, num_nodes)
    )


def drawing(runner: DraftRunner, temperature: float, generator: torch.Generator) -> Propose:
    """Return chains drawn from its distribution at a temperature."""
    return _following(
        runner, lambda own, ids, aux_TLD, k: own.draw(ids, aux_TLD, k, temperature, generator)
    )


def _following(
    runner: DraftRunner, draft: Callable[[DraftRunner, list[int], Tensor, int], Tree]
) -> Propose:
    own = runner.fresh()
    rows = 0

    def propose(path: list[int], aux_TLD: Tensor, num_drafts: int) -> Tree:
        nonlocal rows
        next_ids = path[rows + 1 :]
        rows = len(path) - 1
        return draft(own, next_ids, aux_TLD, num_drafts)

    return propose


def looking_up(lookup: Lookup) -> Propose:
    """Return the proposals of prompt lookup."""
    return lambda path, _aux, num_drafts: chain(lookup.propose(path, num_drafts))


def replay(
    path: Sequence[int], reply_start: int, chains: Callable[[int], Sequence[int]], num_drafts: int
) -> Verified:
    """Return the verifications along a known path.

    `chains(n)` is the chain drafted once path[:n] is committed. Worked example: a path whose reply
    is `a b c d`, chains right for one token, K = 2: `a` is the prefill's; the first verification
    gains `b` and the bonus `c`, the second gains `d` alone: gains 2, 1, tau 1.5.
    """
    return replay_trees(path, reply_start, lambda n: chain(list(chains(n))[:num_drafts]))


def replay_trees(path: Sequence[int], reply_start: int, trees: Callable[[int], Tree]) -> Verified:
    """Return the same for trees; they are asked for in the order of the path."""
    committed = reply_start + 1
    verdicts: list[tuple[int, int, int]] = []
    while committed < len(path):
        verdicts.append(_judge(trees(committed), path[committed:]))
        committed += verdicts[-1][0]
    return _verified(verdicts)


def _judge(tree: Tree, rest: Sequence[int]) -> tuple[int, int, int]:
    """Return gain, accepted and judged drafts of a tree before the rest of the reply."""
    ahead = iter(rest)
    walked = walk(tree, lambda _: torch.empty(0), lambda *_: next(ahead, ROOT))
    accepted = len(walked.kept)
    return min(accepted + 1, len(rest)), accepted, min(walked.judged, len(rest))


def _verified(verdicts: Sequence[tuple[int, int, int]]) -> Verified:
    gains, accepted, judged = zip(*verdicts, strict=True) if verdicts else ((), (), ())
    return Verified(gains=gains, accepted=accepted, judged=judged)


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place where two replies differ, in tokens; None if they are equal."""
    shorter = min(len(ids), len(other))
    place = next((i for i in range(shorter) if ids[i] != other[i]), shorter)
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
