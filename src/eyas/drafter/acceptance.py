"""Acceptance by real draft-verify decoding, greedy, one sequence at a time, and by its replay.

A verification is one forward pass of the target over the newest token and a chain of K drafts; it
gains the drafts that equal the target's own choices, and one token more (the bonus). Acceptance
length (tau) = tokens gained / verifications; the token of the prefill is not counted. In a replay
the target's answers are read from its plain greedy path; greedy drafts depend on committed tokens
alone, so its verifications are those of the real loop (a test and the evaluate stage assert it).

Legend: T tokens, L aux layers, D hidden size, V target vocabulary.
Source: speculative decoding https://arxiv.org/abs/2211.17192, EAGLE-3 https://arxiv.org/abs/2503.01840.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.inference import DraftRunner, Lookup

BOOTSTRAP_ROUNDS = 1000
LOOP_NGRAM, LOOP_TIMES = 16, 3  # a reply that ends in three equal runs of at most 16 tokens
Propose = Callable[[list[int], Tensor, int], list[int]]  # ids, aux of all but the last, K


class Target:
    """The target with its cache, giving logits and the outputs of the aux layers."""

    def __init__(self, model: Any, aux_layers: Sequence[int]) -> None:
        self._model, self._aux_layers = model, tuple(aux_layers)
        self._seen: dict[int, Tensor] = {}
        self._cache: Any = None
        self._handles = [
            model.model.layers[layer].register_forward_hook(self._keep(layer))
            for layer in self._aux_layers
        ]

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """Forget the sequence."""
        from transformers import DynamicCache

        self._cache = DynamicCache()

    def forward(self, ids: Sequence[int], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Run tokens behind those in the cache; return logits [T, V] and aux states [T, L, D]."""
        out = self._model(
            torch.tensor([list(ids)]),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        aux = torch.stack([self._seen[layer][0] for layer in self._aux_layers], dim=1)
        return out.logits[0], aux

    def drop(self, count: int) -> None:
        """Take the last `count` tokens off the cache."""
        if count:
            self._cache.crop(-count)

    def _keep(self, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook


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
    wall_s: float
    forward_passes: int
    verified: Verified = Verified(gains=(), accepted=(), judged=())
    gaps: tuple[float, ...] = ()  # per token: lead of the best logit over the second
    aux_TLD: Tensor | None = None


@torch.inference_mode()
def decode_plain(
    target: Target, prompt: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> Decoded:
    """Decode greedily, one token a forward pass."""
    started = time.perf_counter()
    target.start()
    logits_TV, aux_TLD = target.forward(prompt, last_only=True)
    states, ids, gaps = [aux_TLD], [int(logits_TV[-1].argmax())], [_gap(logits_TV[-1])]
    while len(ids) < max_new_tokens and ids[-1] not in stop_ids:
        logits_TV, aux_TLD = target.forward(ids[-1:])
        states.append(aux_TLD)
        ids.append(int(logits_TV[-1].argmax()))
        gaps.append(_gap(logits_TV[-1]))
    return Decoded(
        ids=tuple(ids),
        wall_s=time.perf_counter() - started,
        forward_passes=len(states),
        gaps=tuple(gaps),
        aux_TLD=torch.cat(states),
    )


@torch.inference_mode()
def decode_drafted(
    target: Target,
    propose: Propose,
    prompt: Sequence[int],
    *,
    num_drafts: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> Decoded:
    """Decode greedily with drafts verified by the target; the ids are those of plain decoding."""
    started = time.perf_counter()
    target.start()
    logits_TV, aux_TLD = target.forward(prompt, last_only=True)
    path = [*prompt, int(logits_TV[-1].argmax())]
    end = len(prompt) + max_new_tokens
    verdicts: list[tuple[int, int, int]] = []
    while len(path) < end and path[-1] not in stop_ids:
        drafts = propose(path, aux_TLD, num_drafts)
        logits_TV, aux_TLD = target.forward([path[-1], *drafts])
        choices = logits_TV.argmax(-1).tolist()
        gained = choices[: _matching(drafts, choices) + 1]
        new = _until_stop(gained, stop_ids)[: end - len(path)]
        aux_TLD = aux_TLD[: len(new)]
        path += new
        verdicts.append(_judge(drafts, new))
        target.drop(1 + len(drafts) - len(new))
    return Decoded(
        ids=tuple(path[len(prompt) :]),
        wall_s=time.perf_counter() - started,
        forward_passes=1 + len(verdicts),
        verified=_verified(verdicts),
    )


def drafting(runner: DraftRunner) -> Propose:
    """Return the proposals of an EAGLE-3 drafter; a call goes on where the last one was."""
    rows = 0

    def propose(path: list[int], aux_TLD: Tensor, num_drafts: int) -> list[int]:
        nonlocal rows
        if rows + len(aux_TLD) != len(path) - 1:
            runner.start()
            rows = 0
        next_ids = path[rows + 1 :]
        rows = len(path) - 1
        return runner.propose(next_ids, aux_TLD, num_drafts)

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


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[:end]


def _gap(logits_V: Tensor) -> float:
    best, second = logits_V.topk(2).values.tolist()
    return best - second
