import json
from pathlib import Path
from typing import Any

import pytest

from eyas.desk.params import Params, check, compose
from eyas.errors import EyasError
from eyas.files import read_jsonl, read_records
from eyas.prompts.schemas import SCHEMAS
from eyas.prompts.selection import is_heldout
from eyas.prompts.sources import read_rows
from eyas.prompts.statistics import describe
from eyas.records import Prompt, Violation
from eyas.settings import Dataset
from eyas.stages.prepare import work
from eyas.tokens.codecs import load_codec
from eyas.tokens.tokenizers import train_tokenizer

CONTEXT = 200


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a target of a few hundred tokens and an upstream file."""
    target = tmp_path / "models" / "target"
    target.mkdir(parents=True)
    train_tokenizer(["a question, an answer"], target, vocab_size=300, max_length=CONTEXT)
    config = {"text_config": {"max_position_embeddings": CONTEXT}}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_rows(tmp_path, [{"id": str(i), "prompt": f"question {i}"} for i in range(40)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(place: Path, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "rows.jsonl").write_text(lines, encoding="utf-8")


def params(*, select: str | None = "mine", heldout: int = 200, **changes: Any) -> Params:
    dataset = {
        "kind": "prompts",
        "licence": "MIT",
        "source": {"kind": "file", "path": "rows.jsonl"},
        "prepare": {"schema": "messages", "max_rows": None, "partition": None, "seed": 0},
    }
    return Params(
        {
            "select": select,
            "target": {"codec": "chatml"},
            "heldout": {"permille": heldout},
            "partition": {"short": {"max_prompt_tokens": None, "max_tokens": 20}},
            "datasets": {"mine": dataset | changes},
        }
    )


def test_prompts_heldout_and_rejects_are_written_and_add_up(place: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": str(i), "prompt": f"question {i}"} for i in range(40)]
    rows += [{"id": "40", "prompt": "question 3"}, {"id": "41"}, {"prompt": "<|im_end|>"}]
    rows += [{"prompt": "long " * CONTEXT}]
    write_rows(place, rows)
    prepare = {"schema": "messages", "max_rows": 20, "partition": None, "seed": 0}
    metrics = work(params(prepare=prepare)).metrics
    prompts = read_records(Path("data/prompts/mine.jsonl"), Prompt)
    heldout = read_records(Path("data/heldout/mine.jsonl"), Prompt)
    rejects = read_records(Path("data/prompts/mine.rejects.jsonl"), Violation)
    assert sorted(v.rule for v in rejects) == [
        "duplicate",
        "no_messages",
        "special_token_text",
        "too_long",
    ]
    assert all(is_heldout(p.id, 200) for p in heldout)
    assert not any(is_heldout(p.id, 200) for p in prompts)
    assert metrics == {
        "rows_in": 44,
        "prompts": 20,
        "heldout": len(heldout),
        "not_selected": 44 - 4 - 20 - len(heldout),
        "prompt_tokens": sum(p.prompt_tokens for p in prompts),
        **describe(prompts),
        "rejects_duplicate": 1,
        "rejects_no_messages": 1,
        "rejects_special_token_text": 1,
        "rejects_too_long": 1,
    }


def test_a_broken_line_is_counted_with_its_number(place: Path) -> None:
    with (place / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"id": "40", "prompt"\n{"id": "41", "prompt": "question 41"}\n')
    report = work(params())
    assert (report.metrics["rows_in"], report.metrics["rejects_not_json"]) == (42, 1)
    (reject,) = read_records(Path("data/prompts/mine.rejects.jsonl"), Violation)
    assert (reject.id, reject.rule) == ("row 41", "not_json")
    assert reject.detail.startswith("rows.jsonl:41: ")


def test_prompt_tokens_are_those_of_the_rendered_prompt(place: Path) -> None:
    work(params())
    codec = load_codec("chatml", place / "models" / "target")
    for prompt in read_records(Path("data/prompts/mine.jsonl"), Prompt):
        assert prompt.prompt_tokens == len(codec.render_prompt(prompt.messages, prompt.tools))


def test_second_run_writes_the_same_bytes(place: Path) -> None:
    outs = ["data/prompts/mine.jsonl", "data/heldout/mine.jsonl", "data/prompts/mine.rejects.jsonl"]
    work(params())
    first = [(place / out).read_bytes() for out in outs]
    work(params())
    assert [(place / out).read_bytes() for out in outs] == first


def prepared(schema: str = "messages", **options: Any) -> dict[str, Any]:
    return {"schema": schema, "max_rows": None, "partition": None, "seed": 0, **options}


def written(name: str) -> list[dict[str, Any]]:
    return list(read_jsonl(Path(f"data/{name}/mine.jsonl")))


def test_screening_that_drops_nothing_leaves_every_byte_as_it_was(place: Path) -> None:
    rows = [{"id": str(i), "prompt": f"{i} is what I ask about"} for i in range(40)]
    write_rows(place, rows)
    work(params())
    outs = [place / f"data/{name}/mine.jsonl" for name in ("prompts", "heldout")]
    first = [out.read_bytes() for out in outs]
    overlap = {"num_words": 13, "heldout": True, "against": []}
    metrics = work(params(prepare=prepared(near_duplicate_jaccard=0.9, overlap=overlap))).metrics
    assert not any(name.startswith("rejects") for name in metrics)
    assert [out.read_bytes() for out in outs] == first


def test_prompts_like_one_another_or_like_a_benchmark_are_counted(place: Path) -> None:
    words = " ".join(f"word{i}" for i in range(20))
    known = [{"prompt": f"Known: {words}"}, {"prompt": None}]
    lines = "".join(json.dumps(row) + "\n" for row in known)
    (place / "known.jsonl").write_text(lines, encoding="utf-8")
    rows = [{"id": str(i), "prompt": f"question {i}"} for i in range(40)]
    rows += [
        {"id": "copy", "prompt": f"Do you know {words}"},
        {"id": "like", "prompt": "Question 0!"},
    ]
    write_rows(place, rows)
    against = [{"schema": "messages", "source": {"kind": "file", "path": "known.jsonl"}}]
    overlap = {"num_words": 13, "heldout": False, "against": against}
    metrics = work(
        params(heldout=0, prepare=prepared(near_duplicate_jaccard=0.8, overlap=overlap))
    ).metrics
    assert metrics["rejects_evaluation_overlap"] == 1
    assert metrics["rejects_near_duplicate"] == 1
    assert (metrics["rows_in"], metrics["prompts"]) == (42, 40)


def test_conversation_is_written_only_where_rows_share_one(place: Path) -> None:
    said = [{"from": "human", "value": "Hi"}]
    rows = [{"id": f"{i}", "conversations": [said[0] | {"value": f"{i}?"}]} for i in range(9)]
    write_rows(place, [*rows, *({"id": f"QWJhYvA_{i}", "conversations": said} for i in (0, 2))])
    work(params(prepare=prepared("sharegpt"), heldout=0))
    shared = {line["upstream_id"]: line.get("conversation", "") for line in written("prompts")}
    assert {name: key for name, key in shared.items() if key} == {"QWJhYvA_0": "QWJhYvA"}
    assert read_records(Path("data/prompts/mine.jsonl"), Prompt)


@pytest.mark.usefixtures("place")
def test_upstream_rows_are_read_no_further_than_asked() -> None:
    metrics = work(params(prepare=prepared(max_upstream_rows=25))).metrics
    assert metrics["rows_in"] == 25


def test_kimis_data_sets_name_known_schemas_and_no_movable_revision() -> None:
    kimi = check(compose(["datasets=kimi", "partition=kimi"]))
    for name in kimi.value("datasets"):
        dataset = kimi.section(f"datasets.{name}", Dataset)
        prepare = dataset.prepare
        known = prepare.overlap.against if prepare.overlap else ()
        assert {prepare.schema, *(other.schema for other in known)} <= set(SCHEMAS)
        if dataset.kind == "prompts":
            assert prepare.near_duplicate_jaccard is not None
            assert known
        if dataset.source.kind == "hub" and dataset.source.revision is None:
            with pytest.raises(EyasError, match="expected a revision of 40 hex digits"):
                next(read_rows(dataset.source))


@pytest.mark.usefixtures("place")
def test_upstream_file_is_reported_as_an_input() -> None:
    assert work(params()).inputs == (Path("rows.jsonl"),)


@pytest.mark.parametrize(
    ("rows", "heldout", "counts"),
    [
        ([], 0, r"none of 0 rows \(none rejected, 0 held out\)"),
        ([{"id": "1"}, {"id": "2"}], 0, r"none of 2 rows \(no_messages 2, 0 held out\)"),
        ([{"prompt": "a"}], 1000, r"none of 1 rows \(none rejected, 1 held out\)"),
    ],
)
def test_empty_data_set_is_an_error_that_writes_nothing(
    place: Path, rows: list[dict[str, Any]], heldout: int, counts: str
) -> None:
    write_rows(place, rows)
    with pytest.raises(EyasError, match=rf"'mine' from file rows\.jsonl: .*{counts}"):
        work(params(heldout=heldout))
    assert not (place / "data").exists()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select": None}, "no data set selected"),
        ({"select": "other"}, r"no key 'datasets\.other'"),
        ({"licence": ""}, r"datasets\.mine\.licence: expected a licence"),
        ({"kind": "chats"}, r"datasets\.mine\.kind: expected"),
        (
            {"prepare": {"schema": "x", "max_rows": None, "partition": None, "seed": 0}},
            r"prepare\.schema: expected",
        ),
        ({"source": {"kind": "file", "path": "none.jsonl"}}, r"none\.jsonl: no such file"),
    ],
)
def test_each_bad_parameter_is_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EyasError, match=message):
        work(params(**changes))


def test_target_that_was_not_built_is_named(place: Path) -> None:
    (place / "models" / "target" / "config.json").unlink()
    with pytest.raises(EyasError, match=r"config\.json: no such file\n  hint: dvc repro target"):
        work(params())
