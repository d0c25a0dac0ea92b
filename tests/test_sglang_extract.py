"""A real SGLang captures what the target in this process computes."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.desk.params import Params, read_params
from eyas.stages import extract, target

ROOT = Path.cwd()
PYTHON = ROOT / ".venv-sglang/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-sglang: run `make test-sglang`"),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "sglang_server", raising=False)
    spec = importlib.util.spec_from_file_location("extract_bench", ROOT / "benchmarks/extract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default target's folder: of the last run, else built."""
    made = ROOT / "models/target"
    if not made.is_dir():
        params = read_params()
        with monkeypatch.context() as there:
            there.chdir(tmp_path)
            target.work(params)
        made = tmp_path / target.FOLDER
    return made


def test_both_backends_store_the_same_states_in_float32(bench: Any, folder: Path) -> None:
    with bench.working_folder(folder, 300) as tree:
        extract.work(Params(tree))
        made, equal = bench.sglang_lines(tree, speed=False)
    assert made["rows_in"] == made["rows_out"] == equal["samples"]
    assert made["teacher_argmax_agreement"] >= 0.97
    assert equal["met"], equal
