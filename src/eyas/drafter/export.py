"""The folder that a server loads: exact keys, shapes and dtypes, or no folder at all.

Reads: models/drafter. Writes: models/export (config.json, model.safetensors, README.md).
Servers skip unknown keys silently and guess missing layer ids, so everything is refused here.
Source: eyas.drafter.profiles, which says what each server reads.
"""

from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.families import family_of
from eyas.drafter.profiles import (
    NESTED,
    OWN_LAYER,
    profile_named,
    profile_of,
    renamed,
    serving_config,
)
from eyas.errors import EyasError
from eyas.files import read_json, replacing, write_json, write_text

WEIGHTS = "model.safetensors"
_HINT = "train again with `dvc repro -f -s train`"


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the exact keys and shapes of a drafter."""
    c, width = config, config.hidden_size
    attention, normed = family_of(c).shapes(c), range(len(c.aux_layers)) if c.fc_norm else ()
    layer = {
        "hidden_norm": (width,),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        "mlp.gate_proj": (c.intermediate_size, width),
        "mlp.up_proj": (c.intermediate_size, width),
        "mlp.down_proj": (width, c.intermediate_size),
    }
    return {
        "fc.weight": (width, len(c.aux_layers) * c.target_hidden_size),
        **{f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in normed},
        **{f"midlayer.{name}.weight": shape for name, shape in layer.items()},
        "norm.weight": (width,),
        "lm_head.weight": (c.draft_vocab_size, width),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> None:
    """Refuse tensors that a server would misread.

    Raises: EyasError naming the first key, shape, value or map that is wrong.
    """
    expected = expected_shapes(config)
    if wrong := sorted(set(tensors) ^ set(expected)):
        word = "unknown" if wrong[0] in tensors else "missing"
        raise EyasError(f"{where}: {word} tensor '{wrong[0]}'", hint=_HINT)
    for name, shape in expected.items():
        got = tensors[name]
        if tuple(got.shape) != shape:
            raise EyasError(f"{where}: '{name}' expected {shape}, got {tuple(got.shape)}")
        if got.is_floating_point() != (name not in ("d2t", "t2d")):
            raise EyasError(f"{where}: '{name}' has dtype {got.dtype}", hint=_HINT)
        if got.is_floating_point() and not bool(torch.isfinite(got).all()):
            raise EyasError(f"{where}: '{name}' holds NaN or infinity", hint="lower train.lr")
    _check_maps(tensors["d2t"], tensors["t2d"], where)
    if config.aux_layers[0] != 1:
        raise EyasError(
            f"{where}: aux layers {list(config.aux_layers)}: the first must be 1",
            hint="SGLang shifts explicit ids only then (extract.layers)",
        )


def _check_maps(d2t_N: Tensor, t2d_V: Tensor, where: str) -> None:
    if d2t_N.dtype != torch.int64 or t2d_V.dtype != torch.bool:
        raise EyasError(
            f"{where}: d2t must be int64 and t2d bool, got {d2t_N.dtype}, {t2d_V.dtype}"
        )
    used_N = d2t_N + torch.arange(len(d2t_N))
    if not bool((used_N.diff() > 0).all()):
        raise EyasError(f"{where}: d2t does not give ascending ids", hint=_HINT)
    if not torch.equal(used_N, t2d_V.nonzero().flatten()):
        raise EyasError(f"{where}: d2t and t2d name different ids", hint=_HINT)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file.

    Raises: EyasError if it is missing or torn.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise EyasError(f"{path}: not a readable safetensors file ({error})", hint=_HINT) from None


def served_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as servers get them: weights in bfloat16, maps as they are."""
    return {
        name: tensor.to(torch.bfloat16).contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def write_export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: DrafterConfig,
    card: str,
    profile: str = "sglang",
    verifier: str | None = None,
    *,
    told: Mapping[str, str] | None = None,
) -> None:
    """Check, write in bfloat16 as a profile names it, read back and compare bit for bit.

    `told` goes into the metadata of the weights.

    Raises: EyasError if anything is not as servers expect it.
    """
    check_tensors(tensors, config, "drafter")
    described, served = serving_config(config, profile, verifier), served_tensors(tensors)
    metadata = {
        "format": "pt",
        "target": config.target_name,
        "target_revision": config.target_revision,
        **(told or {}),
    }
    with replacing(folder / WEIGHTS) as temporary:
        named = renamed(served, OWN_LAYER, profile_named(profile).layer_key)
        save_file(named, temporary, metadata=metadata)
        _sort_metadata(temporary)
    write_json(folder / "config.json", described)
    write_text(folder / "README.md", card)
    again = read_export(folder, config)
    if changed := [n for n in served if not torch.equal(served[n], again[n])]:
        raise EyasError(f"{folder / WEIGHTS}: '{changed[0]}' changed on its way to the disk")


def _sort_metadata(path: Path) -> None:
    """Put the metadata in order: safetensors writes them in another one each time.

    Source: https://huggingface.co/docs/safetensors (8 bytes of length, then the header in JSON).
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = orjson.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = orjson.dumps(header)
        assert len(text) <= size
        file.seek(8)
        file.write(text.ljust(size))


def read_export(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Return an export's tensors under our names, whatever its profile.

    Raises: EyasError if config.json or the tensors are not those of this drafter.
    """
    described = read_json(folder / "config.json", hint="run `dvc repro export`")
    profile = profile_of(described)
    verifier = described.get(NESTED, {}).get("verifier", {}).get("name_or_path")
    expected = serving_config(config, profile, verifier)
    if wrong := sorted(k for k in described | expected if described.get(k) != expected.get(k)):
        raise EyasError(
            f"{folder}/config.json: {wrong[0]}: expected {expected.get(wrong[0])}, got "
            f"{described.get(wrong[0])} (profile {profile})",
            hint="run `dvc repro -f -s export`",
        )
    tensors = renamed(read_tensors(folder / WEIGHTS), profile_named(profile).layer_key, OWN_LAYER)
    check_tensors(tensors, config, str(folder / WEIGHTS))
    return tensors
