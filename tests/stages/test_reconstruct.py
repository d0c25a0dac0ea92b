"""The reconstruct stage on files."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import read_json, read_records, write_jsonl
from eyas.parquet import read_samples
from eyas.records import Prompt, Response, Violation
from eyas.stages import reconstruct
from eyas.stages.reconstruct import work
from eyas.tokens.codecs import Codec, ReplyParts, load_codec
from eyas.tokens.tokenizers import train_tokenizer

RULES = {
    "max_count_delta": 2,
    "keep_near": True,
    "min_accepted_share": 0.8,
    "repeat_ngram": 8,
    "repeat_times": 4,
    "drop_loops": True,
}
SAMPLES = Path("data/samples/chat.parquet")
REJECTS = Path("data/samples/chat.rejects.jsonl")
PROVIDERS = Path("data/samples/chat.providers.json")
FILES = (SAMPLES, REJECTS, PROVIDERS)
Answer = Callable[..., Response]


@pytest.fixture
def codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Codec:
    """Return the codec of a small target in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    texts = ["what is this and that", "this is the answer, a plain one", "Grüße, 東京"] * 5
    train_tokenizer(texts, Path("models/target"), vocab_size=400, max_length=512)
    return load_codec("chatml", Path("models/target"))


@pytest.fixture
def answer(codec: Codec) -> Answer:
    """Return a maker of honest answers to a prompt."""

    def make(prompt: Prompt, text: str = "this is the answer", **changes: Any) -> Response:
        ids = codec.reply_ids(ReplyParts(content=text), "stop")
        honest = Response(
            id=prompt.id,
            fingerprint=f"f-{prompt.id}",
            sample=0,
            model="tiny",
            provider="local",
            generation_id="gen-1",
            reasoning=None,
            content=text,
            tool_calls=(),
            finish_reason="stop",
            native_finish_reason="stop",
            prompt_tokens=len(codec.render_prompt(prompt.messages, ())),
            completion_tokens=len(ids),
            cost_usd=0.0,
            latency_s=0.0,
            attempts=1,
            source="local",
            sampling={"temperature": 0.5},
            usage={},
            true_ids=tuple(ids),
        )
        return replace(honest, **changes)

    return make


def prompts(*messages: Any) -> list[Prompt]:
    return [
        Prompt(
            id=f"p{number}",
            dataset="chat",
            upstream_id=str(number),
            messages=tuple(turns),
            tools=(),
            prompt_tokens=0,
            partition="short",
            licence="MIT",
        )
        for number, turns in enumerate(messages)
    ]


def params(kind: str = "prompts") -> Params:
    return Params(
        {
            "select": "chat",
            "target": {"codec": "chatml"},
            "validate": RULES,
            "datasets": {"chat": {"kind": kind}},
        }
    )


ASKED = {"role": "user", "content": "what is this"}
SAID = {"role": "assistant", "content": "a plain one"}


def test_answers_become_samples_and_rejects_that_add_up(answer: Answer) -> None:
    asked = prompts(*[[ASKED]] * 5)
    off = answer(asked[1]).completion_tokens
    answers = [
        answer(asked[0]),
        answer(asked[1], completion_tokens=off + 5, true_ids=(7, 8)),
        answer(asked[2], completion_tokens=off + 1, true_ids=None),
        answer(asked[3], finish_reason="error"),
        answer(asked[4], true_ids=(3,) * off),
    ]
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    write_jsonl(Path("data/responses/chat.jsonl"), answers)
    report = work(params())
    m = report.metrics
    assert [s.id for s in read_samples(SAMPLES)] == ["p0-0", "p2-0", "p4-0"]
    assert [(v.id, v.rule) for v in read_records(REJECTS, Violation)] == [
        ("p1", "count_mismatch"),
        ("p3", "finish_reason"),
    ]
    told = read_records(SAMPLES.with_name("chat.mismatches.jsonl"), Violation)
    assert [(v.id, v.rule, v.severity) for v in told] == [
        ("p1", "caught_by_the_count", "reject"),
        ("p4-0", "silent", "flag"),
    ]
    assert told[1].detail.startswith("another text, at token 0: sampled [3, 3")
    assert (m["rows_in"], m["rows_out"], m["near"]) == (5, 3, 1)
    assert (m["rejects_count_mismatch"], m["rejects_finish_reason"]) == (1, 1)
    assert (m["billed_tokens"], m["rebuilt_tokens"]) == (4 * off + 6, 4 * off)
    assert m["billing_difference_share"] == round(6 / (4 * off + 6), 6)
    assert (m["count_exact_share"], m["offset_mode_tokens_local"]) == (0.5, 0)
    assert (m["identical_share"], m["kept_identical_share"]) == (0.333333, 0.5)
    assert (m["mismatches_caught"], m["silent_mismatches"]) == (1, 1)
    assert m["flagged_true_ids_differ"] == 1
    assert "5 in: 3 samples, 2 rejected, 50.00% match the bill, 33.33% identical" in report.summary


def test_token_texts_are_taken_or_told_to_be_refused(answer: Answer, codec: Codec) -> None:
    asked = prompts(*[[ASKED]] * 4)
    odd = [i for part in ("th", "is") for i in codec.reply_ids(ReplyParts(content=part), "length")]
    ids = (*odd, *codec.stop_ids)
    spelled = {"true_ids": ids, "completion_tokens": len(ids)}
    pieces = tuple(codec.bytes_of(i).decode() for i in ids)
    answers = [
        answer(asked[0], "this", pieces=pieces, **spelled),
        answer(asked[1], "this", pieces=("that", "<|im_end|>"), **spelled),
        answer(asked[2], pieces=("that",)),
        answer(asked[3], finish_reason="error"),
    ]
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    write_jsonl(Path("data/responses/chat.jsonl"), answers)
    report = work(params())
    first, *_ = read_samples(SAMPLES)
    ((start, end),) = first.spans
    assert tuple(first.input_ids[start:end]) == ids
    m = report.metrics
    assert (m["witnessed_share"], m["witness_refused"]) == (0.333333, 2)
    assert (m["identical_share"], m["text_identical_share"]) == (0.666667, 0.333333)
    assert m["flagged_witness_refused"] == 2
    told = read_records(SAMPLES.with_name("chat.mismatches.jsonl"), Violation)
    assert [(v.id, v.rule, v.severity) for v in told] == [
        ("p1-0", "caught_by_the_count", "flag"),
        ("p1-0", "witness_refused", "flag"),
        ("p2-0", "witness_refused", "flag"),
    ]
    assert "33.33% from token texts" in report.summary


def test_a_second_run_writes_the_same_bytes(answer: Answer) -> None:
    asked = prompts([ASKED], [ASKED, SAID, ASKED])
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    answers = [answer(p, text) for p, text in zip(asked, ("Grüße", "東京"), strict=True)]
    write_jsonl(Path("data/responses/chat.jsonl"), answers)
    digests = []
    for _ in range(2):
        work(params())
        digests.append([hashlib.sha256(p.read_bytes()).hexdigest() for p in FILES])
    assert digests[0] == digests[1]


def test_providers_are_found_out_and_told(answer: Answer) -> None:
    asked = prompts(*[[ASKED]] * 60)
    short = answer(asked[0])
    tokens = {"prompt_tokens": short.prompt_tokens, "completion_tokens": short.completion_tokens}
    stopless = tokens | {"completion_tokens": tokens["completion_tokens"] - 1, "provider": "B"}
    other = tokens | {"prompt_tokens": tokens["prompt_tokens"] + 9, "provider": "Acme AI"}
    bills = [tokens, stopless, other]
    answers = [answer(p, **bills[i % 3]) for i, p in enumerate(asked)]
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    write_jsonl(Path("data/responses/chat.jsonl"), answers)
    report = work(params())
    accounts = read_json(PROVIDERS)
    rules = {name: account["evidence"]["rule"] for name, account in accounts.items()}
    assert {name: rule["offset"] for name, rule in rules.items()} == {
        "Acme AI": 0,
        "B": -1,
        "local": 0,
    }
    assert [name for name, rule in rules.items() if rule["rejected"]] == ["Acme AI"]
    assert [accounts[name]["exact"] for name in ("Acme AI", "B", "local")] == [0, 20, 20]
    assert accounts["Acme AI"]["rejected"] == {"provider_template": 20}
    assert report.metrics["rejects_provider_template"] == 20
    assert "provider 'Acme AI': prompts billed otherwise than rendered" in report.summary
    assert report.artifacts == (PROVIDERS,)


def test_trajectories_need_no_response_and_claim_no_bill(codec: Codec) -> None:
    write_jsonl(Path("data/prompts/chat.jsonl"), prompts([ASKED, SAID, ASKED, SAID], [ASKED]))
    report = work(params("trajectories"))
    (sample,) = read_samples(SAMPLES)
    assert len(sample.spans) == 2
    assert report.metrics == {"rows_in": 2, "rows_out": 1, "near": 0, "rejects_no_reply": 1}
    assert report.summary == "2 in: 1 samples, 1 rejected"


@pytest.mark.parametrize(
    ("strangers", "words"),
    [(False, r"chat\.jsonl: expected at least one response"), (True, "answers prompt p9")],
)
def test_responses_that_do_not_fit_the_prompts_are_an_error(
    answer: Answer, strangers: bool, words: str
) -> None:
    asked = prompts([ASKED])
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    answers = [answer(asked[0], id="p9")] if strangers else []
    write_jsonl(Path("data/responses/chat.jsonl"), answers)
    with pytest.raises(EyasError, match=words + r"(.|\n)*hint: run `dvc repro generate@chat`"):
        work(params())
    assert not SAMPLES.exists()


def test_a_missing_file_names_the_stage_that_makes_it(codec: Codec) -> None:
    with pytest.raises(EyasError, match=r"no such file(.|\n)*dvc repro prepare@chat"):
        work(params())


def test_two_processes_write_the_bytes_of_one(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(*[[ASKED]] * 40)
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    answers = [answer(p, "this is " * (i % 9), completion_tokens=9) for i, p in enumerate(asked)]
    write_jsonl(Path("data/responses/chat.jsonl"), answers)
    runs = []
    for processes in (1, 2):
        monkeypatch.setattr(reconstruct, "num_workers", lambda *_, n=processes: n)
        report = work(params())
        runs.append((report, SAMPLES.read_bytes(), REJECTS.read_bytes()))
    assert runs[0] == runs[1]
    assert 0 < runs[0][0].metrics["rows_out"] < 40


def test_an_error_among_the_answers_leaves_the_old_samples(answer: Answer) -> None:
    asked = prompts([ASKED], [ASKED])
    write_jsonl(Path("data/prompts/chat.jsonl"), asked)
    write_jsonl(Path("data/responses/chat.jsonl"), [answer(asked[0])])
    work(params())
    before = SAMPLES.read_bytes()
    write_jsonl(Path("data/prompts/chat.jsonl"), asked[:1])
    write_jsonl(Path("data/responses/chat.jsonl"), map(answer, asked))
    with pytest.raises(EyasError, match="p1, which is not there"):
        work(params())
    assert SAMPLES.read_bytes() == before
