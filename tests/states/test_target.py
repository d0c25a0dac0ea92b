import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.states.folder import copy_folder, head_keys, weight_files
from eyas.states.target import aux_layers, check_layers, fast_dtype, load_head, load_model


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "target"))


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(61, (1, 29, 57)), (30, (1, 14, 26)), (8, (1, 3, 4))]
)
def test_aux_layers_by_hand(num_layers: int, layers: tuple[int, ...]) -> None:
    assert aux_layers(num_layers) == layers
    check_layers(layers, num_layers)


def test_a_shallow_target_has_no_three_layers() -> None:
    with pytest.raises(EyasError, match="target of 6 layers"):
        aux_layers(6)


@pytest.mark.parametrize("layers", [(), (2, 4), (1, 4, 3), (1, 3, 7), (1, 1)])
def test_layer_ids_that_an_engine_reads_differently_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(EyasError, match=r"expected ascending ids, first 1, last <= 6"):
        check_layers(layers, 8)


def test_the_head_alone_is_that_of_the_whole_model(folder: Path) -> None:
    model, head = load_model(folder), load_head(folder)
    assert torch.equal(head.embed_VD, model.model.embed_tokens.weight)
    assert torch.equal(head.norm_weight_D, model.model.norm.weight)
    assert torch.equal(head.lm_head_VD, model.lm_head.weight)
    assert head.norm_eps == 1e-5
    assert head.config["hidden_size"] == 48
    assert load_head(folder, dtype=torch.bfloat16).embed_VD.dtype == torch.bfloat16


def test_the_head_is_found_across_shards(llama: Any, folder: Path) -> None:
    whole = load_head(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    where = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file(
            {name: tensors[name] for name in part},
            folder / f"part-{number}.safetensors",
            metadata={"format": "pt"},
        )
        where |= dict.fromkeys(part, f"part-{number}.safetensors")
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    sharded = load_head(folder)
    for name in ("embed_VD", "norm_weight_D", "lm_head_VD"):
        assert torch.equal(getattr(sharded, name), getattr(whole, name))
    assert torch.equal(load_model(folder).lm_head.weight, llama.lm_head.weight)


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"tie_word_embeddings": True})
    head = load_head(folder)
    assert head.lm_head_VD is head.embed_VD


def test_a_prefix_of_a_multimodal_model_is_seen_through(folder: Path) -> None:
    whole = load_head(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {"model_type": "kimi", "text_config": config})
    assert torch.equal(load_head(folder).lm_head_VD, whole.lm_head_VD)


def shard_like_kimi(folder: Path) -> dict[str, torch.Tensor]:
    """Lay the weights out as the 1T checkpoint does: prefixed, over shards, with further heads."""
    tensors = {f"language_model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    deeper = "language_model.model.layers.8"  # DeepSeek's module for the token after the next
    tensors[f"{deeper}.embed_tokens.weight"] = torch.zeros(97, 48)
    tensors[f"{deeper}.shared_head.head.weight"] = torch.zeros(97, 48)
    tensors["vision_tower.encoder.final_layernorm.weight"] = torch.ones(4)
    ends = ["embed_tokens", "model.norm", "lm_head"]
    where = {}
    for name, tensor in tensors.items():
        head = [end for end in ends if name.endswith(f"{end}.weight") and deeper not in name]
        file = f"model-{ends.index(head[0]) if head else 9:05d}-of-00010.safetensors"
        where[name] = file
        path = folder / file
        save_file((load_file(path) if path.is_file() else {}) | {name: tensor}, path)
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", {"weight_map": where})
    config = read_json(folder / "config.json")
    outer = {"model_type": "kimi_k25", "text_config": config}
    write_json(folder / "config.json", outer)
    return tensors


def test_the_head_of_a_sharded_prefixed_checkpoint_needs_its_three_shards_alone(
    folder: Path,
) -> None:
    whole, tensors = load_head(folder), shard_like_kimi(folder)
    (folder / "model-00009-of-00010.safetensors").write_bytes(b"never opened")
    head = load_head(folder)
    assert torch.equal(head.embed_VD, whole.embed_VD)
    assert torch.equal(head.norm_weight_D, whole.norm_weight_D)
    assert torch.equal(head.lm_head_VD, whole.lm_head_VD)
    assert head_keys(folder, head.config) == [
        f"language_model.{name}.weight" for name in ("model.embed_tokens", "model.norm", "lm_head")
    ]
    assert len(tensors) > 60


def test_a_folder_of_the_head_alone_reads_as_the_whole_and_is_no_model(
    folder: Path, tmp_path: Path
) -> None:
    whole = load_head(folder)
    shard_like_kimi(folder)
    (folder / "model-00009-of-00010.safetensors").unlink()
    write_json(folder / "tokenizer.json", {})
    copy_folder(folder, tmp_path / "head", head_only=True)
    assert weight_files(tmp_path / "head") == [tmp_path / "head/model.safetensors"]
    assert len(load_file(tmp_path / "head/model.safetensors")) == 3
    assert torch.equal(load_head(tmp_path / "head").lm_head_VD, whole.lm_head_VD)
    write_json(tmp_path / "head/eyas_target.json", {"source": {"weights": "head"}})
    with pytest.raises(EyasError, match="expected the whole model, got its head alone"):
        load_model(tmp_path / "head")


def test_a_tie_may_stand_outside_the_text_part(folder: Path) -> None:
    config = read_json(folder / "config.json")
    inner = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    write_json(folder / "config.json", {"tie_word_embeddings": True, "text_config": inner})
    head = load_head(folder)
    assert head.lm_head_VD is head.embed_VD


def test_faults_of_a_folder_are_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"config.json: no such file\n  hint: .*-f -s target"):
        load_model(tmp_path / "nowhere")
    tensors = load_file(folder / "model.safetensors")
    short = tensors | {"lm_head.weight": tensors["lm_head.weight"][:5].clone()}
    save_file(short, folder / "model.safetensors")
    with pytest.raises(EyasError, match=r"lm_head expected \(97, 48\), got \(5, 48\)"):
        load_head(folder)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "model.safetensors")
    with pytest.raises(
        EyasError, match=r"expected one tensor '\*model.embed_tokens.weight', got \[\]"
    ):
        load_head(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(EyasError, match="not a readable safetensors file"):
        load_head(folder)
    with pytest.raises(EyasError, match="not a loadable model"):
        load_model(folder)


def test_the_fast_dtype_is_one_that_the_sampler_takes() -> None:
    assert fast_dtype() in {torch.float32, torch.bfloat16}
