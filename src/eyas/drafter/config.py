"""The shape of a drafter and of the target it belongs to.

Reads, writes: models/drafter/config.json.
Source: SGLang srt/models/llama_eagle3.py and kimi_k25_eagle3.py for what each size governs.
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
_OPTIONAL = {"family", "mla", "fc_norm"}  # config.json is without where they are the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """How RoPE is stretched; `mscale` and `mscale_all_dim` are DeepSeek's."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """DeepSeek's latent attention."""

    q_lora_rank: int | None  # None: a plain q_proj
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    yarn: Yarn | None  # None: plain RoPE


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
    family: str = "eagle3"
    mla: MlaShape | None = None  # of family eagle3_mla
    fc_norm: bool = False  # EAGLE-3.1: each aux state is RMS-normed before fc

    @property
    def value_dim(self) -> int:
        """Return the width of a value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim


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
    mla = _mla_shape(drafter, target) if drafter.family == "eagle3_mla" else None
    own = drafter.num_attention_heads or heads
    keys = own if mla else target.get("num_key_value_heads") or heads
    head_dim = target.get("head_dim") or width // heads
    config = DrafterConfig(
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=drafter.intermediate_size or target["intermediate_size"],
        num_attention_heads=own,
        num_key_value_heads=drafter.num_key_value_heads or keys,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else head_dim,
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
        family=drafter.family,
        mla=mla,
        fc_norm=drafter.fc_norm,
    )
    _check(config)
    return config


def _mla_shape(drafter: Drafter, target: Mapping[str, Any]) -> MlaShape:
    """Return the sizes of the settings, or where they are null the target's, and its YaRN.

    Raises: EyasError if neither has one, or RoPE is stretched by another rule.
    """
    sizes: dict[str, Any] = {
        name: target.get(name) if size is None else size
        for name, size in dataclasses.asdict(drafter.mla).items()
    }
    for name, size in sizes.items():
        if not (size or (size is None and name == "q_lora_rank")):
            raise EyasError(
                f"drafter.mla.{name}: expected a size above 0, got {size}; the target has none",
                hint="give it, or set drafter.family=eagle3",
            )
    rope = dict(target.get("rope_parameters") or {}) | dict(target.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise EyasError(f"drafter.family=eagle3_mla: the target's RoPE is '{kind}', not yarn")
    lacking = [n for n in ("factor", "original_max_position_embeddings") if not rope.get(n)]
    if kind == "yarn" and lacking:
        raise EyasError(
            f"drafter.family=eagle3_mla: expected '{lacking[0]}' in the target's YaRN, got {rope}",
            hint="complete models/target/config.json, or set drafter.family=eagle3",
        )
    known = {field.name for field in dataclasses.fields(Yarn)}
    yarn = Yarn(**{k: v for k, v in rope.items() if k in known}) if kind == "yarn" else None
    return MlaShape(**sizes, yarn=yarn)


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
    if config.mla and config.num_key_value_heads != config.num_attention_heads:
        raise EyasError(
            f"drafter.num_key_value_heads: expected null for eagle3_mla (a key for each of "
            f"{config.num_attention_heads} heads), got {config.num_key_value_heads}"
        )
    if config.mla and config.mla.qk_rope_head_dim % 2:
        raise EyasError(
            f"drafter.mla.qk_rope_head_dim: expected an even size, got "
            f"{config.mla.qk_rope_head_dim}"
        )


def save_config(path: Path, config: DrafterConfig) -> None:
    """Write config.json; what is optional and at its default is left out."""
    usual = {f.name: f.default for f in dataclasses.fields(config) if f.name in _OPTIONAL}
    value = dataclasses.asdict(config)
    write_json(path, {k: v for k, v in value.items() if k not in usual or v != usual[k]})


def load_config(path: Path) -> DrafterConfig:
    """Read config.json; a missing file or a wrong set of keys is an EyasError that names it."""
    value = read_json(path, hint=_REMAKE)
    expected = {field.name for field in dataclasses.fields(DrafterConfig)} - _OPTIONAL
    if not isinstance(value, dict) or set(value) - _OPTIONAL != expected:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise EyasError(f"{path}: expected keys {sorted(expected)}, got {got}", hint=_REMAKE)
    if mla := value.get("mla"):
        yarn = Yarn(**mla["yarn"]) if mla["yarn"] else None
        value = value | {"mla": MlaShape(**mla | {"yarn": yarn})}
    return DrafterConfig(**value | {"aux_layers": tuple(value["aux_layers"])})
