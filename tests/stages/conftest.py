"""Folders in which the random target stands, alone or with a drafter, ready to be exported."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DATASETS = ("chat", "code")
ANSWER = {"provider": "local", "model": "random", "sampling": {"temperature": 0.7}}
ANSWER |= {"prompt_tokens": 4, "completion_tokens": 6, "cost_usd": 0.25}


@pytest.fixture
def random_target(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand where models/target is the random target, which train takes to have a codec."""
    from eyas.files import write_json
    from eyas.stages import train

    monkeypatch.chdir(tmp_path)
    codec = SimpleNamespace(special_ids=frozenset({96}), stop_ids=(95,), markup_ids=frozenset())
    monkeypatch.setattr(train, "load_codec", lambda name, folder: codec)
    target = tmp_path / "models/target"
    target.mkdir(parents=True)
    for path in llama_folder.iterdir():
        (target / path.name).symlink_to(path)
    about = {"name": "random", "codec": "chatml", "revision": "r0", "source": {}}
    write_json(target / "eyas_target.json", about)
    return tmp_path


@pytest.fixture
def drafter_home(
    llama_folder: Path,
    llama_drafter_config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Stand where target, drafter, its start and eight held-out prompts lie."""
    import torch
    from safetensors.torch import save_file

    from eyas.drafter.config import save_config
    from eyas.drafter.export import expected_shapes
    from eyas.files import write_json, write_jsonl
    from eyas.parquet import write_samples
    from eyas.records import Prompt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    target = tmp_path / "models/target"
    target.mkdir()
    for path in llama_folder.iterdir():
        (target / path.name).symlink_to(path)
    write_json(target / "eyas_target.json", {"name": "random", "revision": "r0"})
    config = replace(llama_drafter_config, target_revision="r0")
    drafter = tmp_path / "models/drafter"
    save_config(drafter / "config.json", config)
    used = torch.arange(0, 97)[:60] + torch.arange(60) // 2
    t2d = torch.zeros(97, dtype=torch.bool)
    t2d[used] = True
    for seed, name in enumerate(("start", "drafter")):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            key: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
            for key, shape in expected_shapes(config).items()
        }
        maps = {"d2t": used - torch.arange(60), "t2d": t2d}
        save_file(tensors | maps, drafter / f"{name}.safetensors")
    facts: dict[str, Any] = {"documents": 6, "tokens": 1234, "ttt_steps": 3}
    facts["val_simulated_acceptance_length"] = 1.25
    write_json(drafter / "training.json", facts)
    samples = [_sample(name) for name in DATASETS]
    write_samples(tmp_path / "data/mixture/train.parquet", samples)
    for number, dataset in enumerate(DATASETS):
        write_jsonl(tmp_path / f"data/responses/{dataset}.jsonl", [ANSWER])
        for stage in ("samples", "valid"):
            write_jsonl(tmp_path / f"data/{stage}/{dataset}.rejects.jsonl", [])
        rows = [_prompt(Prompt, dataset, 4 * number + n) for n in range(4)]
        write_jsonl(tmp_path / f"data/heldout/{dataset}.jsonl", rows)
    return tmp_path


def _prompt(record: Any, dataset: str, number: int) -> Any:
    return record(
        id=f"id{number}",
        dataset=dataset,
        upstream_id=str(number),
        messages=({"role": "user", "content": "x" * (number + 3)},),
        tools=(),
        prompt_tokens=0,
        partition="short",
        licence="CC0-1.0",
    )


def _sample(dataset: str) -> Any:
    from eyas.records import Sample

    return Sample(
        id=f"{dataset}0",
        dataset=dataset,
        input_ids=(1, 2, 3),
        spans=((1, 3),),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=2,
    )
