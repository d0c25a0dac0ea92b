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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import read_json, sha256_of, write_json

SIDECAR = "eyas_target.json"
INDEX = "model.safetensors.index.json"
REBUILD = "build it again with `dvc repro -f -s target`"


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
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    return [folder / "model.safetensors"]


def copy_folder(source: Path, folder: Path, *, head_only: bool = False) -> None:
    """Copy a target folder's files (not its subfolders), following the links of the hub's cache.

    `head_only`: of the weights, only embedding, final norm and lm_head, in one file; the source
    need not hold the shards of others.
    """
    if not source.is_dir():
        raise EyasError(f"{source}: no such folder", hint="check target.source.path")
    if not head_only:
        check_folder(source)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        weights = path.suffix == ".safetensors" or path.name == INDEX
        if path.is_file() and path.name != SIDECAR and not (head_only and weights):
            shutil.copyfile(path, folder / path.name)
    if head_only:
        keys, where = head_keys(source, read_json(source / "config.json")), weight_map(source)
        save_weights({key: read_tensor(where, key) for key in keys}, folder)


def folder_digest(folder: Path) -> str:
    """Return the sha256 over names and contents of a folder's files: its identity as a target."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != SIDECAR:
            digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def head_keys(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return the keys of embedding, final norm and, where it is not tied, lm_head.

    Multimodal targets put a prefix before `model.`; a module for further tokens (DeepSeek-V3's
    `model.layers.61.embed_tokens`) does not count.

    Raises: EyasError unless each is there once.
    """
    text = config.get("text_config", config)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    suffixes = ["model.embed_tokens.weight", "model.norm.weight"]
    suffixes += [] if tied else ["lm_head.weight"]
    where, found = weight_map(folder), list[str]()
    for suffix in suffixes:
        keys = [key for key in where if key == suffix or key.endswith(f".{suffix}")]
        if len(keys) != 1:
            raise EyasError(f"{folder}: expected one tensor '*{suffix}', got {keys}", hint=REBUILD)
        found += keys
    return found


def weight_map(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor: by the index where there is one, else of the single file."""
    index = folder / INDEX
    if index.is_file():
        return {key: folder / name for key, name in read_json(index)["weight_map"].items()}
    path = folder / "model.safetensors"
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def read_tensor(where: dict[str, Path], key: str) -> torch.Tensor:
    """Return one tensor; no other file is opened."""
    with _open(where[key]) as file:
        return file.get_tensor(key)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise EyasError(
            f"{path}: not a readable safetensors file ({error})", hint=REBUILD
        ) from None
