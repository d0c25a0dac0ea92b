"""Four bits a value: the largest values apart, the rest rotated in groups of 64 and rounded.

A vector keeps its D // 128 largest values in bf16 with their places, since a few channels hold half
of a residual stream's energy. The rest, with zeros in those places, is cut into groups of 64; each
is multiplied by the orthonormal Hadamard matrix, which makes its values near-Gaussian, and rounded
to 16 levels (-7.5 .. 7.5) * step without a zero. The step is 0.93 of what would clip nothing.

Tried on 3,686 tokens of SmolLM2-135M (30 November 2026, 2-core CPU): mean relative error of layers
1, 14, 26 in %, and bytes a vector at D = 576, where a quarter of bf16 leaves 325:

    group  rotated  outliers  levels                 error            bytes
       64  yes      4         16, symmetric (kept)   5.8  6.3  6.3    322
       64  yes      4         16, step searched      5.7  6.2  6.2    322
       64  yes      4         Gaussian codebook      5.8  6.3  6.2    322
       64  yes      4         lowest value and step  5.5  5.9  5.9    340
      128  yes      6         16, step refitted      5.9  6.5  6.5    354 (padded)
       32  yes      0         16, step refitted      6.7  7.1  7.1    324
       64  yes      0         16, step refitted      7.7  7.9  7.9    306
       64  no       4         16, step refitted      9.6  9.3  7.2    322
       32  no       0         lowest value and step  11.1 10.8 10.2   360
       64  no       0         -7 .. 7                21.0 21.4 22.2   306
       64  yes      0         e2m1 (fp4)             10.7 10.5 10.4   306

Random signs before the rotation changed nothing; outliers in fp8 cost a point in layers 14 and 26.
Source: rotation before rounding, QuaRot, arXiv 2404.00456; the rest measured here.

Legend: D hidden size, G groups of a vector, K outliers of a vector.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F

GROUP = 64
_HALF = GROUP // 2
_CHANNELS_PER_OUTLIER = 128
_TOP = 7.5  # levels are -7.5, -6.5 .. 7.5 steps
_CLIP = 0.93
_TINY = torch.finfo(torch.float32).tiny


def encode(states: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return codes [..., G, 32] (two to a byte), steps [..., G], outliers and places [..., K]."""
    wide = states.float()
    places = wide.abs().topk(num_outliers(wide.shape[-1]), dim=-1).indices
    rest = F.pad(wide.scatter(-1, places, 0.0), (0, -wide.shape[-1] % GROUP))
    groups = rest.unflatten(-1, (-1, GROUP)) @ _hadamard()
    steps = (groups.abs().amax(-1) * (_CLIP / _TOP)).to(torch.bfloat16)
    scaled = groups / steps.float().clamp(min=_TINY).unsqueeze(-1)
    codes = scaled.floor_().clamp_(-8, 7).add_(8).to(torch.uint8)
    low, high = codes.unflatten(-1, (2, _HALF)).unbind(-2)
    return {
        "codes": low | high << 4,
        "steps": steps,
        "outliers": wide.gather(-1, places).to(torch.bfloat16),
        "places": places.to(torch.int16),
    }


def decode(parts: Mapping[str, torch.Tensor], width: int) -> torch.Tensor:
    """Return the vectors, float32 [..., D]; `width` is D, which the last group may overlap."""
    codes = parts["codes"]
    levels = torch.stack((codes & 15, codes >> 4), dim=-2).flatten(-2).float().sub_(_TOP)
    groups = levels.mul_(parts["steps"].float().unsqueeze(-1)) @ _hadamard()
    states = groups.flatten(-2)[..., :width]
    return states.scatter_(-1, parts["places"].long(), parts["outliers"].float())


def num_outliers(width: int) -> int:
    """Return K of vectors of this size; their places are 16-bit numbers."""
    assert width <= 1 << 15, width
    return max(1, width // _CHANNELS_PER_OUTLIER)


@functools.cache
def _hadamard() -> torch.Tensor:
    """Return the orthonormal, symmetric Hadamard matrix of size 64: its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / GROUP**0.5
