"""The comparison of training steps: its batches, and our gradients against SpecForge's."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "draft_vocab_size": 200,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "batch_size": 2,
    "seq_len": 160,
    "ttt_length": 4,
    "supervised_fraction": 0.4,
    "supervised_spans": 3,
    "lr": 1e-4,
    "max_grad_norm": 0.5,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load_train_step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_step", ROOT / "benchmarks/train_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_batch_file_reads_as_documents_without_padding(tmp_path: Path) -> None:
    from peers.batch import made_up, read_batch

    batch = made_up(CONFIG)
    first, second = batch.documents
    numbers = torch.tensor([[0] * 100 + [1] * 58 + [-1] * 2] * 2)
    save_file(
        {
            "input_ids": torch.stack([first.input_ids_T, second.input_ids_T]),
            "loss_mask": torch.stack([first.mask_T, second.mask_T]).to(torch.uint8),
            "aux_hidden_states": torch.stack([first.aux_TE, second.aux_TE]).bfloat16(),
            "last_hidden_state": torch.stack([first.final_TD, second.final_TD]),
            "document_ids": numbers,
        },
        tmp_path / "batch.safetensors",
    )
    target = {"target.lm_head.weight": batch.head_VD, "target.embed_tokens.weight": batch.embed_VD}
    maps = {"d2t": batch.d2t_N, "t2d": batch.t2d_V.to(torch.uint8)}
    save_file(target | maps, tmp_path / "shared.safetensors")
    got = read_batch(tmp_path / "batch.safetensors")
    assert [len(d.input_ids_T) for d in got.documents] == [100, 58, 100, 58]
    assert got.tokens == 316
    assert torch.equal(got.documents[1].input_ids_T, first.input_ids_T[100:158])
    assert got.documents[0].aux_TE.dtype == torch.float32
    assert torch.equal(got.t2d_V, batch.t2d_V)


def test_specforge_counts_rows_whose_own_token_is_in_a_reply() -> None:
    from peers.batch import made_up, specforge_counts
    from peers.eyas_step import specforge_pack, specforge_weights

    batch = made_up(CONFIG)
    document = batch.documents[0]
    counts_T = specforge_counts(document, batch)
    for t in range(160):
        inside = t < 159 and bool(document.mask_T[t])
        favourite = int((document.final_TD[min(t + 1, 159)] @ batch.head_VD.T).argmax())
        assert bool(counts_T[t]) == (inside and bool(batch.t2d_V[favourite])), t
    pack = specforge_pack(batch)
    rows = sum(int(specforge_counts(d, batch).sum()) for d in batch.documents)
    assert len(pack.predictions_P) == rows
    assert specforge_weights(pack, 2)[0] == rows / 320


def test_the_floor_counts_each_product_once() -> None:
    from peers.batch import made_up
    from peers.floor import products

    config = CONFIG | {"supervised_fraction": 1.0, "supervised_spans": 1, "ttt_length": 1}
    batch = made_up(config)
    got = sum(p.m * p.k * p.n * p.times for p in products(config, batch))
    read = sum(int((d.mask_T[1:-1] & d.mask_T[2:]).sum()) for d in batch.documents)
    assert read == 2 * 158
    kept = sum(
        int(batch.t2d_V[(d.final_TD[1:-1] @ batch.head_VD.T).argmax(-1)].sum())
        for d in batch.documents
    )
    projections = 320 * 48 * (2 * 144 + 3 * 160 + 3 * 64) + 316 * 48 * 3 * 96
    layer = 316 * 3 * (96 * 48 + 48 * 128 + 64 * 48)
    pairs = 2 * sum(range(1, 159))
    attention = pairs * 6 * 16 * 6
    heads = 316 * 48 * 300 + kept * 48 * 200 * 3
    assert got == pytest.approx(projections + layer + attention + heads, rel=0.01)


@pytest.mark.slow
def test_our_gradients_are_specforges_under_its_rows_and_divisor(tmp_path: Path) -> None:
    train_step = load_train_step()
    if not train_step.PEERS_PYTHON.is_file():
        pytest.skip(f"{train_step.PEERS_PYTHON} is not there: make .venv-peers/.ready")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    workers = [train_step.Worker(name, ["--config", str(path)]) for name in ("eyas", "specforge")]
    line = train_step.compare(*workers)
    for worker in workers:
        worker.close()
    assert line["tensors"] == 13
    assert line["worst_relative_error"] < 1e-5, line
    assert line["loss_relative_error"] < 1e-5, line
