from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.desk.lineage_lookup import read_lineage
from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.stages import export

PARAMS = Params({"export": {"profile": "sglang"}, "merge": {"sources": ["chat", "code"]}})


def test_the_stage_writes_the_folder_and_counts_it(drafter_home: Path) -> None:
    report = export.work(PARAMS)
    folder = drafter_home / "models/export"
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    served = load_file(folder / "model.safetensors")
    trained = load_file(drafter_home / "models/drafter/drafter.safetensors")
    assert served["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(served["lm_head.weight"], trained["lm_head.weight"].bfloat16())
    assert "embed_tokens.weight" not in served
    weights = sum(t.numel() for t in served.values() if t.is_floating_point())
    assert report.metrics["parameters"] == weights
    assert report.metrics["size_bytes"] == (folder / "model.safetensors").stat().st_size


def test_the_card_names_target_data_and_how_acceptance_is_counted(drafter_home: Path) -> None:
    export.work(PARAMS)
    card = (drafter_home / "models/export/README.md").read_text(encoding="utf-8")
    for words in (
        "random, revision `r0`",
        "chat, code",
        "1,234 tokens",
        "validation split, K = 3, with bonus | 1.250",
        "--speculative-num-draft-tokens 4",
        "export.profile=vllm",
        "the bonus token",
    ):
        assert words in card


def test_card_and_weights_say_where_the_data_come_from(drafter_home: Path) -> None:
    export.work(PARAMS)
    folder = drafter_home / "models/export"
    assert (
        "| chat | local | 1 | 10 | 0.2500 | 25,000.00 | 1 |" in (folder / "README.md").read_text()
    )
    told = read_lineage(folder)
    assert told["target"] == {"name": "random", "revision": "r0"}
    assert told["datasets"]["code"]["providers"]["local"]["cost_usd"] == 0.25


def test_a_second_export_gives_the_same_bytes(drafter_home: Path) -> None:
    export.work(PARAMS)
    files = sorted((drafter_home / "models/export").iterdir())
    before = [path.read_bytes() for path in files]
    export.work(PARAMS)
    assert [path.read_bytes() for path in files] == before


def test_a_drafter_without_a_validation_split_says_so_in_its_card(drafter_home: Path) -> None:
    path = drafter_home / "models/drafter/training.json"
    facts = read_json(path)
    facts["train_simulated_acceptance_length"] = facts.pop("val_simulated_acceptance_length")
    write_json(path, facts)
    export.work(PARAMS)
    card = (drafter_home / "models/export/README.md").read_text(encoding="utf-8")
    assert "training split" in card


@pytest.mark.parametrize("name", ["config.json", "drafter.safetensors", "training.json"])
def test_a_missing_input_is_named(drafter_home: Path, name: str) -> None:
    (drafter_home / "models/drafter" / name).unlink()
    with pytest.raises(EyasError, match=name):
        export.work(PARAMS)
    assert not (drafter_home / "models/export").exists()


def test_a_diverged_drafter_is_not_exported(drafter_home: Path) -> None:
    path = drafter_home / "models/drafter/drafter.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"][0, 0] = float("inf")
    save_file(tensors, path)
    with pytest.raises(EyasError, match=r"'fc\.weight' holds NaN or infinity"):
        export.work(PARAMS)
    assert not (drafter_home / "models/export").exists()
