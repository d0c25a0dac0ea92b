"""Where a drafter's data come from: answers, providers, dollars, rejects. Stored in the export.

Reads: data/responses, data/samples, data/valid, data/mixture. It is a function of these files alone
(no clock, no commit), so that DVC's run cache stays good; `lineage_lookup` finds the rest.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.desk.words import dollars, number
from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.parquet import read_packed

KEY = "eyas_lineage"  # in the metadata of the exported weights
_TRAIN = Path("data/mixture/train.parquet")
_COUNTED = ("prompt_tokens", "completion_tokens", "cost_usd")
_NO_PROVIDER = "trajectories"  # nobody was asked
Lineage = dict[str, Any]


def collect(datasets: Sequence[str]) -> Lineage:
    """Return the lineage of the drafter trained on the mixture; equal files give equal values.

    Raises: EyasError if the mixture has a data set that is not among them.
    """
    trained: Counter[tuple[str, str]] = Counter()
    tokens: Counter[str] = Counter()
    for sample in read_packed(_TRAIN, hint="run `dvc repro merge`"):
        trained[sample.dataset, sample.provider or _NO_PROVIDER] += 1
        tokens[sample.dataset] += len(sample.input_ids)
    if strange := tokens.keys() - set(datasets):
        raise EyasError(
            f"{_TRAIN}: has rows of {', '.join(sorted(strange))}, not in merge.sources",
            hint="run `dvc repro`",
        )
    sets = {name: _dataset(name) for name in datasets}
    for (name, provider), count in trained.items():
        sets[name]["providers"].setdefault(provider, {"answers": 0})["in_training"] = count
    for name, count in tokens.items():
        sets[name]["training_tokens"] = count
    return {"format": 1, "train_md5": _md5_of(_TRAIN), "datasets": sets}


def _dataset(name: str) -> Lineage:
    """Return what one data set brought, by provider, and what was dropped, by rule."""
    path = Path(f"data/responses/{name}.jsonl")
    providers: dict[str, Lineage] = {}
    asked: set[str] = set()
    for row in read_jsonl(path, hint=f"run `dvc repro generate@{name}`"):
        told = providers.setdefault(row["provider"], {"answers": 0, **dict.fromkeys(_COUNTED, 0)})
        told["answers"] += 1
        for key in _COUNTED:
            told[key] = round(told[key] + row[key], 9)
        sampling = {k: v for k, v in row["sampling"].items() if k not in ("seed", "max_tokens")}
        words = ", ".join(f"{k} {v}" for k, v in sorted(sampling.items()))
        asked.add(f"{row['model']} ({words})")
    rejects: Counter[str] = Counter()
    for stage in ("samples", "valid"):
        for row in read_jsonl(Path(f"data/{stage}/{name}.rejects.jsonl")):
            rejects[row["rule"]] += row["severity"] == "reject"
    return {
        "responses_md5": _md5_of(path),
        "asked": sorted(asked),
        "providers": dict(sorted(providers.items())),
        "rejects": {rule: count for rule, count in sorted(rejects.items()) if count},
    }


def _md5_of(path: Path) -> str:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "md5").hexdigest()


def rows(lineage: Lineage) -> list[tuple[str, ...]]:
    """Return a row a data set and provider, and their sum."""
    found: list[tuple[str, ...]] = []
    sums: Counter[str] = Counter()
    for name, one in lineage["datasets"].items():
        for provider, told in one["providers"].items():
            sums.update(told)
            found.append((name, provider, *_cells(told)))
    return [*found, ("all", "", *_cells(sums))]


def _cells(told: Mapping[str, Any]) -> tuple[str, ...]:
    asked = told["answers"] > 0
    tokens = told.get("prompt_tokens", 0) + told.get("completion_tokens", 0)
    cost = told.get("cost_usd", 0.0) if asked else None
    return (
        number(told["answers"] if asked else None),
        number(tokens if asked else None),
        dollars(cost),
        dollars(cost / tokens * 1e6 if cost is not None and tokens else None),
        number(told.get("in_training", 0)),
    )


HEADS = ("data set", "provider", "answers", "tokens", "USD", "USD/Mtok", "trained on")


def card(lineage: Lineage) -> str:
    """Return the part of the model card that tells where the training data come from."""
    lines = ["## Where its data come from", "", f"| {' | '.join(HEADS)} |"]
    lines += ["|" + "---|" * len(HEADS), *(f"| {' | '.join(row)} |" for row in rows(lineage)), ""]
    for name, one in lineage["datasets"].items():
        lines.append(f"- {name}: {story(one)}")
    return "\n".join([*lines, "", "With the repository at hand: `eyas lineage THIS_FOLDER`.", ""])


def story(one: Lineage) -> str:
    """Return what was asked of whom, what was dropped, and the digest, for one data set."""
    dropped = ", ".join(f"{rule} {count:,}" for rule, count in one["rejects"].items())
    asked = "; ".join(one["asked"]) or "written by the target before, nobody was asked"
    return f"{asked}. Dropped: {dropped or 'none'}. Responses, md5 `{one['responses_md5']}`."
