import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.prompts.sources import read_rows
from eyas.settings import Source

LINES = b'{"id": 1}\n\n[2]\n'
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def rows_of(path: Path) -> list[Any]:
    return list(read_rows(Source(kind="file", path=str(path))))


@pytest.mark.parametrize(
    ("name", "data", "rows"),
    [
        ("rows.jsonl", LINES, [{"id": 1}, [2]]),
        ("BFCL.json", LINES, [{"id": 1}, [2]]),
        ("array.json", b' \n[{"id": 1}, 2]', [{"id": 1}, 2]),
        ("rows.jsonl.gz", gzip.compress(LINES), [{"id": 1}, [2]]),
        ("array.json.gz", gzip.compress(b"[1]"), [1]),
        ("empty.jsonl", b"", []),
    ],
)
def test_file_is_read_by_its_content(
    tmp_path: Path, name: str, data: bytes, rows: list[Any]
) -> None:
    (tmp_path / name).write_bytes(data)
    assert rows_of(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.jsonl", b'{"id": 1}\n{"id": \n', r"rows\.jsonl:2: not JSON"),
        ("array.json", b"[1, 2", r"array\.json: not a JSON array"),
        ("rows.gz", b"plain text", r"rows\.gz: broken gzip file"),
        ("torn.gz", gzip.compress(LINES)[:-4], r"torn\.gz: broken gzip file"),
    ],
)
def test_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EyasError, match=message):
        rows_of(tmp_path / name)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"none\.jsonl: no such file"):
        rows_of(tmp_path / "none.jsonl")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "eyas_test_wheel"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (folder / "data" / "rows.json").write_bytes(LINES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def test_wheel_is_read_and_never_imported(package: str) -> None:
    source = Source(kind="wheel", package=package, path="data/rows.json")
    assert list(read_rows(source)) == [{"id": 1}, [2]]
    assert package not in sys.modules


def test_file_missing_in_a_wheel_is_named(package: str) -> None:
    source = Source(kind="wheel", package=package, path="data/other.json")
    with pytest.raises(EyasError, match=rf"other\.json: no such file in package '{package}'"):
        list(read_rows(source))


@pytest.mark.parametrize("package", ["eyas_no_such_wheel", "../elsewhere"])
def test_missing_wheel_is_named_with_the_command_that_installs_it(package: str) -> None:
    source = Source(kind="wheel", package=package, path="rows.json")
    with pytest.raises(EyasError, match=r"rows\.json.*not found\n  hint: run `make install`"):
        list(read_rows(source))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(kind="ftp"), r"expected file \| wheel \| hub, got 'ftp'"),
        (Source(kind="file"), "kind 'file' needs 'path'"),
        (Source(kind="wheel", path="x"), "kind 'wheel' needs 'package'"),
        (Source(kind="hub", repo="a/b", revision=COMMIT), "kind 'hub' needs 'split'"),
        (Source(kind="hub", repo="a/b", revision="main", split="train"), "40 hex digits"),
    ],
)
def test_incomplete_source_is_refused(source: Source, message: str) -> None:
    with pytest.raises(EyasError, match=message):
        list(read_rows(source))


HUB = Source(kind="hub", repo="a/b", revision=COMMIT, split="train", path="rows.parquet")


def test_hub_rows_are_streamed_at_the_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(repo: str, **options: Any) -> Iterator[dict[str, int]]:
        asked.update(options, repo=repo)
        return iter([{"id": 1}])

    fake = ModuleType("datasets")
    fake.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_rows(HUB)) == [{"id": 1}]
    assert asked == {
        "repo": "a/b",
        "revision": COMMIT,
        "split": "train",
        "data_files": "rows.parquet",
        "streaming": True,
    }


def test_unreachable_hub_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(repo: str, **_: Any) -> None:
        raise ConnectionError(f"no route to {repo}")

    fake = ModuleType("datasets")
    fake.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(EyasError, match=f"hub data set a/b at {COMMIT}: no route to a/b"):
        list(read_rows(HUB))


def test_hub_without_its_package_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EyasError, match="hint: pip install datasets"):
        list(read_rows(HUB))
