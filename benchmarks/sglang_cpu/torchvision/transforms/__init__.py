"""Interpolation modes, which image processors use as keys of a table when they are imported."""

import enum


class InterpolationMode(enum.Enum):
    """Ways to resize an image that is never seen."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
