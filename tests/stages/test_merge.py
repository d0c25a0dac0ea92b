"""The merge stage on files."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.parquet import read_samples, write_samples
from eyas.records import Sample
from eyas.stages.merge import work

MERGE: dict[str, Any] = {
    "sources": ["chat", "code"],
    "caps": {"code": 5},
    "max_tokens": 10,
    "val_permille": 200,
    "seed": 0,
}
TRAIN, VAL = Path("data/mixture/train.parquet"), Path("data/mixture/val.parquet")


@pytest.fixture(autouse=True)
def valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("models/target/config.json"), {"text_config": {"hidden_size": 8}})
    for name, count, length in (("chat", 30, 6), ("code", 9, 6), ("left_out", 4, 6)):
        rows = [sample(name, i, length) for i in range(count)]
        write_samples(Path(f"data/valid/{name}.parquet"), rows)


def sample(dataset: str, number: int, length: int) -> Sample:
    return Sample(
        id=f"{dataset}-{number}",
        dataset=dataset,
        input_ids=tuple(range(length)),
        spans=((4, length),),
        temperature=0.5,
        provider="local",
        flags=(),
        completion_tokens_billed=length - 4,
        conversation=f"{dataset}-{number}",
    )


def params(**changes: Any) -> Params:
    return Params({"select": None, "merge": MERGE | changes})


def test_sources_are_mixed_under_their_caps_and_split() -> None:
    write_samples(Path("data/valid/chat.parquet"), [sample("chat", i, 6 + i) for i in range(30)])
    report = work(params())
    m = report.metrics
    train, val = list(read_samples(TRAIN)), list(read_samples(VAL))
    assert {s.dataset for s in train} == {"chat", "code"}
    assert (m["rows_in"], m["rejects_over_cap"], m["rejects_too_long"]) == (39, 4, 25)
    assert m["rows_out"] == len(train) + len(val) == 10
    assert (m["train_samples"], m["val_samples"]) == (len(train), len(val))
    assert (m["tokens_chat"], m["tokens_code"], m["tokens"]) == (40, 30, 70)
    assert m["states_bytes"] == 70 * (8 * 8 + 16)
    assert not {s.conversation for s in train} & {s.conversation for s in val}
    assert [p.name for p in report.inputs] == ["chat.parquet", "code.parquet"]


def test_only_named_sources_are_read() -> None:
    Path("data/valid/left_out.parquet").write_bytes(b"not parquet")
    assert work(params()).metrics["rows_in"] == 39


def test_a_second_run_writes_the_same_bytes() -> None:
    digests = []
    for _ in range(2):
        work(params())
        digests.append([hashlib.sha256(p.read_bytes()).hexdigest() for p in (TRAIN, VAL)])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"caps": {"cod": 5}}, "merge.caps: 'cod' is not in merge.sources"),
        ({"sources": ["chat", "maths"], "caps": {}}, r"maths\.parquet: no such file"),
        ({"val_permille": 0}, r"35 training and 0 validation samples(.|\n)*val_permille"),
        ({"max_tokens": 4}, "0 training and 0 validation samples"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_clear_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EyasError, match=words):
        work(params(**changes))
    assert not TRAIN.exists()
