"""The drafter before its first step, as train.start says.

Reads, writes: var/checkpoints/<digest>/{start,scale,equations}.safetensors: a start takes a pass
over all states, so a run that goes on takes it from there.

Legend: V target vocabulary, D hidden size, L aux layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eyas.drafter import ranks
from eyas.drafter.checkpoint import load_drafter, load_tensors, save_drafter, save_tensors
from eyas.drafter.feedback import refine
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Documents, aux_scale
from eyas.drafter.ridge import ridge_start, sum_equations
from eyas.errors import EyasError
from eyas.settings import Train


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a start is made of: documents, and what stands around the target's layers."""

    documents: Documents
    windows: Sequence[int]  # of the documents, as in `plan_epoch`
    embed_VD: Tensor
    norm_weight_D: Tensor
    norm_eps: float
    lm_head_VD: Tensor


def prepare_start(drafter: Drafter, material: Material, settings: Train, folder: Path) -> Tensor:
    """Fill the drafter with its start, and return the scale of aux states, [L, D]."""
    start, scale = (folder / f"{name}.safetensors" for name in ("start", "scale"))
    known = load_tensors(scale)[0] if scale.is_file() else {}
    scale_LD = known["aux_scale_LD"] if known else aux_scale(material.documents)
    if ranks.leads() and not known:
        save_tensors(scale, {"aux_scale_LD": scale_LD}, {})
    if start.is_file():
        load_drafter(start, drafter)
        return scale_LD
    build_start(drafter, material, settings, folder / "equations.safetensors")
    if ranks.leads():
        save_drafter(start, drafter)
    return scale_LD


def build_start(drafter: Drafter, material: Material, settings: Train, sums: Path) -> None:
    """Fill the drafter; the sums of the regression are kept at `sums` from window to window.

    Raises: EyasError if train.start is unknown.
    """
    if settings.start == "random":
        random_start(drafter, settings.seed)
        return
    if settings.start != "ridge":
        raise EyasError(f"train.start: expected ridge | random, got '{settings.start}'")
    documents, embed_VD, norm_weight_D = (
        material.documents,
        material.embed_VD,
        material.norm_weight_D,
    )
    equations = sum_equations(
        *(documents, embed_VD, norm_weight_D, material.norm_eps),
        windows=material.windows,
        path=sums,
    )
    ridge_start(
        drafter,
        equations,
        strength=settings.ridge_strength,
        norm_scale=settings.norm_scale,
        norm_weight_D=norm_weight_D,
        head_ND=material.lm_head_VD[drafter.t2d],
        seed=settings.seed,
    )
    refine(drafter, documents, embed_VD, norm_weight_D, settings)
