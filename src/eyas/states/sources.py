"""Find the files of a target inside an installed wheel or on the Hugging Face hub.

Reads: an installed package (never imported), the hub's cache. Writes: the hub's cache.
Source: https://huggingface.co/docs/huggingface_hub/guides/download
"""

import importlib.util
import re
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import read_json, sha256_of
from eyas.states.folder import INDEX, head_keys, weight_map

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
_HUB_WEIGHTS = "*.safetensors"


def wheel_file(package: str, file: str, sha256: str) -> Path:
    """Return the path of a file that an installed package ships, without importing the package.

    Raises: EyasError if the package or the file is missing, or the file's sha256 differs.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise EyasError(
            f"package '{package}': expected to be installed, not found", hint="run `make install`"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise EyasError(
            f"{path}: no such file in package '{package}'",
            hint="check target.source.file, or reinstall with `make install`",
        )
    if (digest := sha256_of(path)) != sha256:
        raise EyasError(
            f"{path}: expected sha256 {sha256}, got {digest}",
            hint="another version of the package is installed; run `make install`",
        )
    return path


def hub_folder(repo: str, revision: str, *, head_only: bool = False) -> Path:
    """Return the local snapshot of a hub repository at one commit, downloading what is missing.

    `head_only`: of the weights, only the files that hold embedding, final norm and lm_head, which
    are found in the index.

    Raises: EyasError if the revision is not a full commit hash or the snapshot cannot be had.
    """
    if not _COMMIT.fullmatch(revision):
        raise EyasError(
            f"target.source.revision: expected a commit of 40 hex digits, got '{revision}'",
            hint="branches and tags move; copy the commit from the repository's history page",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def fetch(patterns: list[str]) -> Path:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))

    try:
        folder, weights = fetch(list(_HUB_PATTERNS)), [_HUB_WEIGHTS]
        if head_only and (folder / INDEX).is_file():
            where = weight_map(folder)
            weights = [where[k].name for k in head_keys(folder, read_json(folder / "config.json"))]
        return fetch(weights)
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0]
        raise EyasError(
            f"hub repository {repo} at {revision}: neither cached nor to be downloaded ({reason})",
            hint="unset HF_HUB_OFFLINE to download; gated models need HF_TOKEN",
        ) from None
