"""Compare drafters made in equal CPU time: ours, SpecForge's, ablations, and prompt lookup.

Every drafter learns from the same replies and is judged on the same held-out prompts: acceptance
length (tau) of a chain of K = 3, greedy, bonus token counted, the token of the prefill not, by
replay of the target's greedy paths. Differences are bootstrapped over prompts within each source,
paired by prompt, runs of several seeds pooled.

Reads: models/target, params.yaml, and ../shared/anchor or this folder's run. Writes: var/drafters/.
A finished run is kept under a key of all that it depends on, and an unfinished one of ours goes on
from its checkpoint: start a killed benchmark again. Prints JSON lines, one a run, then a summary.

Run: python benchmarks/drafters.py --recipes eyas specforge_own_1e-3 --seeds 0 1 2
"""

import argparse
import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from drafter_data import KEPT, Data, anchor, anchor_split, finished_run, with_fc_norm
from drafter_runs import Place, Recipe, build

from eyas.desk.params import read_params
from eyas.drafter import acceptance as ac
from eyas.drafter import checkpoint, feedback, induction, ridge
from eyas.drafter.export import read_tensors
from eyas.drafter.inference import DraftRunner
from eyas.drafter.lookup import Lookup
from eyas.drafter.schedule import with_dtype
from eyas.files import read_json, sha256_of, write_json
from eyas.records import canonical_json
from eyas.settings import Train

NUM_DRAFTS = 3
ROUNDS = 2000
LOOKUP, LOOKUP_NGRAM = "prompt lookup", 3
OURS, PEER = "eyas", "specforge_own"  # the peer's best run is the best of its name's beginning
BARS = {"tau": 1.54, "aim": 1.70, "over_peer": 1.15}
_PEER_READS = (
    "lr",
    "seed",
    "tokens_per_step",
    "ttt_steps",
    "ttt_decay",
    "warmup_ratio",
    "clip_norm",
)
_SMALL = {"tokens_per_step": 400, "ttt_steps": 3}
DATA = {"anchor": anchor, "anchor_split": anchor_split, "run": lambda _: finished_run()}
_PLAIN: dict[str, Any] = {"induction": False, "soup": 1, "dtype": "float32"}
_LOOKING = {"induction": True, "dtype": "bfloat16"}
Gains = list[tuple[int, ...]]  # of every held-out prompt
# Each but the first changes a plain run: one, in float32, of heads that do not look back.
RECIPES = {
    OURS: Recipe(trainer="eyas"),
    f"{PEER}_1e-3": Recipe(trainer="specforge", settings={"start": "random", "lr": 1e-3, **_SMALL}),
    f"{PEER}_3e-4": Recipe(trainer="specforge", settings={"start": "random", "lr": 3e-4, **_SMALL}),
    "specforge_from_ridge": Recipe(trainer="specforge", settings={"lr": 1e-4, **_SMALL}),
    "ridge_untrained": Recipe(trainer="none"),
    "feedback_untrained": Recipe(trainer="none", settings={"feedback_rounds": 1}),
    "feedback": Recipe(trainer="eyas", settings={"feedback_rounds": 1}),
    "feedback_epochs_3": Recipe(trainer="eyas", settings={"feedback_rounds": 1, "epochs": 3}),
    "epochs_4": Recipe(trainer="eyas", settings={"epochs": 4}),
    "epochs_2": Recipe(trainer="eyas", settings={"epochs": 2}),
    "epochs_3": Recipe(trainer="eyas", settings={"epochs": 3}),
    "random_start_1e-3": Recipe(trainer="eyas", settings={"start": "random", "lr": 1e-3}),
    "tokens_256": Recipe(trainer="eyas", settings={"tokens_per_step": 256}),
    "tokens_1024": Recipe(trainer="eyas", settings={"tokens_per_step": 1024}),
    "ttt_4": Recipe(trainer="eyas", settings={"ttt_steps": 4}),
    "decay_1": Recipe(trainer="eyas", settings={"ttt_decay": 1.0}),
    "fc_rate_0.3": Recipe(trainer="eyas", fc_rate=0.3),
    "fc_rate_3": Recipe(trainer="eyas", fc_rate=3.0),
    "temperature_0.7": Recipe(trainer="eyas", temperature=0.7),
    "loss_tv": Recipe(trainer="eyas", settings={"loss": "tv"}),
    "loss_nla": Recipe(trainer="eyas", settings={"loss": "nla"}),
    "loss_lk": Recipe(trainer="eyas", settings={"loss": "lk"}),
    "bfloat16_3": Recipe(trainer="eyas", settings={"dtype": "bfloat16", "epochs": 3}),
    "induction_untrained": Recipe(trainer="none", settings={"induction": True}),
    "induction_epochs_4": Recipe(trainer="eyas", settings={"induction": True, "epochs": 4}),
    "induction_3": Recipe(trainer="eyas", settings={**_LOOKING, "epochs": 3}),
    "induction_3_lk": Recipe(trainer="eyas", settings={**_LOOKING, "epochs": 3, "loss": "lk"}),
    "soup_2_of_2": Recipe(trainer="eyas", settings={**_LOOKING, "epochs": 2, "soup": 2}),
    "soup_2_of_3": Recipe(trainer="eyas", settings={**_LOOKING, "epochs": 3, "soup": 2}),
    "fc_norm_untrained": Recipe(trainer="none", fc_norm=True),
    "fc_norm_epochs_1": Recipe(trainer="eyas", fc_norm=True, settings={"epochs": 1}),
    "fc_norm_epochs_3": Recipe(trainer="eyas", fc_norm=True, settings={"epochs": 3}),
    "epochs_1": Recipe(trainer="eyas", settings={"epochs": 1}),
    "lr_4e-4": Recipe(trainer="eyas", settings={"lr": 4e-4}),
}


def main() -> None:
    """Read the arguments, make what is missing, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", choices=sorted(DATA), default="anchor")
    parser.add_argument("--anchor", type=Path, default=Path("../shared/anchor"))
    parser.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=[OURS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cpu-minutes", type=float, default=8.0)
    parser.add_argument("--peer-kit", type=Path, default=Path("../shared/peers"))
    parser.add_argument("--peer-python", type=Path, default=Path(".venv-peers/bin/python"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = DATA[given.data](given.anchor)
    place = Place(
        folder=KEPT,
        budget_cpu_s=60 * given.cpu_minutes,
        peer_kit=given.peer_kit,
        peer_python=given.peer_python,
    )
    gains: dict[str, list[Gains]] = {LOOKUP: [lookup_gains(data)]}
    for seed in given.seeds:
        for name in given.recipes:
            line, found = run(data, name, seed, place)
            gains.setdefault(name, []).append(found)
            print(json.dumps(line), flush=True)
    for line in summaries(data, gains):
        print(json.dumps(line), flush=True)


def run(data: Data, name: str, seed: int, place: Place) -> tuple[dict[str, Any], Gains]:
    """Make a drafter, or take the one that is kept; return its line and its gains by prompt."""
    recipe, base = RECIPES[name], read_params().section("train", Train)
    base = with_dtype(base if name == OURS else dataclasses.replace(base, **_PLAIN))
    data = with_fc_norm(data) if recipe.fc_norm else data
    base = dataclasses.replace(base, seed=seed)
    folder = KEPT / key_of(data, recipe, base, place)
    kept = folder / "result.json"
    if not kept.is_file():
        facts = build(data, recipe, base, dataclasses.replace(place, folder=folder))
        write_json(kept, facts | {"gains": drafter_gains(data, folder / "drafter.safetensors")})
    result = read_json(kept)
    found = [tuple(gains) for gains in result.pop("gains")]
    line = {"what": "run", "recipe": name, "seed": seed, "data": data.name, "key": folder.name}
    return line | result | taus_of(data, [found]), found


def key_of(data: Data, recipe: Recipe, base: Train, place: Place) -> str:
    """Return a name for all that a run's result depends on, our training's source included."""
    settings = dataclasses.asdict(base) | dict(recipe.settings)
    about = dataclasses.asdict(recipe) | {
        "settings": settings,
        "by_rate": "epochs" not in recipe.settings,
    }
    if recipe.trainer == "specforge" and settings["start"] == "random":
        about["settings"] = {name: settings[name] for name in _PEER_READS}
    judged_on = [[path.source, path.prompt_tokens, path.ids] for path in data.paths]
    parts: list[Any] = [data.digest, about, place.budget_cpu_s]
    parts += [dataclasses.asdict(data.config), judged_on]
    if recipe.trainer == "eyas":
        parts.append(checkpoint.digest_of({}, {}))
    if settings["start"] == "ridge":
        parts.append([sha256_of(Path(module.__file__)) for module in (ridge, feedback, induction)])
    text = canonical_json(parts)
    return hashlib.sha256(text).hexdigest()[:16]


@torch.inference_mode()
def drafter_gains(data: Data, weights: Path) -> Gains:
    """Return the tokens gained by every verification of every held-out prompt."""
    runner = DraftRunner(read_tensors(weights), data.config, data.head.embed_VD)
    gains: Gains = []
    for path in data.paths:
        if len(path.ids) < path.prompt_tokens + 2:
            gains.append(())
            continue
        drafts = runner.draft_everywhere(path.ids, path.aux_TLD, NUM_DRAFTS).tolist()
        chains = ac.replay(path.ids, path.prompt_tokens, lambda n, d=drafts: d[n - 2], NUM_DRAFTS)
        gains.append(chains.gains)
    return gains


def lookup_gains(data: Data) -> Gains:
    """Return the same of prompt lookup."""
    lookup = Lookup(max_ngram=LOOKUP_NGRAM)
    return [
        ac.replay(
            path.ids,
            path.prompt_tokens,
            lambda n, ids=path.ids: lookup.propose(ids[:n], NUM_DRAFTS),
            NUM_DRAFTS,
        ).gains
        for path in data.paths
    ]


def taus_of(data: Data, seeds: Sequence[Gains]) -> dict[str, float]:
    """Return tau over all prompts and by source, runs of several seeds pooled."""
    result = {"tau": round(ac.tau_of([g for gains in seeds for g in gains]), 4)}
    for source, rows in sources_of(data).items():
        result[f"tau_{source}"] = round(ac.tau_of([gains[i] for gains in seeds for i in rows]), 4)
    return result


def sources_of(data: Data) -> dict[str, list[int]]:
    """Return the held-out prompts of each source."""
    found: dict[str, list[int]] = {}
    for index, path in enumerate(data.paths):
        found.setdefault(path.source, []).append(index)
    return found


def summaries(data: Data, gains: Mapping[str, list[Gains]]) -> Iterator[dict[str, Any]]:
    """Give a line for each recipe: tau, and against the peer's best, prompt lookup and ours."""
    mean = {name: taus_of(data, seeds)["tau"] for name, seeds in gains.items()}
    peers = [name for name in gains if name.startswith(PEER)]
    peer = max(peers, key=lambda name: mean[name], default=None)
    for name, seeds in gains.items():
        each = [taus_of(data, [one])["tau"] for one in seeds]
        line: dict[str, Any] = {"what": "summary", "recipe": name, "data": data.name}
        line |= {"seeds": len(seeds), "tau_by_seed": each} | taus_of(data, seeds)
        for other in dict.fromkeys((peer, LOOKUP, OURS)):
            if other in gains and other != name:
                line[f"over {other}"] = compare(data, seeds, gains[other])
        if name == OURS:
            line["bars"] = BARS | {
                "tau_met": mean[name] >= BARS["tau"],
                "aim_met": mean[name] >= BARS["aim"],
                "over_peer_met": bool(peer)
                and mean[name] >= BARS["over_peer"] * mean[peer or name],
                "above_lookup": line[f"over {LOOKUP}"]["difference_low"] > 0,
            }
        yield line


def compare(data: Data, ours: Sequence[Gains], theirs: Sequence[Gains]) -> dict[str, float]:
    """Return difference and ratio of two taus, with the difference's 95 % interval."""
    draw, differences = random.Random(0), list[float]()
    groups = list(sources_of(data).values())
    sums = [[prompt_sums(seeds, row) for row in range(len(data.paths))] for seeds in (ours, theirs)]

    def taus(rows: Sequence[int]) -> list[float]:
        pairs = [[one[row] for row in rows] for one in sums]
        return [sum(t for t, _ in one) / max(sum(v for _, v in one), 1) for one in pairs]

    for _ in range(ROUNDS):
        mine, other = taus([row for group in groups for row in draw.choices(group, k=len(group))])
        differences.append(mine - other)
    differences.sort()
    mine, other = taus(range(len(data.paths)))
    return {
        "difference": round(mine - other, 4),
        "difference_low": round(differences[int(0.025 * ROUNDS)], 4),
        "difference_high": round(differences[int(0.975 * ROUNDS)], 4),
        "ratio": round(mine / other, 4),
    }


def prompt_sums(seeds: Sequence[Gains], row: int) -> tuple[int, int]:
    """Return a prompt's tokens and verifications, runs of several seeds pooled."""
    return sum(sum(gains[row]) for gains in seeds), sum(len(gains[row]) for gains in seeds)


if __name__ == "__main__":
    main()
