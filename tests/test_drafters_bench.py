"""The comparison of drafters: pairing, equal budgets, and what a killed one keeps."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.drafter.packing import Document, number_replies

NAMES = ("drafter_data", "drafter_runs", "drafters", "codecs")


@pytest.fixture(scope="module")
def bench() -> Any:
    for name in NAMES:
        spec = importlib.util.spec_from_file_location(name, f"benchmarks/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    yield sys.modules["drafters"]
    for name in NAMES:
        del sys.modules[name]


class InMemory:
    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.lengths = [len(d.input_ids_T) for d in documents]

    def read(self, index: int) -> Document:
        return self.documents[index]


@pytest.fixture
def data(
    bench: Any,
    llama: Any,
    llama_drafter_config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Replies of the random Llama, and greedy paths of it from two sources."""
    made, run_data = sys.modules["drafter_data"], {}
    monkeypatch.setattr(bench, "KEPT", tmp_path / "kept")
    g = torch.Generator().manual_seed(0)
    for name, count in (("train", 12), ("heldout", 4)):
        rows = []
        for _ in range(count):
            prompt = torch.randint(3, 97, (6,), generator=g)
            ids = llama.generate(
                prompt[None], max_new_tokens=14, do_sample=False, eos_token_id=None
            )
            with torch.no_grad():
                states = llama(ids, output_hidden_states=True).hidden_states
            aux_TLD = torch.stack([states[i + 1][0] for i in (1, 3, 4)], dim=1)
            rows.append((ids[0], aux_TLD, states[-1][0]))
        run_data[name] = rows
    documents = [
        Document(
            input_ids_T=ids,
            reply_T=number_replies(20, [(6, 20)], truncated=False),
            aux_TLD=aux_TLD,
            final_TD=final_TD,
        )
        for ids, aux_TLD, final_TD in run_data["train"]
    ]
    config = replace(llama_drafter_config, draft_vocab_size=97)
    head = SimpleNamespace(
        embed_VD=llama.get_input_embeddings().weight.detach(),
        norm_weight_D=llama.model.norm.weight.detach(),
        lm_head_VD=llama.lm_head.weight.detach(),
        norm_eps=1e-5,
    )
    return made.Data(
        name="tiny",
        digest="d",
        documents=InMemory(documents),
        paths=[
            made.Heldout(source="ab"[i % 2], prompt_tokens=6, ids=ids.tolist(), aux_TLD=aux_TLD)
            for i, (ids, aux_TLD, _) in enumerate(run_data["heldout"])
        ],
        head=head,
        config=config,
        t2d_V=torch.ones(97, dtype=torch.bool),
        stop_ids=(),
    )


def place(bench: Any, cpu_s: float) -> Any:
    none = Path("none")
    return bench.Place(folder=none, budget_cpu_s=cpu_s, peer_kit=none, peer_python=none)


def test_a_finished_run_is_kept_and_its_tau_is_that_of_its_weights(
    bench: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        bench.RECIPES, "short", bench.Recipe(trainer="eyas", settings={"epochs": 2})
    )
    line, gains = bench.run(data, "short", 0, place(bench, 5.0))
    assert line["epochs"] == 2
    assert 1.0 <= line["tau"] <= 4.0
    folder = bench.KEPT / line["key"]
    assert sorted(p.name for p in folder.iterdir()) == ["drafter.safetensors", "result.json"]
    assert gains == bench.drafter_gains(data, folder / "drafter.safetensors")
    monkeypatch.setattr(bench, "build", lambda *_: pytest.fail("it is made once"))
    again, _ = bench.run(data, "short", 0, place(bench, 5.0))
    assert again == line
    with pytest.raises(pytest.fail.Exception):
        bench.run(data, "short", 1, place(bench, 5.0))
    with pytest.raises(pytest.fail.Exception):
        bench.run(data, "short", 0, place(bench, 6.0))
    smaller = bench.dataclasses.replace(data.config, draft_vocab_size=60)
    for change in ({"config": smaller}, {"paths": data.paths[1:]}):
        with pytest.raises(pytest.fail.Exception):
            bench.run(bench.dataclasses.replace(data, **change), "short", 0, place(bench, 5.0))


def test_epochs_fill_the_budget_and_a_killed_run_counts_what_it_spent(
    bench: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = sys.modules["drafter_runs"]
    monkeypatch.setattr(runs, "_epoch_cpu_s", lambda *_: 1.0)
    base = bench.read_params().section("train", bench.Train)
    folder = bench.dataclasses.replace(place(bench, 3.9), folder=tmp_path / "run")
    steps = 0
    write = runs.write_json

    def dying(path: Path, value: object) -> None:
        nonlocal steps
        steps += 1
        write(path, value)
        if steps == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "write_json", dying)
    with pytest.raises(KeyboardInterrupt):
        runs.build(data, bench.Recipe(trainer="eyas"), base, folder)
    spent = json.loads((tmp_path / "run/spent.json").read_text(encoding="utf-8"))
    assert spent["epochs"] == 3
    facts = runs.build(data, bench.Recipe(trainer="eyas"), base, folder)
    assert facts["epochs"] == 3
    assert facts["cpu_s"] > spent["cpu_s"]


def test_a_teacher_of_another_temperature_and_another_rate_of_fc_reach_training(
    bench: Any, data: Any
) -> None:
    runs = sys.modules["drafter_runs"]
    plain, other = (
        runs.corpus_of(data, recipe)
        for recipe in (
            bench.Recipe(trainer="eyas"),
            bench.Recipe(trainer="eyas", fc_rate=0.25, temperature=2.0),
        )
    )
    assert torch.equal(other.head_ND * 2.0, plain.head_ND)
    assert torch.equal(other.aux_scale_LD * 0.25, plain.aux_scale_LD)


def test_differences_are_paired_by_prompt_and_drawn_within_sources(bench: Any, data: Any) -> None:
    ours = [[(2, 2), (4,), (2, 2), (4,)]]
    theirs = [[(1, 1, 1, 1), (2, 2), (1, 1, 1, 1), (2, 2)]]
    found = bench.compare(data, ours, theirs)
    # prompts 0 and 2 are source a, 1 and 3 source b: every draw holds two of each
    assert found["difference"] == found["difference_low"] == found["difference_high"]
    assert found["ratio"] == 2.0
    assert bench.taus_of(data, ours) == {"tau": 2.6667, "tau_a": 2.0, "tau_b": 4.0}


def test_the_bars_are_held_against_the_peers_best_run(bench: Any, data: Any) -> None:
    good, poor = [[(2, 2)] * 4], [[(1, 1, 1, 1)] * 4]
    gains = {
        "prompt lookup": poor,
        "eyas": good,
        "specforge_own_1e-3": poor,
        "specforge_own_3e-4": [[(2, 1, 1)] * 4],
    }
    lines = {line["recipe"]: line for line in bench.summaries(data, gains)}
    assert "over specforge_own_3e-4" in lines["eyas"]
    bars = lines["eyas"]["bars"]
    assert (bars["tau_met"], bars["aim_met"], bars["over_peer_met"]) == (True, True, True)
    assert bars["above_lookup"]


def test_a_codecs_loss_is_its_fall_against_bf16_with_a_paired_interval(
    bench: Any, data: Any
) -> None:
    codecs = sys.modules["codecs"]
    base = [[(3, 3), (2, 2), (4, 4), (1, 3)]] * 2
    gains = {"bf16": base, "fp8": base, "int4": [[(3, 2), (2, 1), (4, 3), (1, 2)]] * 2}
    same = codecs.summary(data, "fp8", gains)
    assert (same["loss"], same["loss_low"], same["loss_high"], same["met"]) == (0, 0, 0, True)
    worse = codecs.summary(data, "int4", gains)
    assert worse["loss"] == pytest.approx(1 - (18 / 8) / (22 / 8), abs=1e-3)
    assert 0 < worse["loss_low"] <= worse["loss"] <= worse["loss_high"]
    assert worse["met"] is False
    assert "loss" not in codecs.summary(data, "bf16", gains)
