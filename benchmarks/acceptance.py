"""Measure acceptance of a drafter on held-out prompts: chains, trees, sampling, prompt lookup.

Convention: acceptance length (tau) = tokens gained / verifications, bonus token counted, the token
of the prefill not. Intervals are bootstrapped over prompts. Lines, by `what`:
- `table`: each data set at K, by position, with and without replies that end in loops; replays.
- `grid`: chains of K = 1 to 6 and trees of a depth, top-k and number of drafts; replays.
- `simulated`: what training reports, over every position of the replies. A verification begins
  where the last draft failed, or after a bonus token; the rows there are harder, hence the gap.
- `decoded`: real decoding, greedy: losslessness on every prompt, forward passes, CPU time of the
  target and the drafter together against plain decoding and prompt lookup, one batch at a time.
- `sampled`: real decoding at a temperature. Each token's place in the target's own distribution
  (best tokens first, drawn evenly within the token) must be uniform on 0 to 1: chi-square over
  20 bins, whose 99.9 % point is 43.8; beside it the same for plain sampling.

Reads: models/target and the data of drafter_data.py. Prints JSON lines.
Run: python benchmarks/acceptance.py --drafter var/drafters/KEY/drafter.safetensors
     python benchmarks/acceptance.py --data run
"""

import argparse
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from drafter_data import TARGET, Data, Heldout, anchor, finished_run

from eyas.drafter import acceptance as ac
from eyas.drafter.export import check_tensors, read_export, read_tensors
from eyas.drafter.inference import DraftRunner
from eyas.drafter.lookup import Lookup
from eyas.drafter.trees import Pick, Tree, greedy, sampled
from eyas.drafter.verifier import Target
from eyas.stages import evaluate
from eyas.states.target import load_model

HEADLINE = 3
DEPTHS = (1, 2, 3, 4, 5, 6)
TREES = ((3, 2, 6), (3, 4, 8), (3, 4, 15), (5, 4, 15), (5, 8, 31))  # depth, top-k, drafts
REAL_TREE = (3, 4, 8)
BATCH = 16
BINS, LIMIT = 20, 43.82  # chi-square, 19 degrees of freedom, 0.1 %
LOOKUP = Lookup(max_ngram=3)


def main() -> None:
    """Read the arguments, print lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", choices=("anchor", "run"), default="anchor")
    parser.add_argument("--anchor", type=Path, default=Path("../shared/anchor"))
    parser.add_argument("--drafter", type=Path, help="weights; of a run: its export by default")
    parser.add_argument("--prompts", type=int, help="only the first so many of each set")
    parser.add_argument("--temperature", type=float, default=0.7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = anchor(given.anchor) if given.data == "anchor" else finished_run()
    runner = DraftRunner(weights_of(data, given.drafter), data.config, data.head.embed_VD)
    data = dataclasses.replace(data, paths=first_of_each(data.paths, given.prompts))
    with torch.inference_mode():
        for lines in (
            tables(data, runner),
            grids(data, runner),
            simulated(data, runner),
            decoded(data, runner),
            sampled_lines(data, runner, given.temperature),
        ):
            for line in lines:
                print(json.dumps(line), flush=True)


def weights_of(data: Data, path: Path | None) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors: of a file, or of this folder's export."""
    if path is None:
        return read_export(evaluate.EXPORT, data.config)
    tensors = read_tensors(path)
    check_tensors(tensors, data.config, str(path))
    return tensors


def first_of_each(paths: Sequence[Heldout], count: int | None) -> list[Heldout]:
    """Return the first so many prompts of each set."""
    seen, some = Counter[str](), list[Heldout]()
    for path in paths:
        seen[path.source] += 1
        if count is None or seen[path.source] <= count:
            some.append(path)
    return some


def replayed(data: Data, proposing: Callable[[], ac.Propose], depth: int) -> list[ac.Verified]:
    """Return every prompt's verifications along its greedy path."""
    return [replay_one(path, proposing(), depth) for path in data.paths]


def replay_one(path: Heldout, propose: ac.Propose, depth: int) -> ac.Verified:
    """Return one prompt's; the drafter is fed as in real decoding."""
    fed = 0

    def tree_at(committed: int) -> Tree:
        nonlocal fed
        begin, fed = fed, committed - 1
        return propose(path.ids[:committed], path.aux_TLD[begin:fed], depth)

    return ac.replay_trees(path.ids, path.prompt_tokens, tree_at)


def by_source(paths: Sequence[Heldout]) -> dict[str, list[int]]:
    """Return the prompts of all sets, and of each."""
    groups = {"all": list(range(len(paths)))}
    for index, path in enumerate(paths):
        groups.setdefault(path.source, []).append(index)
    return groups


def tables(data: Data, runner: DraftRunner) -> Iterator[dict[str, Any]]:
    """Give the table of the drafter and of prompt lookup, a line a data set."""
    kinds = {"drafter": lambda: ac.drafting(runner), "lookup": lambda: ac.looking_up(LOOKUP)}
    for name, proposing in kinds.items():
        found = replayed(data, proposing, HEADLINE)
        for source, rows in by_source(data.paths).items():
            replies = [(data.paths[i].ids[data.paths[i].prompt_tokens :], found[i]) for i in rows]
            line = {"what": "table", "drafter": name, "dataset": source}
            yield line | rounded(ac.figures_of(replies, HEADLINE))


def grids(data: Data, runner: DraftRunner) -> Iterator[dict[str, Any]]:
    """Give tau of chains and trees; a tree costs the target as many tokens as it has drafts."""
    for depth in DEPTHS:
        yield grid_line(replayed(data, lambda: ac.drafting(runner), depth), (depth, 1, depth))
    for depth, top_k, nodes in TREES:

        def proposing(top_k: int = top_k, nodes: int = nodes) -> ac.Propose:
            return ac.branching(runner, top_k, nodes)

        yield grid_line(replayed(data, proposing, depth), (depth, top_k, nodes))


def grid_line(found: Sequence[ac.Verified], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return one cell of the grid."""
    gains = [one.gains for one in found]
    low, high = ac.interval_of(gains)
    line = dict(zip(("draft_steps", "top_k", "drafts"), shape, strict=True))
    return {"what": "grid", **line} | rounded(
        {"tau": ac.tau_of(gains), "tau_low": low, "tau_high": high}
    )


def simulated(data: Data, runner: DraftRunner) -> Iterator[dict[str, Any]]:
    """Give the mean length from every position, and from those where verifications begin."""
    every, begun = list[int](), list[int]()
    for path in data.paths:
        drafts = runner.draft_everywhere(path.ids, path.aux_TLD, HEADLINE).tolist()
        start = path.prompt_tokens + 1
        lengths = {
            n: ac.replay(path.ids, n - 1, lambda m, d=drafts: d[m - 2], HEADLINE).gains[0]
            for n in range(start, len(path.ids) - HEADLINE)
        }
        every += lengths.values()
        verified = ac.replay(path.ids, start - 1, lambda m, d=drafts: d[m - 2], HEADLINE)
        at = start
        for gain in verified.gains:
            begun += [lengths[at]] if at in lengths else []
            at += gain
    yield {"what": "simulated", "draft_steps": HEADLINE} | rounded(
        {
            "every_position": sum(every) / len(every),
            "where_verifications_begin": sum(begun) / len(begun),
        }
    )


def decoded(data: Data, runner: DraftRunner) -> Iterator[dict[str, Any]]:
    """Give real greedy decoding: what it costs and whether it changes a token."""
    depth, top_k, nodes = REAL_TREE
    kinds: dict[str, Callable[[], ac.Propose] | None] = {
        "plain": None,
        "lookup": lambda: ac.looking_up(LOOKUP),
        "chain": lambda: ac.drafting(runner),
        f"tree {depth}x{top_k}, {nodes} drafts": lambda: ac.branching(runner, top_k, nodes),
    }
    plain_cpu_s = plain_passes = 0.0
    for name, proposing in kinds.items():
        begun_cpu_s = time.process_time()
        replies = decode(data, proposing, greedy)
        cpu_s, passes = time.process_time() - begun_cpu_s, sum(r.forward_passes for r in replies)
        if proposing is None:
            plain_cpu_s, plain_passes = cpu_s, passes
        yield {"what": "decoded", "drafter": name, "draft_steps": HEADLINE} | rounded(
            {
                "prompts": len(data.paths),
                "lossless": sum(
                    list(reply.ids) == path.ids[path.prompt_tokens :]
                    for reply, path in zip(replies, data.paths, strict=True)
                ),
                "tau": ac.tau_of([reply.verified.gains for reply in replies]),
                "forward_passes": passes,
                "passes_against_plain": passes / plain_passes,
                "cpu_s": cpu_s,
                "speed_against_plain": plain_cpu_s / cpu_s,
            }
        )


def decode(data: Data, proposing: Callable[[], ac.Propose] | None, pick: Pick) -> list[ac.Decoded]:
    """Decode prompts for as many tokens as their stored replies have, a batch at a time."""
    target = Target(load_model(TARGET), data.config.aux_layers)
    order = sorted(
        range(len(data.paths)), key=lambda i: len(data.paths[i].ids) - data.paths[i].prompt_tokens
    )
    found: dict[int, ac.Decoded] = {}
    longest = max(len(path.ids) - path.prompt_tokens for path in data.paths)
    for begin in range(0, len(order), BATCH):
        rows = order[begin : begin + BATCH]
        prompts = [data.paths[row].ids[: data.paths[row].prompt_tokens] for row in rows]
        stop = {"max_new_tokens": longest, "stop_ids": data.stop_ids}
        if proposing is None:
            replies = ac.decode_plain(target, prompts, pick=pick, **stop)
        else:
            replies = ac.decode_drafted(
                target, proposing, prompts, num_drafts=HEADLINE, pick=pick, **stop
            )
        found |= dict(zip(rows, replies, strict=True))
    target.close()
    return [found[row] for row in range(len(data.paths))]


def sampled_lines(data: Data, runner: DraftRunner, temperature: float) -> Iterator[dict[str, Any]]:
    """Give real sampled decoding, and how uniform the places of its tokens are."""
    depth, top_k, nodes = REAL_TREE
    model = load_model(TARGET)
    for name in ("plain", "chain drawn", f"tree {depth}x{top_k}, {nodes} drafts"):
        generator = torch.Generator().manual_seed(0)
        kinds: dict[str, Callable[[], ac.Propose] | None] = {
            "plain": None,
            "chain drawn": lambda g=generator: ac.drawing(runner, temperature, g),
        }
        proposing = kinds.get(name, lambda: ac.branching(runner, top_k, nodes))
        replies = decode(data, proposing, sampled(temperature, generator))
        places = [
            place
            for path, reply in zip(data.paths, replies, strict=True)
            for place in places_of(model, path, reply.ids, temperature, generator)
        ]
        counts = Counter(min(int(place * BINS), BINS - 1) for place in places)
        expected = len(places) / BINS
        statistic = sum((counts[b] - expected) ** 2 / expected for b in range(BINS))
        yield {"what": "sampled", "drafter": name, "temperature": temperature} | rounded(
            {
                "prompts": len(data.paths),
                "tokens": len(places),
                "tau": ac.tau_of([reply.verified.gains for reply in replies]),
                "chi_square": statistic,
                "limit": LIMIT,
                "met": statistic < LIMIT,
            }
        )


def places_of(
    model: Any,
    path: Heldout,
    reply: Sequence[int],
    temperature: float,
    generator: torch.Generator,
) -> list[float]:
    """Return each token's place in the target's distribution after what stands before it."""
    ids = [*path.ids[: path.prompt_tokens], *reply]
    logits_TV = model(torch.tensor([ids])).logits[0, path.prompt_tokens - 1 : -1].double()
    chances_TV = (logits_TV / temperature).softmax(-1)
    own_T = chances_TV.gather(1, torch.tensor(reply)[:, None])[:, 0]
    above_T = torch.where(chances_TV > own_T[:, None], chances_TV, 0.0).sum(1)
    within_T = torch.rand(len(reply), generator=generator, dtype=torch.float64)
    return (above_T + within_T * own_T).tolist()


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    """Return figures to four places."""
    return {
        key: [round(v, 4) for v in value]
        if isinstance(value, list)
        else (round(value, 4) if isinstance(value, float) else value)
        for key, value in line.items()
    }


if __name__ == "__main__":
    main()
