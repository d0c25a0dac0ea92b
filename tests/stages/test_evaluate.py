import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.desk.params import Params, read_params
from eyas.drafter import acceptance as ac
from eyas.drafter import served
from eyas.drafter.inference import DraftRunner
from eyas.drafter.trees import chain
from eyas.errors import EyasError
from eyas.files import read_json, write_json, write_text
from eyas.stages import evaluate, export

RUNTIME = read_params().value("runtime") | {"tracking": "off", "threads": 1}
SOURCES = ["chat", "code"]


def params(**changes: Any) -> Params:
    settings = {
        "max_prompts_per_set": 3,
        "max_new_tokens": 12,
        "draft_steps": [1, 4],
        "headline_steps": 2,
        "lookup_ngram": 3,
    }
    tree = {"merge": {"sources": SOURCES}, "target": {"codec": "chatml"}, "runtime": RUNTIME}
    return Params(tree | {"evaluate": settings | changes})


def render(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[int]:
    assert not tools
    return [len(messages[0]["content"]), 4, 2, 7, 4, 2]


@pytest.fixture
def home(drafter_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand where the drafter is exported; prompts are rendered by their length."""
    export.work(Params({"export": {"profile": "sglang"}, "merge": {"sources": SOURCES}}))
    codec = SimpleNamespace(render_prompt=render, stop_ids=(95,))
    monkeypatch.setattr(evaluate, "load_codec", lambda name, folder: codec)
    return drafter_home


def table(home: Path) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    rows = read_json(home / "data/evaluation.json")["rows"]
    keys = ("drafter", "dataset", "method", "draft_steps")
    return {tuple(row[key] for key in keys): row for row in rows}


def test_the_table_has_every_drafter_chain_and_data_set(home: Path) -> None:
    report = evaluate.work(params())
    rows = table(home)
    sets = ("all", *SOURCES)
    expected = {("trained", s, "real", 2) for s in sets}
    expected |= {("trained", s, "replay", k) for s in sets for k in (1, 2, 4)}
    expected |= {(d, s, "replay", 2) for s in sets for d in ("untrained", "random", "lookup")}
    assert set(rows) == expected
    assert rows["trained", "all", "real", 2]["prompts"] == 6, "three of each set"
    for row in rows.values():
        assert row["tau"] == pytest.approx(row["tokens"] / row["verifications"])
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert len(row["acceptance_by_position"]) == row["draft_steps"]
    assert report.metrics["acceptance_length_lookup_chat"] == round(
        rows["lookup", "chat", "replay", 2]["tau"], 4
    )
    assert {f"acceptance_length_{d}" for d in ("trained", "untrained", "random")} <= set(
        report.metrics
    )


def test_the_drafted_replies_are_lossless_and_the_replay_verifies_as_often(home: Path) -> None:
    report = evaluate.work(params())
    assert report.metrics["lossless_share"] == report.metrics["replay_equal_share"] == 1.0
    rows = table(home)
    real, replayed = rows["trained", "all", "real", 2], rows["trained", "all", "replay", 2]
    assert real.pop("lossless_prompts") == real["prompts"]
    assert real | {"method": "replay"} == replayed
    prompts = read_json(home / "data/evaluation.json")["prompts"]
    assert [p["verifications"] for p in prompts] and all(p["lossless"] for p in prompts)
    assert sum(p["verifications"] for p in prompts) == real["verifications"]
    clock = read_json(home / "data/evaluation.json")["wall_clock"]
    assert clock["forward_passes_drafted"] == real["verifications"] + real["prompts"]
    assert clock["ids_equal"] == clock["prompts"] == 4, "two of each set, decoded alone"
    assert clock["forward_passes_plain"] == sum(p["reply_tokens"] for p in prompts)
    assert "lossless on 100% of 6 prompts" in report.summary


def test_a_right_drafter_saves_passes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: dict[int, list[int]] = {}
    true_plain = ac.decode_plain

    def remember(target: Any, prompts: Sequence[Sequence[int]], **rest: Any) -> list[ac.Decoded]:
        decoded = true_plain(target, prompts, **rest)
        for prompt, one in zip(prompts, decoded, strict=True):
            plain[prompt[0]] = [*prompt, *one.ids, *([0] * 9)]
        return decoded

    def oracle(_runner: DraftRunner) -> ac.Propose:
        return lambda path, _aux, k: chain(plain[path[0]][len(path) : len(path) + k])

    monkeypatch.setattr(ac, "decode_plain", remember)
    monkeypatch.setattr(ac, "drafting", oracle)
    report = evaluate.work(params())
    assert report.metrics["lossless_share"] == 1.0
    assert table(home)["trained", "all", "real", 2]["tau"] > 2.5
    assert report.metrics["forward_passes_saved_share"] > 0.5
    assert report.metrics["replay_equal_share"] < 1.0, "the real drafter is no oracle"


def test_a_reply_decoded_with_loss_is_told_and_not_hidden(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    true_drafted = ac.decode_drafted

    def lossy(*args: Any, **rest: Any) -> list[ac.Decoded]:
        return [
            dataclasses.replace(one, ids=(one.ids[0], (one.ids[1] + 1) % 97, *one.ids[2:]))
            for one in true_drafted(*args, **rest)
        ]

    monkeypatch.setattr(ac, "decode_drafted", lossy)
    with caplog.at_level(logging.WARNING, logger="eyas"):
        report = evaluate.work(params(max_prompts_per_set=1))
    assert report.metrics["lossless_share"] == 0.0
    assert "lossless on 0% of 2 prompts" in report.summary
    assert "drafted ids leave plain ones at token 1 (logit gap" in caplog.text
    prompt = read_json(home / "data/evaluation.json")["prompts"][0]
    assert prompt["lost_at_token"] == 1
    assert prompt["logit_gap_there"] >= prompt["smallest_logit_gap"] > 0
    assert table(home)["trained", "all", "real", 2]["lossless_prompts"] == 0


def test_a_reply_of_one_token_needs_no_verification(home: Path) -> None:
    report = evaluate.work(params(max_new_tokens=1))
    row = table(home)["trained", "all", "real", 2]
    assert (row["verifications"], row["tau"]) == (0, 1.0)
    assert report.metrics["lossless_share"] == 1.0


def other_target(home: Path) -> None:
    write_json(home / "models/target/eyas_target.json", {"revision": "r1"})


def no_export(home: Path) -> None:
    (home / "models/export/config.json").unlink()


def no_weights(home: Path) -> None:
    (home / "models/export/model.safetensors").unlink()


def other_layers(home: Path) -> None:
    path = home / "models/export/config.json"
    config = read_json(path)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    write_json(path, config)


def renamed_tensor(home: Path) -> None:
    path = home / "models/export/model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    save_file(tensors, path)


def empty_heldout(home: Path) -> None:
    for name in SOURCES:
        write_text(home / f"data/heldout/{name}.jsonl", "")


def no_heldout(home: Path) -> None:
    (home / "data/heldout/code.jsonl").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_target, "made for target revision r0, models/target is r1"),
        (no_export, r"models/export/config\.json: no such file"),
        (no_weights, r"model\.safetensors"),
        (
            other_layers,
            r"config\.json: eagle_config: expected .*\[1, 3, 4\].* got .*\(profile sglang\)",
        ),
        (renamed_tensor, r"unknown tensor 'layers\.0\.hidden_norm\.weight'"),
        (empty_heldout, "no held-out prompt"),
        (no_heldout, r"code\.jsonl: no such file"),
    ],
)
def test_what_does_not_belong_together_is_refused_and_named(
    home: Path, spoil: Any, words: str
) -> None:
    spoil(home)
    with pytest.raises(EyasError, match=words):
        evaluate.work(params())
    assert not (home / "data/evaluation.json").exists()


def test_a_server_s_own_counts_become_the_table(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reply is 9 tokens in 4 verifications, of which two accept 2 drafts."""
    info = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "internal_states": [{"avg_spec_accept_length": 2.25}],
    }
    asked: list[list[int]] = []

    def ask_all(_url: str, prompts: list[list[int]], **_: object) -> list[served.Reply]:
        asked.extend(prompts)
        reply = served.Reply(ids=(7, 8) * 4 + (7,), verifications=4, histogram=(2, 0, 2))
        return [reply] * len(prompts)

    monkeypatch.setattr(served, "ask_all", ask_all)
    monkeypatch.setattr(served, "server_info", lambda _url: info)
    monkeypatch.setattr(evaluate, "load_model", lambda *_: pytest.fail("the target is not loaded"))
    with pytest.raises(EyasError, match=r"runtime\.sglang_url: expected the address"):
        evaluate.work(params(backend="sglang"))
    monkeypatch.setitem(RUNTIME, "sglang_url", "http://server")
    report = evaluate.work(params(backend="sglang"))
    result = read_json(home / "data/evaluation.json")
    row = next(r for r in result["rows"] if (r["drafter"], r["dataset"]) == ("trained", "all"))
    assert (row["method"], row["tau"], row["prompts"]) == ("served", 2.0, len(asked))
    assert row["acceptance_by_position"] == [0.5, 1.0]
    assert report.metrics["acceptance_length_trained"] == 2.0
    assert report.metrics["acceptance_length_lookup"] > 1.5, "the reply repeats itself"
    assert report.metrics["server_accept_length"] == 2.25
    assert "in SGLang" in report.summary


def test_an_unknown_backend_is_refused(home: Path) -> None:
    with pytest.raises(EyasError, match=r"evaluate\.backend: expected transformers \| sglang"):
        evaluate.work(params(backend="vllm"))
