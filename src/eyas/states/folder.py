"""The target's folder: write it, copy it, check that it is whole, give it an identity.

Reads and writes: a Hugging Face folder (models/target).
Source: https://huggingface.co/docs/transformers/main_classes/model#transformers.PreTrainedModel.save_pretrained
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import read_json, sha256_of, write_json

SIDECAR = "eyas_target.json"


def save_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def save_configs(config: Any, folder: Path) -> None:
    """Write config.json and generation_config.json, with `rope_theta` wherever engines look."""
    from transformers import GenerationConfig

    value = json.loads(config.to_json_string(use_diff=False))
    value["rope_theta"] = value["rope_parameters"]["rope_theta"]
    write_json(folder / "config.json", value)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)


def check_folder(folder: Path) -> None:
    """Assert that a folder holds a whole target: config, weights, tokenizer, chat template.

    Raises: EyasError naming the first thing that is missing.
    """
    tokenizer = "tiktoken.model" if (folder / "tiktoken.model").is_file() else "tokenizer.json"
    for name in ("config.json", tokenizer, "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise EyasError(
                f"{folder / name}: no such file", hint="a target is a Hugging Face folder"
            )
    for shard in weight_files(folder):
        if not shard.is_file():
            raise EyasError(f"{shard}: no such file", hint="the download or copy is incomplete")
    in_config = read_json(folder / "tokenizer_config.json").get("chat_template")
    if not in_config and not (folder / "chat_template.jinja").is_file():
        raise EyasError(
            f"{folder}: a target without a chat template",
            hint="take the instruction-tuned model, or add chat_template to tokenizer_config.json",
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: the single one, or those its index names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    return [folder / "model.safetensors"]


def copy_folder(source: Path, folder: Path) -> None:
    """Copy a target folder's files (not its subfolders), following the links of the hub's cache."""
    if not source.is_dir():
        raise EyasError(f"{source}: no such folder", hint="check target.source.path")
    check_folder(source)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != SIDECAR:
            shutil.copyfile(path, folder / path.name)


def folder_digest(folder: Path) -> str:
    """Return the sha256 over names and contents of a folder's files: its identity as a target."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != SIDECAR:
            digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()
