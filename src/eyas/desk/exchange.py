"""Give the hidden states to another trainer, or take its files: `eyas store export | import`.

Reads: params.yaml, models/target; to give, data/hidden_states/manifest.json.
"""

from pathlib import Path

from eyas.desk.params import read_params
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.settings import Extract, Runtime
from eyas.states import foreign
from eyas.states.folder import SIDECAR
from eyas.states.store import open_store, read_manifest
from eyas.states.target import load_head

TARGET = Path("models/target")
MANIFEST = Path("data/hidden_states/manifest.json")


def exchange(way: str, form: str, folder: str | None, out: Path | None, codec: str) -> str:
    """Write the store into a folder, or make of one the store `out`; return a line to read."""
    if folder is None or (out is None) == (way == "import"):
        raise EyasError(f"eyas store {way}: expected a FOLDER, and for import alone --out")
    params, head = read_params(), load_head(TARGET)
    about = read_json(TARGET / SIDECAR, hint="dvc repro target")
    if out:
        settings = params.section("extract", Extract)
        return foreign.import_folder(form, Path(folder), out, head, about, settings)
    store = open_store(MANIFEST, Path(params.knob("runtime", Runtime).store))
    if (ours := store.meta.target_revision) != about["revision"]:
        raise EyasError(f"{MANIFEST}: expected states of target {about['revision']}, got {ours}")
    if read_manifest(MANIFEST).windows:
        raise EyasError(
            f"{MANIFEST}: its shards of training come and go", hint="extract.window_gb=null"
        )
    return foreign.export_store(store, Path(folder), form, head, codec)
