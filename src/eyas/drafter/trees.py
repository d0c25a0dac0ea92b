"""Drafts as a tree, and the walk by which the target's logits accept some of them.

Greedy: at each token the target's best choice; the walk goes on where a child holds it. Sampled:
recursive rejection, which leaves the target's distribution as it is whatever the drafts are. With p
the target's distribution and q that which the candidate x was drawn from, x is accepted with chance
min(1, p(x) / q(x)); else p becomes the positive part of p - q, normalised, x leaves q, and the next
candidate is tried; where none is left a token is drawn from p. A candidate that was chosen and not
drawn has q = 1 at itself. Worked example, p = (0.6, 0.4), q = (1, 0), candidate 0: accepted with
0.6; else p - q = (-0.4, 0.4), so token 1: 0.6 and 0.4, as p has it.

Legend: V target vocabulary.
Source: https://arxiv.org/abs/2211.17192, appendix A; without replacement: Sequoia,
https://arxiv.org/abs/2402.12374, algorithm 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1  # the last committed token, as a parent
Pick = Callable[[Tensor, Sequence[int], Tensor | None], int]  # logits, candidates, q -> token


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Drafts after the last committed token; parents stand before their children."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]  # index in `ids`, or ROOT
    drawn_V: tuple[Tensor, ...] = ()  # what each was drawn from; empty: they were chosen

    def children(self, parent: int) -> list[int]:
        """Return the indices of the drafts that follow a draft."""
        return [index for index, above in enumerate(self.parents) if above == parent]


def chain(ids: Sequence[int], drawn_V: Sequence[Tensor] = ()) -> Tree:
    """Return the tree in which each draft follows the one before."""
    parents = range(ROOT, len(ids) - 1)
    return Tree(ids=tuple(ids), parents=tuple(parents), drawn_V=tuple(drawn_V))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a verification accepts: drafts by index, the tokens gained, drafts looked at in turn."""

    kept: tuple[int, ...]
    gained: tuple[int, ...]  # the accepted drafts' ids and the bonus token
    judged: int


def walk(tree: Tree, logits: Callable[[int], Tensor], pick: Pick) -> Walk:
    """Follow the target's choices through the tree.

    `logits(i)` are the target's after draft i, [V]; after the last committed token for ROOT.
    """
    at, kept, gained = ROOT, list[int](), list[int]()
    while True:
        following = tree.children(at)
        candidates = [tree.ids[index] for index in following]
        drawn_V = tree.drawn_V[following[0]] if tree.drawn_V and following else None
        gained.append(pick(logits(at), candidates, drawn_V))
        if gained[-1] not in candidates:
            judged = len(kept) + bool(following)
            return Walk(kept=tuple(kept), gained=tuple(gained), judged=judged)
        at = following[candidates.index(gained[-1])]
        kept.append(at)


def greedy(logits_V: Tensor, _candidates: Sequence[int], _drawn_V: Tensor | None) -> int:
    """Return the target's best token."""
    return int(logits_V.argmax())


def sampled(temperature: float, generator: torch.Generator) -> Pick:
    """Return the choice by recursive rejection at a temperature."""
    return lambda logits_V, candidates, drawn_V: reject(
        (logits_V.double() / temperature).softmax(-1), candidates, drawn_V, generator
    )


def reject(
    target_V: Tensor, candidates: Sequence[int], drawn_V: Tensor | None, generator: torch.Generator
) -> int:
    """Return a token distributed as `target_V`, a candidate wherever possible.

    `drawn_V` is what the first candidate was drawn from, each later one without those before it;
    None: they were chosen.
    """
    left_V = None if drawn_V is None else drawn_V.double().clone()
    for token in candidates:
        if left_V is None:
            proposal_V = torch.zeros_like(target_V).index_fill_(0, torch.tensor(token), 1.0)
        else:
            proposal_V = left_V / left_V.sum()
        chance = float(target_V[token] / proposal_V[token])
        if float(torch.rand((), generator=generator, dtype=torch.float64)) < chance:
            return token
        rest_V = (target_V - proposal_V).clamp(min=0)
        target_V = rest_V / rest_V.sum()
        if left_V is not None:
            left_V[token] = 0.0
    return int(torch.multinomial(target_V, 1, generator=generator))
