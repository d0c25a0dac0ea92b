"""The validate stage on files."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import read_records, write_json, write_jsonl
from eyas.parquet import read_samples, write_samples
from eyas.records import Sample, Violation
from eyas.stages import validate
from eyas.stages.validate import work
from eyas.tokens.tokenizers import train_tokenizer

RULES: dict[str, Any] = {
    "max_count_delta": 2,
    "keep_near": False,
    "min_accepted_share": 0.5,
    "repeat_ngram": 2,
    "repeat_times": 3,
    "drop_loops": True,
}
VALID = Path("data/valid/chat.parquet")
REJECTS = Path("data/valid/chat.rejects.jsonl")


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["some text"] * 5, Path("models/target"), vocab_size=300, max_length=512)


def sample(name: str, *reply: int, flags: tuple[str, ...] = ()) -> Sample:
    ids = (1, 40, 41, *reply)
    return Sample(
        id=name,
        dataset="chat",
        input_ids=ids,
        spans=((3, len(ids)),),
        temperature=0.5,
        provider="local",
        flags=flags,
        completion_tokens_billed=len(reply),
        conversation=name,
    )


GOOD = sample("good", 50, 51, 52, 2)
CUT = sample("cut", 50, 51, flags=("truncated",))
LOOP = sample("loop", *(50, 51) * 3, 2)
OPEN = sample("open", 50, 51)
EARLIER = Violation(id="p9", dataset="chat", rule="count_mismatch", detail="billed 9, rebuilt 4")


def given_files(
    samples: list[Sample], earlier: list[Violation], accounts: dict[str, Any] | None = None
) -> None:
    write_samples(Path("data/samples/chat.parquet"), samples)
    write_jsonl(Path("data/samples/chat.rejects.jsonl"), earlier)
    write_json(Path("data/samples/chat.providers.json"), accounts or {})
    write_jsonl(Path("data/prompts/chat.jsonl"), [])


def params(**changes: Any) -> Params:
    tree = {"select": "chat", "target": {"codec": "chatml"}, "validate": RULES | changes}
    return Params(tree)


def test_what_passes_is_kept_and_counts_add_up() -> None:
    given_files([GOOD, LOOP, CUT, OPEN], [])
    report = work(params())
    m = report.metrics
    assert list(read_samples(VALID)) == [GOOD, CUT]
    assert {v.id: v.rule for v in read_records(REJECTS, Violation)} == {
        "loop": "no_repetition_loop",
        "open": "ends_with_stop",
    }
    assert (m["rows_in"], m["rows_out"], m["accepted_share"]) == (4, 2, 0.5)
    assert (m["rejects_no_repetition_loop"], m["rejects_ends_with_stop"]) == (1, 1)
    assert (m["prompt_tokens"], m["completion_tokens"], m["completion_tokens_max"]) == (6, 6, 4)
    assert m["flagged_truncated"] == 1
    assert report.summary.startswith("2 of 4 samples kept (50.0% with those")


def test_a_sample_with_two_faults_is_one_reject() -> None:
    given_files([GOOD, sample("two", *(50, 1) * 3)], [])
    m = work(params()).metrics
    assert (m["rows_in"], m["rows_out"], m["rejects_ends_with_stop"]) == (2, 1, 1)
    assert "rejects_no_special_inside" not in m


def test_a_kept_loop_is_flagged() -> None:
    given_files([GOOD, LOOP], [])
    m = work(params(drop_loops=False)).metrics
    assert [s.flags for s in read_samples(VALID)] == [(), ("no_repetition_loop",)]
    assert (m["rows_out"], m["flagged_no_repetition_loop"]) == (2, 1)
    assert [v.severity for v in read_records(REJECTS, Violation)] == ["flag"]


def test_the_gate_counts_what_reconstruct_rejected_and_writes_nothing() -> None:
    given_files([GOOD, OPEN], [EARLIER, EARLIER])
    with pytest.raises(EyasError) as caught:
        work(params())
    lines = str(caught.value).splitlines()
    assert lines[0] == "data set 'chat': 25.0% of 4 accepted, expected at least 50.0%"
    assert lines[1].split() == ["rows", "reason", "example"]
    assert lines[2].split() == ["2", "count_mismatch", "p9:", "billed", "9,", "rebuilt", "4"]
    assert lines[3].split()[:3] == ["1", "ends_with_stop", "open:"]
    assert lines[4].startswith("  hint: mend the cause")
    assert not VALID.exists()
    assert not REJECTS.exists()


def test_an_empty_data_set_is_an_error_of_its_own() -> None:
    given_files([], [])
    with pytest.raises(EyasError, match=r"at least one sample, got none(.|\n)*reconstruct@chat"):
        work(params(min_accepted_share=0.0))


def test_a_second_run_writes_the_same_bytes() -> None:
    given_files([GOOD, LOOP, CUT], [EARLIER])
    digests = []
    for _ in range(2):
        work(params())
        digests.append([hashlib.sha256(p.read_bytes()).hexdigest() for p in (VALID, REJECTS)])
    assert digests[0] == digests[1]


def test_two_processes_write_the_bytes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(kind, id=f"{kind.id}{i}") for i in range(15) for kind in (GOOD, LOOP, CUT)]
    given_files(rows, [EARLIER])
    runs = []
    for processes in (1, 2):
        monkeypatch.setattr(validate, "num_workers", lambda *_, n=processes: n)
        report = work(params())
        runs.append((report, VALID.read_bytes(), REJECTS.read_bytes()))
    assert runs[0] == runs[1]
    assert runs[0][0].metrics["rows_out"] == 30


def test_providers_are_told_by_name_in_the_metrics() -> None:
    account = {
        "replies": 3,
        "exact": 2,
        "near": 0,
        "rejected": {"count_mismatch": 1},
        "billed_tokens": 1000,
        "offset_tokens": 3,
        "rebuilt_tokens": 995,
        "evidence": {"rule": {"offset": 1, "rejected": None}},
    }
    given_files([GOOD, LOOP], [EARLIER], {"local": account})
    m = work(params(min_accepted_share=0.3)).metrics
    assert (m["provider_local_replies"], m["provider_local_exact"]) == (3, 1)
    assert (m["provider_local_rejected"], m["provider_local_offset_tokens"]) == (2, 1)
    assert m["billing_difference_percent"] == 0.2
    assert m["providers_rejected"] == 0


def test_the_gate_names_every_provider_that_was_rejected() -> None:
    account = {"evidence": {"rule": {"rejected": "provider 'Bolt': another prompt template"}}}
    given_files([GOOD], [EARLIER] * 3, {"Bolt": account})
    with pytest.raises(EyasError) as caught:
        work(params())
    assert str(caught.value).splitlines()[-2] == "  provider 'Bolt': another prompt template"
