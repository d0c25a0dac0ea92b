"""Give the hidden states to other trainers, and take theirs: `eyas store export | import`.

Reads: params.yaml, models/target, and for an export data/hidden_states/manifest.json.
Writes: what states/exchange.py says.
"""

from pathlib import Path

from eyas.desk.params import read_params
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.settings import Extract, Runtime
from eyas.states.exchange import export_store, import_folder
from eyas.states.folder import SIDECAR
from eyas.states.store import open_store
from eyas.states.target import load_head

TARGET = Path("models/target")
MANIFEST = Path("data/hidden_states/manifest.json")
_HINT = "dvc repro target"


def export_states(form: str, folder: Path, codec: str) -> str:
    """Write the store for another trainer; return a line for the reader."""
    store = open_store(MANIFEST, Path(read_params().knob("runtime", Runtime).store))
    ours, here = store.meta.target_revision, read_json(TARGET / SIDECAR, hint=_HINT)["revision"]
    if ours != here:
        raise EyasError(f"{MANIFEST}: expected states of target {here}, got {ours}")
    return export_store(store, folder, form, load_head(TARGET), codec)


def import_states(form: str, folder: Path, out: Path, train_ratio: float) -> str:
    """Make a store of another trainer's files; return a line for the reader."""
    about = read_json(TARGET / SIDECAR, hint=_HINT)
    settings = read_params().section("extract", Extract)
    return import_folder(form, folder, out, load_head(TARGET), about, settings, train_ratio)
