"""Count what a colleague has bought: answers that DVC brought from the remote are held here too.

Reads: dvc.lock, DVC's cache, data/responses/DS.jsonl. Writes: var/journal/DS.
DVC removes a stage's outs before it runs the stage, but what dvc.lock names stays in its cache.
"""

import dataclasses
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.desk.digests import LOCK, locked_stage
from eyas.errors import EyasError
from eyas.files import iter_records
from eyas.generation.jobs import Job, Wish
from eyas.generation.journal import Journal
from eyas.records import Response

log = logging.getLogger("eyas")


def take_shared(jobs: Sequence[Job], journal: Journal, wish: Wish, out: Path) -> None:
    """Write answers that are known here but not held into the journal.

    Raises: EyasError if dvc.lock names paid answers that are not here: they would be bought again.
    """
    if all(job.fingerprint in journal.books.entries for job in jobs):
        return
    stage = locked_stage(f"generate@{out.stem}", LOCK)
    locked = {entry["path"]: entry for entry in stage.get("outs", [])}.get(out.as_posix(), {})
    md5 = locked.get("md5")
    cached = _cache_folder() / "files/md5" / md5[:2] / md5[2:] if md5 else None
    if cached and not (cached.is_file() or out.is_file()):
        held_bytes = (journal.folder / "responses.jsonl").stat().st_size
        if held_bytes < locked["size"]:  # a journal has at least what was written from it
            _check_not_paid(stage, wish, out)
    held = len(journal.books.entries)
    for path in filter(None, (out, cached)):
        hint = f"remove it; `dvc checkout {out}` restores it"
        for response in iter_records(path, Response, hint=hint) if path.is_file() else ():
            if response.fingerprint not in journal.books.entries:
                journal.write("responses", dataclasses.asdict(response))
    if taken := len(journal.books.entries) - held:
        log.info("%d answers of %s were not in %s and are taken over", taken, out, journal.folder)


def _check_not_paid(stage: dict[str, Any], wish: Wish, out: Path) -> None:
    """Refuse to buy what dvc.lock says has been bought from the same endpoint."""
    before = stage.get("params", {}).get("params.yaml", {}).get("endpoint", {}).get("name")
    if wish.endpoint.prices is None and before == wish.endpoint.name:
        raise EyasError(
            f"{out}: {LOCK} names answers of {before} that are neither here nor in the journal",
            hint=f"fetch them with `dvc pull generate@{out.stem}`, so that they are not bought "
            f"twice; if they are lost, take generate@{out.stem} out of {LOCK}",
        )


def _cache_folder() -> Path:
    found = subprocess.run(["dvc", "cache", "dir"], capture_output=True, text=True, check=False)
    if found.returncode:
        raise EyasError(f"`dvc cache dir`: {found.stderr.strip()}", hint="run `make install`")
    return Path(found.stdout.strip())
