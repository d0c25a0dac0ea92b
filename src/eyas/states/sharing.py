"""Share the shards of a hidden-state store through a folder or an object store.

Reads: data/hidden_states/manifest.json, <store>/<key>. Writes: <url>/<sha256>.safetensors; `pull`
the other way round. Source: https://filesystem-spec.readthedocs.io (fsspec carries the bytes).
A shard is named by its content: what is there is never written again, two machines whose numbers
differ do not meet, and a broken-off run goes on with the next shard. The manifest itself is DVC's.
"""

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from eyas.errors import EyasError
from eyas.files import replacing, write_json
from eyas.states.shards import Shard, check_space, shard_fault
from eyas.states.store import HINT, read_manifest

log = logging.getLogger("eyas")


@dataclass(slots=True)
class Moved:
    """What a push or a pull did."""

    shards: int = 0
    size_bytes: int = 0
    there_already: int = 0

    def count(self, shard: Shard) -> None:
        """Count and tell a shard that was copied."""
        self.shards += 1
        self.size_bytes += shard.size_bytes
        log.info("%s: copied and verified, %d bytes", shard.name, shard.size_bytes)

    def __str__(self) -> str:
        """Return the line for the reader."""
        return (
            f"{self.shards} shards copied ({self.size_bytes / 1e9:,.2f} GB), "
            f"{self.there_already} were there"
        )


def push(manifest: Path, folder: Path, url: str, options: Mapping[str, str]) -> Moved:
    """Copy the manifest's shards to `url`; `folder` is runtime.store.

    Raises: EyasError for a shard that is missing or altered here, or a `url` out of reach.
    """
    index, moved = read_manifest(manifest), Moved()
    with _reaching(url, options) as (fs, base):
        for shard in index.shards:
            path = folder / index.meta.key / shard.name
            there = f"{base}/{shard.sha256}.safetensors"
            if _size(fs, there) == shard.size_bytes:
                moved.there_already += 1
                continue
            if fault := shard_fault(path, shard):
                raise EyasError(fault, hint=HINT)
            _put(fs, path, there)
            moved.count(shard)
    return moved


def pull(manifest: Path, folder: Path, url: str, options: Mapping[str, str]) -> Moved:
    """Fetch the manifest's shards from `url` into `folder`, where intact ones are kept.

    Raises: EyasError for a shard missing or altered there, a full disk, or a `url` out of reach.
    """
    index, moved = read_manifest(manifest), Moved()
    home = folder / index.meta.key
    missing = [shard for shard in index.shards if shard_fault(home / shard.name, shard)]
    moved.there_already = len(index.shards) - len(missing)
    home.mkdir(parents=True, exist_ok=True)
    check_space(home, sum(shard.size_bytes for shard in missing))
    with _reaching(url, options) as (fs, base):
        for shard in missing:
            with replacing(home / shard.name) as part:
                fs.get_file(f"{base}/{shard.sha256}.safetensors", str(part))
                if fault := shard_fault(part, shard):
                    raise EyasError(
                        f"{url}: {shard.name} ({fault.partition(': ')[2]})",
                        hint="whoever has the states removes that file and runs `eyas store push`",
                    )
            write_json((home / shard.name).with_suffix(".json"), dataclasses.asdict(shard))
            moved.count(shard)
    return moved


def _put(fs: Any, path: Path, there: str) -> None:
    """Let a file appear whole or not at all, as object stores do by themselves."""
    if "file" not in fs.protocol:
        fs.put_file(str(path), there)
        return
    fs.makedirs(fs._parent(there), exist_ok=True)
    part = f"{there}.{uuid.uuid4().hex}.part"
    fs.put_file(str(path), part)
    fs.mv(part, there)


def _size(fs: Any, there: str) -> int | None:
    """Return the bytes of a file over there; None where there is none."""
    try:
        return fs.info(there)["size"]
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _reaching(url: str, options: Mapping[str, str]) -> Generator[tuple[Any, str]]:
    """Open the place; whatever its library raises becomes one line that names it."""
    try:
        yield url_to_fs(url, **options)
    except EyasError:
        raise
    except Exception as error:  # each kind of store has exceptions of its own
        raise EyasError(
            f"{url}: {type(error).__name__}: {error}",
            hint="run it again, it goes on; for s3:// see `make remote`: packages, credentials",
        ) from error
