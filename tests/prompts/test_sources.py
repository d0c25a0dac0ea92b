import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.prompts.rows import Reject
from eyas.prompts.sources import read_functions, read_rows
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
        ("marked.jsonl", b"\xef\xbb\xbf" + LINES, [{"id": 1}, [2]]),
        ("marked.json", b"\xef\xbb\xbf [1]", [1]),
        ("surrogate.jsonl", b'{"a": "\\ud83d"}\n[2]', [{"a": "\ud83d"}, [2]]),
        ("surrogate.json", b'[{"a": "\\ud83d"}, 2]', [{"a": "\ud83d"}, 2]),
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
        ("rows.jsonl", b'\n{"id": \nabc\n', r"rows\.jsonl:2: .*neither JSON lines"),
        ("pretty.jsonl", b"[\n1,\n2\n", r"pretty\.jsonl"),
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


def test_a_line_that_is_no_json_is_a_row_to_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n\n{"id": \n[2]\n{"cut": "of')
    one, first, two, last = rows_of(path)
    assert (one, two) == ({"id": 1}, [2])
    for row, number in ((first, 3), (last, 5)):
        assert isinstance(row, Reject)
        assert row.reason == "not_json"
        assert row.detail.startswith(f"rows.jsonl:{number}: ")


def test_an_object_over_many_lines_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.traj").write_text(json.dumps({"trajectory": [1, {"b": 2}]}, indent=2))
    assert rows_of(tmp_path / "a.traj") == [{"trajectory": [1, {"b": 2}]}]


def test_a_function_document_with_a_broken_line_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gorilla.json").write_bytes(b'{"name": "f"}\n{"name": \n')
    with pytest.raises(EyasError, match=r"gorilla\.json: not JSON \(gorilla\.json:2: "):
        read_functions(tmp_path)


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
        (Source(kind="hub", split="train"), "kind 'hub' needs 'repo'"),
        (Source(kind="hub", repo="a/b", revision=COMMIT), "kind 'hub' needs 'path' or 'split'"),
        (Source(kind="hub", repo="a/b", revision="main", split="train"), "40 hex .* got 'main'"),
        (Source(kind="hub", repo="a/b", split="train"), "a/b: expected a revision .* got 'null'"),
        (Source(kind="hub", repo="a/b", path="x.json"), "hint: branches and tags move; write"),
    ],
)
def test_incomplete_source_is_refused(source: Source, message: str) -> None:
    with pytest.raises(EyasError, match=message):
        list(read_rows(source))


SPLIT = Source(kind="hub", repo="a/b", revision=COMMIT, split="train", subset="all")


def test_hub_split_is_streamed_at_the_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(repo: str, subset: str | None, **options: Any) -> Iterator[dict[str, int]]:
        asked.update(options, repo=repo, subset=subset)
        return iter([{"id": 1}])

    fake = ModuleType("datasets")
    fake.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_rows(SPLIT)) == [{"id": 1}]
    assert asked == {
        "repo": "a/b",
        "subset": "all",
        "revision": COMMIT,
        "split": "train",
        "streaming": True,
    }


def test_unreachable_hub_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(repo: str, *_: Any, **__: Any) -> None:
        raise ConnectionError(f"no route to {repo}")

    fake = ModuleType("datasets")
    fake.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(EyasError, match=f"hub data set a/b at {COMMIT}: no route to a/b"):
        list(read_rows(SPLIT))


def test_hub_split_without_its_package_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EyasError, match="hint: pip install datasets, or name the files"):
        list(read_rows(SPLIT))


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as the hub's cache keeps it, with the network switched off."""
    from huggingface_hub import constants

    folder = tmp_path / "datasets--a--b" / "snapshots" / COMMIT
    (folder / "data").mkdir(parents=True)
    (tmp_path / "datasets--a--b" / "refs").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def hub(pattern: str) -> list[Any]:
    return list(read_rows(Source(kind="hub", repo="a/b", revision=COMMIT, path=pattern)))


def test_files_of_a_pinned_revision_are_read_in_order(snapshot: Path) -> None:
    rows = [{"id": i, "messages": [{"role": "user", "content": f"{i}"}]} for i in range(600)]
    write_parquet(snapshot / "data" / "train-1.parquet", rows[400:])
    write_parquet(snapshot / "data" / "train-0.parquet", rows[:400])
    write_parquet(snapshot / "data" / "test-0.parquet", [{"id": 7}])
    (snapshot / "rows.json").write_bytes(b'[{"id": 1}]')
    (snapshot / "rows.jsonl").write_bytes(LINES)
    assert hub("data/train-*.parquet") == rows
    assert hub("rows.json") == [{"id": 1}]
    assert hub("rows.jsonl") == [{"id": 1}, [2]]


def test_pattern_without_a_file_is_an_error(snapshot: Path) -> None:
    (snapshot / "README.md").write_text("no rows", encoding="utf-8")
    with pytest.raises(EyasError, match=rf"a/b at {COMMIT}: no file is called 'data/\*'"):
        hub("data/*")


def test_a_source_without_a_revision_is_told_the_one_of_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(repo: str) -> None:
        raise RuntimeError(f"no route to {repo}")  # the hub's client has errors of its own

    source = Source(kind="hub", repo="a/b", split="train")
    monkeypatch.setattr("huggingface_hub.dataset_info", unreachable)
    with pytest.raises(EyasError, match="revision: COMMIT, from the repository's history page"):
        list(read_rows(source))
    found = SimpleNamespace(sha=COMMIT)
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda repo: found if repo == "a/b" else 1)
    with pytest.raises(EyasError, match=f"revision: {COMMIT}` into conf"):
        list(read_rows(source))


def test_broken_file_of_the_hub_is_named(snapshot: Path) -> None:
    (snapshot / "rows.jsonl").write_bytes(b"{")
    with pytest.raises(EyasError, match=r"^\S*rows\.jsonl:1: .*neither JSON lines"):
        hub("rows.jsonl")


@pytest.mark.usefixtures("snapshot")
def test_revision_that_is_not_to_be_had_is_one_error() -> None:
    other = Source(kind="hub", repo="a/b", revision=COMMIT[::-1], path="rows.json")
    with pytest.raises(EyasError, match=f"hub data set a/b at {COMMIT[::-1]}: Cannot find"):
        list(read_rows(other))


def test_parquet_file_is_known_by_its_content(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows", [{"id": 1, "text": "a"}])
    assert rows_of(tmp_path / "rows") == [{"id": 1, "text": "a"}]
    (tmp_path / "rows").write_bytes(b"PAR1 and then something else")
    with pytest.raises(EyasError, match="rows: broken parquet file"):
        rows_of(tmp_path / "rows")


FUNCTIONS = b'{"name": "add"}\n{"name": "mean"}\n'
JOINED = {"involved_classes": ["MathAPI"], "function": [{"name": "add"}, {"name": "mean"}]}


@pytest.mark.parametrize("form", ["folder", "file"])
def test_multi_turn_rows_are_joined_with_their_functions(tmp_path: Path, form: str) -> None:
    (tmp_path / "rows.json").write_bytes(b'{"involved_classes": ["MathAPI"]}\n[1]\n')
    functions = tmp_path / "docs"
    if form == "folder":
        functions.mkdir()
        (functions / "math_api.json").write_bytes(FUNCTIONS)
    else:
        one = b'{"file": "math_api.json", "functions": [{"name": "add"}, {"name": "mean"}]}'
        functions.write_bytes(one)
    source = Source(kind="file", path=str(tmp_path / "rows.json"), functions=str(functions))
    assert list(read_rows(source)) == [JOINED, [1]]


def test_functions_of_a_wheel_lie_beside_its_rows(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "docs").mkdir()
    (tmp_path / package / "docs" / "math_api.json").write_bytes(FUNCTIONS)
    (tmp_path / package / "data" / "rows.json").write_bytes(b'{"involved_classes": ["MathAPI"]}')
    source = Source(kind="wheel", package=package, path="data/rows.json", functions="docs")
    assert list(read_rows(source)) == [JOINED]


def test_file_that_holds_no_functions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(LINES)
    path = str(tmp_path / "rows.json")
    with pytest.raises(EyasError, match=r"rows\.json: expected rows of file, functions"):
        list(read_rows(Source(kind="file", path=path, functions=path)))
