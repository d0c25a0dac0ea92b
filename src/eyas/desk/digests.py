"""The digests that DVC has for a stage's inputs, and what names the state of the pipeline.

Reads: dvc.yaml, dvc.lock, git, and inputs of up to 64 MB. Source: DVC 3 takes the md5 of a file's
bytes; a folder's digest ends in `.dir`. dvc.lock is written after a stage has ended, so what it
says of the stage's own inputs may be old; what it says of other stages' outs is not.
"""

import json
import operator
import subprocess
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.files import md5_of
from eyas.records import canonical_json

PIPELINE, LOCK = Path("dvc.yaml"), Path("dvc.lock")
_SMALL_BYTES = 64_000_000
_DATA = ("data/", "models/")
_NO_OUTPUT_CHANGES = ("select", "runtime", "hydra")
_PRODUCTS = ("dvc.lock", "params.yaml", "metrics", "reports")  # in git, written by a run
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the outs of a run are a function of: the commit and the parameters."""

    commit: str  # "nogit" outside a repository
    dirty: bool  # sources differ from the commit
    digest: str  # of the parameters that change an output

    @property
    def key(self) -> str:
        """Return the name of the state."""
        return f"{self.commit[:12]}-{self.digest[:8]}"


def read_state(tree: Mapping[str, Any]) -> State:
    """Return the state of the pipeline under these parameters."""
    kept = {name: value for name, value in tree.items() if name not in _NO_OUTPUT_CHANGES}
    excluded = [f":(exclude){name}" for name in _PRODUCTS]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *excluded)
    return State(
        commit=git("rev-parse", "HEAD") or "nogit",
        dirty=bool(changed),
        digest=md5_of(canonical_json(kept)),
    )


def input_digests(title: str, named: Iterable[Path]) -> dict[str, str]:
    """Return path -> md5 of the data a stage read: what it named itself and its deps in dvc.yaml.

    A large file or a folder has the digest that dvc.lock gives the stage which made it; one that
    is unknown there is left out.
    """
    locked = locked_digests(LOCK)
    digests: dict[str, str] = {}
    for path in dict.fromkeys([*named, *declared_data(title, PIPELINE)]):
        name = path.as_posix()
        if path.is_file() and path.stat().st_size <= _SMALL_BYTES:
            digests[name] = md5_of(path.read_bytes())
        elif name in locked:
            digests[name] = locked[name]
        else:
            digests |= {out: md5 for out, md5 in locked.items() if out.startswith(f"{name}/")}
    return digests


def declared_data(title: str, pipeline: Path) -> list[Path]:
    """Return the data and models among the deps of a stage's block in dvc.yaml."""
    stage, _, dataset = title.partition("@")
    block = read_yaml(pipeline).get("stages", {}).get(stage, {})
    deps = [dep.replace("${key}", dataset) for dep in block.get("do", block).get("deps", [])]
    return [Path(dep) for dep in deps if dep.startswith(_DATA)]


def locked_digests(lock: Path) -> dict[str, str]:
    """Return the digest of every out that dvc.lock knows."""
    return outs_of(read_yaml(lock))


def outs_of(lock: Mapping[str, Any], datasets: Container[str] | None = None) -> dict[str, str]:
    """Return path -> digest of the outs in a dvc.lock, which keeps data sets of other experiments.

    With `datasets`, stages of other data sets are left out.
    """
    stages = (
        stage
        for title, stage in lock.get("stages", {}).items()
        if datasets is None or "@" not in title or title.partition("@")[2] in datasets
    )
    outs = (out for stage in stages for out in stage.get("outs", []))
    return {out["path"]: out["md5"] for out in outs if "md5" in out}


def locked_stage(title: str, lock: Path) -> dict[str, Any]:
    """Return what dvc.lock has of a stage; nothing where it has not run yet."""
    return read_yaml(lock).get("stages", {}).get(title, {})


def folder_digest(folder: Path) -> str:
    """Return DVC's digest of a folder: the md5 of the list of its files with theirs."""
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    entries = [
        {"md5": md5_of(path.read_bytes()), "relpath": path.relative_to(folder).as_posix()}
        for path in files
    ]
    entries.sort(key=operator.itemgetter("relpath"))
    return f"{md5_of(json.dumps(entries, sort_keys=True).encode())}.dir"


def git(*arguments: str) -> str:
    """Return what git prints; nothing where there is no repository or no git."""
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML document; an empty one where there is no file."""
    if not path.is_file():
        return {}
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER) or {}
