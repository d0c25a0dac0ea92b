"""A finished run, wherever it is: a git revision, an experiment of DVC, or a folder.

Reads: params.yaml, dvc.lock and metrics/ (from git or a folder), data/evaluation.json and
models/drafter/config.json (from the folder, DVC's cache or its remote). A folder is a working tree
(`.`) or a job of a sweep (var/sweeps/jobs/KEY).
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from eyas.desk.digests import git, outs_of
from eyas.desk.results import Results
from eyas.errors import EyasError

_ROUNDS = 2000  # of the bootstrap
SOURCES = ("src", "conf", "dvc.yaml", "requirements")
_EVALUATION, _DRAFTER = "data/evaluation.json", "models/drafter/config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run was made of and what it gave."""

    name: str
    commit: str
    params: Mapping[str, Any]
    digests: Mapping[str, str]  # of outs: path -> DVC's md5
    results: Results
    drafter: Mapping[str, Any]  # its config; empty where it cannot be had
    missing: tuple[str, ...]  # files that neither the folder nor DVC has
    dirty: bool = False  # sources differ from the commit


def read_run(name: str) -> Run:
    """Return a run by the name of a folder, a git revision, or an experiment of DVC.

    Raises: EyasError if there is no such run, or no run in it.
    """
    folder = Path(name)
    if (folder / "params.yaml").is_file():
        job = json.loads(_text(folder / "job.json") or "{}")
        title = f"job {folder.name}" if job else "working tree"
        commit = job.get("commit") or git("-C", name, "rev-parse", "HEAD")
        changed = ("-C", name, "status", "--porcelain", "--untracked-files=no", "--", *SOURCES)
        dirty = job["dirty"] if job else bool(git(*changed))
        metrics = [f"metrics/{path.name}" for path in (folder / "metrics").glob("*.json")]
        run = _read(title, commit, lambda path: _text(folder / path), metrics)
        return replace(run, digests={**run.digests, **job.get("inputs", {})}, dirty=dirty)
    commit = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") or _experiment(name)
    if not commit:
        raise EyasError(
            f"'{name}': neither a folder with params.yaml nor a git revision nor an experiment",
            hint="see `git log -- dvc.lock`, `dvc exp show`, var/sweeps/jobs",
        )
    metrics = git("ls-tree", "--name-only", commit, "metrics/").splitlines()
    return _read(name, commit, lambda path: _text_at(commit, path), metrics)


def _read(name: str, commit: str, text_of: Callable[[str], str], metrics: Sequence[str]) -> Run:
    params = yaml.safe_load(text_of("params.yaml")) or {}
    if not metrics or "merge" not in params:
        raise EyasError(f"'{name}': no run has been here", hint="name one with metrics/ in it")
    datasets = tuple(params["merge"]["sources"])
    evaluation, drafter = text_of(_EVALUATION), text_of(_DRAFTER)
    return Run(
        name=name,
        commit=commit,
        params={k: v for k, v in params.items() if k not in ("runtime", "select")},
        digests=outs_of(yaml.safe_load(text_of("dvc.lock")) or {}, datasets),
        results=Results(
            metrics={Path(n).stem: json.loads(text_of(n)) for n in sorted(metrics)},
            evaluation=json.loads(evaluation) if evaluation else None,
            datasets=datasets,
        ),
        drafter=json.loads(drafter or "{}"),
        missing=tuple(p for p, t in ((_EVALUATION, evaluation), (_DRAFTER, drafter)) if not t),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _experiment(name: str) -> str:
    """Return the commit of an experiment of DVC: a ref that ends in its name."""
    refs = git("for-each-ref", "--format=%(objectname) %(refname)", "refs/exps").splitlines()
    return next((ref.split()[0] for ref in refs if ref.endswith(f"/{name}")), "")


def _text_at(revision: str, path: str) -> str:
    """Return a file of a revision, an out from DVC's cache or remote; nothing where none has it."""
    if path not in (_EVALUATION, _DRAFTER):
        return git("show", f"{revision}:{path}")
    import dvc.api
    from dvc.exceptions import DvcException
    from dvc_data.index import DataIndexError

    try:
        return dvc.api.read(path, repo=".", rev=revision)
    except (DvcException, DataIndexError, OSError):
        return ""


def difference(a: Results, b: Results, dataset: str | None = None) -> tuple[float, float] | None:
    """Return the 95 % interval of tau(b) - tau(a), by bootstrap over the prompts of both.

    None unless both decoded the very same prompts to replies of the same length.
    """
    pairs = _paired(a, b, dataset)
    if not pairs:
        return None
    draw = random.Random(0)
    gaps = sorted(_gap(draw.choices(pairs, k=len(pairs))) for _ in range(_ROUNDS))
    return gaps[int(0.025 * _ROUNDS)], gaps[int(0.975 * _ROUNDS)]


def _paired(a: Results, b: Results, dataset: str | None) -> list[tuple[int, int, int]]:
    """Return tokens gained, and verifications of a and of b, for each prompt."""
    first, second = _prompts(a, dataset), _prompts(b, dataset)
    if not first or {k: v[0] for k, v in first.items()} != {k: v[0] for k, v in second.items()}:
        return []
    return [(tokens, count, second[key][1]) for key, (tokens, count) in first.items()]


def _prompts(results: Results, dataset: str | None) -> dict[str, tuple[int, int]]:
    rows: Sequence[Mapping[str, Any]] = (results.evaluation or {}).get("prompts", ())
    return {
        row["id"]: (max(row["reply_tokens"] - 1, 0), row["verifications"])
        for row in rows
        if dataset in (None, row["dataset"])
    }


def _gap(pairs: Sequence[tuple[int, int, int]]) -> float:
    tokens, first, second = (sum(column) for column in zip(*pairs, strict=True))
    return tokens / max(second, 1) - tokens / max(first, 1)
