"""The shape of a drafter and of the target it belongs to.

Reads, writes: models/drafter/config.json.
Source: SGLang srt/models/llama_eagle3.py for what each size governs.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.settings import Drafter

AUX_STATES = 3  # EAGLE-3 fuses this many of the target's layers; servers know no other number
_REMAKE = "re-run the stage train"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Everything about a drafter but its weights."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    aux_layers: tuple[int, ...]  # "output of layer i" of the target, the first is 1
    target_name: str
    target_revision: str
    bos_token_id: int | None
    eos_token_id: int | None


def make_config(
    drafter: Drafter,
    target: Mapping[str, Any],
    *,
    aux_layers: tuple[int, ...],
    target_name: str,
    target_revision: str,
) -> DrafterConfig:
    """Return the drafter's shape: the settings', or where they are null the target's.

    The draft vocabulary is at most the target's: a small target needs no option of its own.

    `target` is the target's config.json (a Llama-like one; a multimodal one nests it).

    Raises: EyasError where the shapes cannot work together.
    """
    target = target.get("text_config") or target
    width, heads = target["hidden_size"], target["num_attention_heads"]
    eos = target.get("eos_token_id")
    config = DrafterConfig(
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=drafter.intermediate_size or target["intermediate_size"],
        num_attention_heads=drafter.num_attention_heads or heads,
        num_key_value_heads=drafter.num_key_value_heads
        or target.get("num_key_value_heads")
        or heads,
        head_dim=target.get("head_dim") or width // heads,
        vocab_size=target["vocab_size"],
        draft_vocab_size=min(drafter.draft_vocab_size, target["vocab_size"]),
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=_rope_theta(target),
        max_position_embeddings=target["max_position_embeddings"],
        aux_layers=aux_layers,
        target_name=target_name,
        target_revision=target_revision,
        bos_token_id=target.get("bos_token_id"),
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
    )
    _check(config)
    return config


def _rope_theta(target: Mapping[str, Any]) -> float:
    parameters = target.get("rope_parameters") or {}  # transformers 5; older files: rope_theta
    return float(parameters.get("rope_theta") or target.get("rope_theta") or 10_000.0)


def _check(config: DrafterConfig) -> None:
    if len(config.aux_layers) != AUX_STATES:
        raise EyasError(
            f"extract.layers: expected {AUX_STATES} layers for an EAGLE-3 drafter, "
            f"got {list(config.aux_layers)}",
            hint="set extract.layers to three layers, or to null",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise EyasError(
            f"drafter.num_key_value_heads: expected a divisor of {config.num_attention_heads} "
            f"attention heads, got {config.num_key_value_heads}"
        )


def save_config(path: Path, config: DrafterConfig) -> None:
    """Write config.json."""
    write_json(path, dataclasses.asdict(config))


def load_config(path: Path) -> DrafterConfig:
    """Read config.json; a missing file or a wrong set of keys is an EyasError that names it."""
    value = read_json(path, hint=_REMAKE)
    expected = {field.name for field in dataclasses.fields(DrafterConfig)}
    if not isinstance(value, dict) or set(value) != expected:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise EyasError(f"{path}: expected keys {sorted(expected)}, got {got}", hint=_REMAKE)
    config = DrafterConfig(**value)
    return dataclasses.replace(config, aux_layers=tuple(config.aux_layers))
