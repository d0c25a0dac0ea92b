"""Drafter weights and training state on disk: safetensors only, atomic.

Reads, writes: models/drafter/*.safetensors, var/checkpoints/<digest>/*.safetensors.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafter import ranks
from eyas.drafter.model import Drafter
from eyas.drafter.sharding import gathered
from eyas.errors import EyasError
from eyas.files import replacing, sha256_of
from eyas.records import canonical_json

_START = ("config", "feedback", "induction", "inference", "ridge", "vocabulary")
_STEP = (
    *("attention", "families", "head", "layers", "losses", "mla", "model", "packing", "ranks"),
    *("schedule", "sharding", "training", "unroll"),
)


def save_drafter(path: Path, drafter: Drafter) -> None:
    """Write the weights and both vocabulary maps under the names that servers read."""
    save_tensors(path, {k: v.detach().contiguous() for k, v in drafter.state_dict().items()}, {})


def load_drafter(path: Path, drafter: Drafter) -> None:
    """Fill a drafter of the same shape.

    Raises: EyasError unless file and drafter have the same keys, shapes and dtypes.
    """
    tensors, _ = load_tensors(path)
    own = drafter.state_dict()
    got = {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()}
    expected = {k: (tuple(v.shape), v.dtype) for k, v in own.items()}
    if wrong := sorted(k for k in got | expected if got.get(k) != expected.get(k)):
        key = wrong[0]
        raise EyasError(
            f"{path}: '{key}' expected {expected.get(key)}, got {got.get(key)}",
            hint="config.json and weights are of different drafters; re-run train",
        )
    drafter.load_state_dict(tensors)


def save_checkpoint(
    path: Path,
    names: Sequence[str],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    curve: list[dict[str, Any]],
) -> None:
    """Let the leading rank write all that a resumed run needs to end with the very same bits.

    All ranks must call it. `names` are those of the optimizer's parameters; what ranks hold rows of
    is written whole, so that any number of them goes on from it.
    """
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        for kept, tensor in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            whole = gathered(tensor)
            if ranks.leads():
                tensors[f"{kept}/{name}"] = whole.cpu()
    if ranks.leads():
        save_tensors(path, tensors, {"step": str(step), "curve": orjson.dumps(curve).decode()})


def load_checkpoint(
    path: Path, drafter: Drafter, optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    """Fill drafter, optimizer and the random state; return the step and the curve so far."""
    tensors, about = load_tensors(path)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(tensors[f"weight/{name}"])
            of_it = (key for key in tensors if key.endswith(f"/{name}"))
            state = {key.removesuffix(f"/{name}"): tensors[key] for key in of_it}
            state.pop("weight")
            optimizer.state[parameter].update(
                {kept: tensor.to(parameter.device) for kept, tensor in state.items()}
            )
    torch.set_rng_state(tensors["rng"])
    return int(about["step"]), orjson.loads(about["curve"])


def keep_start(
    folder: Path, drafter: Drafter, measure: Callable[[], Tensor], build: Callable[[], None]
) -> Tensor:
    """Fill the drafter with its start, and return the scale of aux states.

    Each is made once in a run, which may be killed: it takes a pass over all states.
    """
    start, scale = (folder / f"{name}.safetensors" for name in ("start", "scale"))
    known = load_tensors(scale)[0] if scale.is_file() else {}
    scale_LD = known["aux_scale_LD"] if known else measure()
    if ranks.leads() and not known:
        save_tensors(scale, {"aux_scale_LD": scale_LD}, {})
    if start.is_file():
        load_drafter(start, drafter)
        return scale_LD
    build()
    if ranks.leads():
        save_drafter(start, drafter)
    return scale_LD


def digest_of(settings: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    """Return 16 hex digits that name a run: settings, input files, and the source of training.

    That of the start too: another draft vocabulary of the same size would fit the weights.
    """
    source = {name: sha256_of(Path(__file__).with_name(f"{name}.py")) for name in _START + _STEP}
    inputs = {name: sha256_of(path) for name, path in files.items()}
    text = canonical_json([dict(settings), inputs, source, torch.__version__])
    return hashlib.sha256(text).hexdigest()[:16]


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write tensors and words, atomically."""
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", **about})


def load_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what `save_tensors` wrote.

    Raises: EyasError if the file is not readable.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise EyasError(
            f"{path}: not a readable safetensors file ({error})", hint="remove it and run again"
        ) from None
