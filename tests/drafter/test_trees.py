"""Trees of drafts: lossless greedily, and sampled without changing the distribution."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafter import acceptance as ac
from eyas.drafter import trees
from eyas.drafter.inference import DraftRunner
from eyas.drafter.trees import ROOT, Tree, chain
from eyas.drafter.verifier import Target

PROMPTS = ([5, 7, 11, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [90])
MAX_NEW = 20
CHANCE = 1e-4  # a right sampler fails so rarely; the seeds are fixed
Rule = Callable[[Tensor, Sequence[int], Tensor | None, torch.Generator], int]


def chi_square_limit(cells: int) -> float:
    """Return the chi-square exceeded with chance `CHANCE` (Wilson and Hilferty, 1931)."""
    freedom, z = cells - 1, 3.719
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: Counter[int], target_V: Tensor) -> tuple[float, int]:
    """Return the statistic and its cells; tokens expected fewer than 8 times share one."""
    total = sum(counts.values())
    expected = (target_V * total).tolist()
    cells = [(counts[i], e) for i, e in enumerate(expected) if e >= 8]
    rare = (
        sum(counts[i] for i, e in enumerate(expected) if e < 8),
        sum(e for e in expected if e < 8),
    )
    if rare[1] >= 8:
        cells.append(rare)
    elif rare[1] == 0:
        assert rare[0] == 0, "a token that the target never says"
    return sum((got - e) ** 2 / e for got, e in cells), len(cells)


def without_residual(
    target_V: Tensor, candidates: Sequence[int], drawn_V: Tensor | None, g: torch.Generator
) -> int:
    """After a refusal draw from p, not from what p has more than q."""
    for token in candidates:
        q = 1.0 if drawn_V is None else float(drawn_V[token])
        if float(torch.rand((), generator=g)) < float(target_V[token]) / q:
            return token
    return int(torch.multinomial(target_V, 1, generator=g))


def with_stale_q(
    target_V: Tensor, candidates: Sequence[int], drawn_V: Tensor | None, g: torch.Generator
) -> int:
    """Try later candidates as if they had been drawn with those before still in q."""
    assert drawn_V is not None
    for token in candidates:
        if float(torch.rand((), generator=g)) < float(target_V[token] / drawn_V[token]):
            return token
        rest_V = (target_V - drawn_V).clamp(min=0)
        target_V = rest_V / rest_V.sum()
    return int(torch.multinomial(target_V, 1, generator=g))


def draws(rule: Rule, target_V: Tensor, drawn_V: Tensor | None, width: int) -> Counter[int]:
    g = torch.Generator().manual_seed(0)
    counts = Counter[int]()
    for _ in range(20_000):
        candidates = (
            list(range(width))
            if drawn_V is None
            else torch.multinomial(drawn_V, width, generator=g).tolist()
        )
        counts[rule(target_V, candidates, drawn_V, g)] += 1
    return counts


P = torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.2, 0.1, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(("drawn_V", "width"), [(None, 1), (None, 3), (Q, 1), (Q, 2), (Q, 3)])
def test_rejection_leaves_the_targets_distribution(drawn_V: Tensor | None, width: int) -> None:
    statistic, cells = chi_square(draws(trees.reject, P, drawn_V, width), P)
    assert statistic < chi_square_limit(cells)


@pytest.mark.parametrize(
    ("rule", "drawn_V", "width"),
    [(without_residual, None, 2), (without_residual, Q, 1), (with_stale_q, Q, 2)],
)
def test_the_statistic_finds_a_wrong_rule(rule: Rule, drawn_V: Tensor | None, width: int) -> None:
    statistic, cells = chi_square(draws(rule, P, drawn_V, width), P)
    assert statistic > 2 * chi_square_limit(cells)


def test_drafts_that_are_the_targets_own_draws_are_all_accepted() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        token = int(torch.multinomial(P, 1, generator=g))
        assert trees.reject(P, [token], P, g) == token


def test_a_walk_follows_the_best_tokens_through_the_tree() -> None:
    tree = Tree(ids=(4, 7, 5, 6), parents=(ROOT, ROOT, 1, 1))
    best = {ROOT: 7, 1: 6, 3: 9}
    one_hot = {at: torch.eye(10)[token] for at, token in best.items()}
    walked = trees.walk(tree, one_hot.__getitem__, trees.greedy)
    assert walked == trees.Walk(kept=(1, 3), gained=(7, 6, 9), judged=2)
    empty = trees.walk(chain([]), {ROOT: torch.eye(10)[3]}.__getitem__, trees.greedy)
    assert empty == trees.Walk(kept=(), gained=(3,), judged=0)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 6), (3, 4, 9), (5, 3, 20)])
def test_trees_are_lossless_and_their_replay_verifies_as_often(
    verifier: Target, runner: DraftRunner, shape: tuple[int, int, int]
) -> None:
    depth, top_k, nodes = shape
    plain = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=())
    drafted = ac.decode_drafted(
        verifier,
        lambda: ac.branching(runner, top_k, nodes),
        PROMPTS,
        num_drafts=depth,
        max_new_tokens=MAX_NEW,
        stop_ids=(),
    )
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        assert other.ids == one.ids
        assert one.aux_TLD is not None
        path, aux_TLD = [*prompt, *one.ids], one.aux_TLD
        propose, done = ac.branching(runner, top_k, nodes), 0

        def tree_at(
            committed: int,
            path: list[int] = path,
            aux_TLD: Tensor = aux_TLD,
            propose: ac.Propose = propose,
        ) -> Tree:
            nonlocal done
            begin, done = done, committed - 1
            return propose(path[:committed], aux_TLD[begin:done], depth)

        assert ac.replay_trees(path, len(prompt), tree_at) == other.verified


def test_right_branches_of_trees_are_gained_whatever_branch_they_are(verifier: Target) -> None:
    plain = ac.decode_plain(verifier, PROMPTS, max_new_tokens=MAX_NEW, stop_ids=())
    paths = [[*prompt, *one.ids] for prompt, one in zip(PROMPTS, plain, strict=True)]

    def oracle(committed: list[int], _aux: Tensor, num_drafts: int) -> Tree:
        path = next(p for p in paths if p[: len(committed)] == committed)
        ids, parents, at = list[int](), list[int](), ROOT
        for token in path[len(committed) : len(committed) + num_drafts]:
            ids += [(token + 1) % 97, token]
            parents += [at, at]
            at = len(ids) - 1
        return Tree(ids=tuple(ids), parents=tuple(parents))

    drafted = ac.decode_drafted(
        verifier, lambda: oracle, PROMPTS, num_drafts=3, max_new_tokens=MAX_NEW, stop_ids=()
    )
    for one, other in zip(plain, drafted, strict=True):
        assert other.ids == one.ids
        assert set(other.verified.gains[:-1]) == {4}


def test_a_tree_of_one_branch_is_the_chain(llama: Any, runner: DraftRunner) -> None:
    g = torch.Generator().manual_seed(0)
    aux_TLD = torch.randn(6, 3, 48, generator=g)
    ids = [5, 7, 11, 5, 7, 3]
    drafts = runner.fresh().propose(ids, aux_TLD, 4)
    assert runner.fresh().propose_tree(ids, aux_TLD, 4, 1, 4) == chain(drafts)


def test_a_tree_has_the_chances_of_its_branches_drafted_one_by_one(runner: DraftRunner) -> None:
    """Each branch's tokens, forced one after the other through the chain's code."""
    g = torch.Generator().manual_seed(0)
    aux_TLD, ids = torch.randn(6, 3, 48, generator=g), [5, 7, 11, 5, 7, 3]
    tree = runner.fresh().propose_tree(ids, aux_TLD, 3, 2, 14)
    assert len(set(zip(tree.ids, tree.parents, strict=True))) == 10  # 2 + 4 + 4
    for node, token in enumerate(tree.ids):
        branch, at = [token], tree.parents[node]
        while at != ROOT:
            branch.insert(0, tree.ids[at])
            at = tree.parents[at]
        own, best = runner.fresh(), list[list[int]]()
        hidden = own._commit(ids, aux_TLD)
        for step in branch:
            best.append(own._token_N[own.logits(hidden)[0].topk(2).indices].tolist())
            hidden = own._extend(torch.tensor([step]), hidden)
        assert all(step in two for step, two in zip(branch, best, strict=True))


TEMPERATURE, ROWS, ROUNDS = 0.7, 250, 12


def second_and_third(
    verifier: Target, proposing: Callable[[torch.Generator], ac.Propose], rule: Rule
) -> list[tuple[int, ...]]:
    """Return three sampled tokens of many replies to one prompt; drafts decide on two of them."""
    g, replies = torch.Generator().manual_seed(1), list[tuple[int, ...]]()

    def pick(logits_V: Tensor, candidates: Sequence[int], drawn_V: Tensor | None) -> int:
        return rule((logits_V.double() / TEMPERATURE).softmax(-1), candidates, drawn_V, g)

    for _ in range(ROUNDS):
        decoded = ac.decode_drafted(
            verifier,
            lambda: proposing(g),
            [PROMPTS[0]] * ROWS,
            num_drafts=2,
            max_new_tokens=3,
            stop_ids=(),
            pick=pick,
        )
        replies += [one.ids for one in decoded]
    return replies


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drawn", "tree"])
@pytest.mark.parametrize(("rule", "right"), [(trees.reject, True), (without_residual, False)])
def test_sampled_replies_are_distributed_as_the_targets(
    llama: Any, verifier: Target, runner: DraftRunner, kind: str, rule: Rule, right: bool
) -> None:
    def proposing(g: torch.Generator) -> ac.Propose:
        return ac.drawing(runner, TEMPERATURE, g) if kind == "drawn" else ac.branching(runner, 3, 8)

    replies = second_and_third(verifier, proposing, rule)
    with torch.no_grad():
        first_V = (llama(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / TEMPERATURE).softmax(
            -1
        )
        two_VT = torch.tensor([[*PROMPTS[0], token] for token in range(97)])
        second_VV = (llama(two_VT).logits[:, -1].double() / TEMPERATURE).softmax(-1)
        likely = first_V.topk(3).indices.tolist()
        three_VT = torch.tensor([[*PROMPTS[0], a, b] for a in likely for b in range(97)])
        third_AVV = (llama(three_VT).logits[:, -1].double() / TEMPERATURE).softmax(-1)
    statistics = [
        chi_square(Counter(one[1] for one in replies), (first_V[:, None] * second_VV).sum(0))
    ]
    for row, token in enumerate(likely):
        seen = Counter(one[2] for one in replies if one[0] == token)
        target_V = second_VV[token] @ third_AVV[row * 97 : (row + 1) * 97]
        statistics.append(chi_square(seen, target_V))
    over = [statistic > chi_square_limit(cells) for statistic, cells in statistics]
    assert any(over) is not right, statistics
