"""The merge stage on files."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.desk import projection_table
from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.parquet import read_samples, write_samples
from eyas.records import Sample
from eyas.settings import Merge
from eyas.stages.merge import LAYOUTS, cost_of, final_rows, rate_at, tokens_per_s, work
from eyas.tokens.mixture import mix
from eyas.tokens.projection import Extent, metered, project

MERGE: dict[str, Any] = {
    "sources": ["chat", "code"],
    "caps": {"code": 5},
    "token_caps": {},
    "weights": {},
    "drop": [],
    "extract_tokens_per_s": None,
    "max_tokens": 10,
    "val_permille": 200,
    "seed": 0,
}
TRAIN, VAL = Path("data/mixture/train.parquet"), Path("data/mixture/val.parquet")
PROJECTION = Path("data/mixture/projection.json")


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
    assert m["states_bytes_bf16"] == 70 * (4 + 4 * 2 * 8)
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
        ({"drop": ["cod"]}, "merge.drop: 'cod' is not in merge.sources"),
        ({"sources": ["chat", "maths"], "caps": {}}, r"maths\.parquet: no such file"),
        ({"val_permille": 0}, r"35 training and 0 validation samples(.|\n)*val_permille"),
        ({"max_tokens": 4}, "0 training and 0 validation samples"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_clear_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EyasError, match=words):
        work(params(**changes))
    assert not TRAIN.exists()


def test_a_dropped_set_is_read_for_the_table_and_left_out() -> None:
    report = work(params(drop=["code"], caps={}))
    assert {s.dataset for path in (TRAIN, VAL) for s in read_samples(path)} == {"chat"}
    assert (report.metrics["rejects_dropped_set"], report.metrics["tokens_code"]) == (9, 0)
    code = read_json(PROJECTION)["datasets"]["code"]
    assert (code["valid"]["samples"], code["mixture"]["samples"]) == (9, 0)


def test_the_counts_are_those_of_the_replies_in_train() -> None:
    import pyarrow.parquet as pq

    work(params())
    counts = pq.read_table(Path("data/mixture/token_counts.parquet")).to_pydict()
    replies = Counter(i for s in read_samples(TRAIN) for a, b in s.spans for i in s.input_ids[a:b])
    assert dict(zip(counts["id"], counts["count"], strict=True)) == dict(replies)
    assert read_json(PROJECTION)["vocabulary"]["coverage"]["4096"] == 1.0


@pytest.mark.parametrize(
    ("given", "measured", "hours"),
    [(None, None, None), (None, 0.0, None), (None, 2.0, 0.029), (0.5, 2.0, 0.117)],
)
def test_hours_are_at_the_configured_rate_or_the_last_measured(
    given: float | None, measured: float | None, hours: float | None
) -> None:
    if measured is not None:
        write_json(Path("metrics/extract.json"), {"tokens_per_s": measured})
    work(params(extract_tokens_per_s=given))
    table = read_json(PROJECTION)
    assert table["tokens_per_s"] == (given or measured or None)
    mixture = table["all"]["mixture"]
    assert (mixture["tokens"], mixture["hours"]) == (210, hours)


def kimi(source: str, count: int, tokens: int) -> list[Sample]:
    """Return samples of which the last 30 % is one reply; their ids take no memory."""
    one = replace(
        sample(source, 0, 5), input_ids=range(tokens), spans=((tokens * 7 // 10, tokens),)
    )
    return [replace(one, id=f"{source}-{i}", conversation=f"{source}-{i}") for i in range(count)]


def test_capping_the_ultra_long_set_of_the_kimi_project_by_hand() -> None:
    """The sizes of the project: 40,000 samples, 138.4 M tokens, 7168 wide, 91 hours.

    a1     2,000 samples of 16,000 tokens:  32,000,000 tokens
    b     38,000 samples of  2,800 tokens: 106,400,000 tokens     in all 138,400,000
    rate: 138,400,000 / (91 * 3600 s) = 422.47 tokens/s
    a1 capped at 200: 3,200,000 + 106,400,000 = 109,600,000 tokens, 109.6 / 138.4 * 91 = 72.06 h

    Rows with a final state under fp8 and int4: 30 % of the tokens less one for each reply.
    before   41,520,000 - 40,000 = 41,480,000
    after    32,880,000 - 38,200 = 32,841,800

    bf16  4 + 4 * 14,336 = 57,348 bytes a token     7.937 TB before, 6.285 TB after
    fp8   4 + 3 * 7,172 = 21,520 a token, 7,172 a final row
    int4  4 + 3 * 4,032 = 12,100 a token, 7,172 a final row

    The project's own 5.5 TB and 3.5 TB are 39.7 and 32 kB a token, hours and bytes not in one
    proportion, so it stored other rows; here the bytes are those that this store writes.
    """
    long, short = kimi("a1", 2000, 16_000), kimi("b", 38_000, 2800)
    settings = Merge(
        sources=("a1", "b"),
        caps={"a1": 200},
        token_caps={},
        weights={},
        drop=(),
        extract_tokens_per_s=138_400_000 / (91 * 3600),
        max_tokens=32_768,
        val_permille=80,
        seed=0,
    )
    valid: dict[str, Extent] = {}
    mixed: dict[str, Extent] = {}
    sources = {n: metered(s, valid, final_rows) for n, s in (("a1", long), ("b", short))}
    mixture = mix(sources, settings)
    list(metered([*mixture.train, *mixture.val], mixed, final_rows))
    costs = {name: cost_of(layout, 7168) for name, layout in LAYOUTS.items()}
    table = project(valid, mixed, costs, rate_at(tokens_per_s(settings)))
    assert table["all"]["valid"] == {
        "samples": 40_000,
        "tokens": 138_400_000,
        "supervised_share": 0.3,
        "bytes": {
            "bf16": 7_936_963_200_000,  # 138,400,000 * 57,348
            "fp8": 3_275_862_560_000,  # 138,400,000 * 21,520 + 41,480,000 * 7,172
            "int4": 1_972_134_560_000,  # 138,400,000 * 12,100 + 41,480,000 * 7,172
        },
        "hours": 91.0,
    }
    assert table["all"]["mixture"] == {
        "samples": 38_200,
        "tokens": 109_600_000,
        "supervised_share": 0.3,
        "bytes": {
            "bf16": 6_285_340_800_000,  # 109,600,000 * 57,348
            "fp8": 2_594_133_389_600,  # 109,600,000 * 21,520 + 32,841,800 * 7,172
            "int4": 1_561_701_389_600,  # 109,600,000 * 12,100 + 32,841,800 * 7,172
        },
        "hours": 72.064,
    }
    without = table["datasets"]["a1"]["all_without"]
    assert (without["tokens"], without["hours"]) == (106_400_000, 69.96)
    assert projection_table.caps_words(table) == (
        "all valid samples would take 91.0 h and 7.94 TB in bf16; "
        "the mixture takes 72.1 h and 6.29 TB"
    )
