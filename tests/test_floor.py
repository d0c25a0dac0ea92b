"""files, records and parquet: the floor that every wing stands on."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas import files, parquet
from eyas.errors import EyasError
from eyas.records import (
    Prompt,
    Sample,
    Violation,
    canonical_json,
    outlined,
    packed,
    request_fingerprint,
    row_id,
    unpacked,
)

SAMPLE = Sample(
    id="a",
    dataset="chat",
    input_ids=(1, 2, 3, 49151),
    spans=((1, 2), (3, 4)),
    temperature=0.5,
    provider="local",
    flags=("truncated",),
    completion_tokens_billed=None,
    conversation="c",
)
GOOD_LINE = '{"id": "a", "dataset": "d", "rule": "r", "detail": "", "severity": "flag"}'
PROMPT = Prompt(
    id="a",
    dataset="chat",
    upstream_id="1",
    messages=({"role": "user", "content": "hé"},),
    tools=(),
    prompt_tokens=3,
    partition="short",
    licence="MIT",
)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with pytest.raises(RuntimeError), files.replacing(path) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise RuntimeError
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_swift_write_replaces_the_file_and_never_fails(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.write_swiftly(path, b"1")
    files.write_swiftly(path, b"2")
    assert path.read_bytes() == b"2"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]
    files.write_swiftly(path / "below a file", b"3")
    assert path.read_bytes() == b"2"


def test_records_come_back_from_jsonl_as_they_went(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    rows = [PROMPT, replace(PROMPT, id="b")]
    assert files.write_jsonl(path, rows) == 2
    assert files.read_records(path, Prompt) == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD_LINE + '\n{"id"', r"rows\.jsonl:2: not JSON"),
        ("[1]\n", r"rows\.jsonl:1: expected an object, got list"),
        ('{"colour": 1}\n', r"rows\.jsonl:1: unknown keys \['colour'\] for Violation"),
        ('{"id": "a"}\n', r"rows\.jsonl:1: .*missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EyasError, match=words):
        list(files.read_records(path, Violation))


def test_missing_and_broken_json_carry_the_hint(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no such file\n  hint: run it"):
        files.read_json(tmp_path / "a.json", hint="run it")
    with pytest.raises(EyasError, match="no such file"):
        list(files.read_jsonl(tmp_path / "a.jsonl"))
    (tmp_path / "b.json").write_text("{", encoding="utf-8")
    with pytest.raises(EyasError, match="not JSON"):
        files.read_json(tmp_path / "b.json")


def test_json_is_sorted_and_ends_with_a_newline(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"b": 1, "a": 2})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "a": 2,\n  "b": 1\n}\n'


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert files.sha256_of(tmp_path / "a").startswith("ba7816bf8f01cfea414140de5dae2223")


@given(st.dictionaries(st.text(), st.integers(-(2**53), 2**53)))
def test_ids_do_not_depend_on_key_order(value: dict[str, int]) -> None:
    turned = dict(reversed(value.items()))
    assert row_id("d", "1", [value]) == row_id("d", "1", [turned])
    assert request_fingerprint(value, "a", 0) == request_fingerprint(turned, "a", 0)
    assert canonical_json(value) == canonical_json(turned)


def test_ids_depend_on_everything_else() -> None:
    ids = {
        row_id("d", "1", ["m"]),
        row_id("e", "1", ["m"]),
        row_id("d", "2", ["m"]),
        row_id("d", "1", ["n"]),
        row_id("d", "1", ["m"], ["t"]),
        request_fingerprint({"a": 1}, "p", 0),
        request_fingerprint({"a": 1}, "p", 1),
        request_fingerprint({"a": 1}, "q", 0),
        request_fingerprint({"a": 2}, "p", 0),
    }
    assert len(ids) == 9


def test_samples_come_back_from_parquet_and_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    samples = [replace(SAMPLE, id=str(i), completion_tokens_billed=i or None) for i in range(1500)]
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    assert [parquet.write_samples(p, samples) for p in paths] == [1500, 1500]
    assert list(parquet.read_samples(paths[0])) == samples
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_packed_samples_come_back_packed_and_are_written_as_the_same_bytes(tmp_path: Path) -> None:
    samples = [replace(SAMPLE, id=str(i), input_ids=tuple(range(i))) for i in range(200)]
    plain, dense = tmp_path / "a.parquet", tmp_path / "b.parquet"
    parquet.write_samples(plain, samples)
    assert list(parquet.read_packed(plain)) == list(map(packed, samples))
    parquet.write_samples(dense, parquet.read_packed(plain))
    assert dense.read_bytes() == plain.read_bytes()
    assert list(map(unpacked, parquet.read_packed(dense))) == samples
    assert [len(outlined(s).input_ids) for s in samples] == list(range(200))


def test_row_groups_are_bounded_by_tokens_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(parquet, "_GROUP_TOKENS", 10)
    sizes = (4, 4, 4, 30, 1)
    samples = [replace(SAMPLE, id=str(i), input_ids=tuple(range(n))) for i, n in enumerate(sizes)]
    parquet.write_samples(tmp_path / "a.parquet", samples)
    meta = pq.read_metadata(tmp_path / "a.parquet")
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [2, 1, 1, 1]
    assert list(parquet.read_samples(tmp_path / "a.parquet")) == samples


def test_a_sample_that_cannot_be_made_leaves_the_old_file(tmp_path: Path) -> None:
    def broken() -> Iterator[Sample]:
        yield SAMPLE
        raise EyasError("no more")

    path = tmp_path / "a.parquet"
    parquet.write_samples(path, [SAMPLE])
    with pytest.raises(EyasError, match="no more"):
        parquet.write_samples(path, broken())
    assert list(parquet.read_samples(path)) == [SAMPLE]


def test_an_empty_parquet_file_has_no_samples(tmp_path: Path) -> None:
    parquet.write_samples(tmp_path / "a.parquet", [])
    assert list(parquet.read_samples(tmp_path / "a.parquet")) == []


def test_foreign_parquet_files_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(EyasError, match="no such file"):
        list(parquet.read_samples(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text("no", encoding="utf-8")
    with pytest.raises(EyasError, match="not a parquet file"):
        list(parquet.read_samples(tmp_path / "text.parquet"))
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(EyasError, match=r"columns .*input_ids.* are missing"):
        list(parquet.read_samples(tmp_path / "other.parquet"))


def test_a_violation_is_a_rejection_unless_it_says_otherwise() -> None:
    assert asdict(Violation(id="a", dataset="d", rule="r", detail=""))["severity"] == "reject"
