"""What an export says of its data, and what this repository knows of its making.

Reads: an export folder, dvc.lock and git, or the record of a sweep's job. Run: eyas lineage.
"""

import json
import textwrap
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from eyas.desk.digests import LOCK, folder_digest, git, outs_of, read_yaml
from eyas.desk.lineage import HEADS, KEY, Lineage, rows, story
from eyas.errors import EyasError
from eyas.files import read_json, sha256_of

_WEIGHTS = "model.safetensors"
_DATA, _ASIDE = ("data/", "models/"), (".rejects.jsonl", ".providers.json")


def read_lineage(folder: Path) -> Lineage:
    """Return what the weights of an export say of themselves.

    Raises: EyasError if they are no export of eyas, or of a version that told nothing.
    """
    from safetensors import SafetensorError, safe_open

    weights = folder / _WEIGHTS
    try:
        with safe_open(weights, framework="np") as file:
            told = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise EyasError(
            f"{weights}: not readable ({error})",
            hint="run `dvc repro export` (or `dvc pull`), or name an export folder",
        ) from None
    if KEY not in told:
        raise EyasError(f"{weights}: no lineage in its metadata", hint="run `dvc repro export`")
    target = {"name": told["target"], "revision": told["target_revision"]}
    return {"target": target, **json.loads(told[KEY])}


def look_up(folder: Path, datasets: Container[str]) -> Lineage:
    """Return commit, parameters and digests of an export, as far as this repository knows it."""
    digest = folder_digest(folder)
    if (job := folder.resolve().parent.parent / "job.json").is_file():
        record = read_json(job)
        made = " with uncommitted changes" if record["dirty"] else ""
        params = read_yaml(job.with_name("params.yaml"))
        return {"digest": digest, "commit": f"{record['commit']}{made}, a job of a sweep"} | {
            "params": {k: v for k, v in params.items() if k not in ("runtime", "select")},
            "data": record["inputs"],
        }
    text, commit = _lock_with(digest)
    lock = (yaml.safe_load(text) or {}) if text else {}
    params: Lineage = {}
    for stage in lock.get("stages", {}).values():
        params |= stage.get("params", {}).get("params.yaml", {})
    data = outs_of(lock, datasets)
    kept = {p: md5 for p, md5 in data.items() if p.startswith(_DATA) and not p.endswith(_ASIDE)}
    return {"digest": digest, "commit": commit, "params": params, "data": kept}


def _lock_with(digest: str) -> tuple[str, str]:
    """Return the dvc.lock that names an export, and the commit that brought it."""
    here = LOCK.read_text(encoding="utf-8") if LOCK.is_file() else ""
    if digest in here and digest not in git("show", f"HEAD:{LOCK}"):
        return here, f"{git('rev-parse', 'HEAD')} and a dvc.lock that is not committed yet"
    search = ("--reverse", "--format=%H", f"-S{digest}", "--", str(LOCK))
    found = f"{git('log', *search)}\n{git('log', '--all', *search)}"
    for commit in found.split():
        if digest in (text := git("show", f"{commit}:{LOCK}")):
            return text, f"{commit} ({git('show', '-s', '--format=%cs, %s', commit)})"
    return "", "unknown to the git history here"


def render(folder: Path, lineage: Lineage, found: Lineage) -> Iterator[str]:
    """Yield the lines of the print-out, at most 80 columns wide but for names that are longer."""
    yield f"drafter    {folder}, weights sha256 {sha256_of(folder / _WEIGHTS)[:16]}"
    yield f"target     {lineage['target']['name']}, revision {lineage['target']['revision'][:16]}"
    yield from _wrapped("commit     ", found["commit"])
    yield ""
    table = [HEADS, *rows(lineage)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
    for row in table:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = (c.rjust(w) for c, w in zip(row[2:], widths[2:], strict=True))
        yield "  ".join([left, *right]).rstrip()
    yield ""
    for name, one in lineage["datasets"].items():
        yield from _wrapped(f"{name}: ", story(one).replace("`", ""))
    if not found["params"]:
        return
    yield "\nparameters"
    for section, value in sorted(found["params"].items()):
        if not section.startswith("datasets"):
            yield from _wrapped(f"  {section}: ", _flat(value))
    yield "\ndata (md5 as DVC has it)"
    for path, md5 in sorted(found["data"].items()):
        yield f"  {md5[:16]}  {path}"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(head + text, 80, subsequent_indent="    ", break_long_words=False)


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "null" if value is None else str(value)
