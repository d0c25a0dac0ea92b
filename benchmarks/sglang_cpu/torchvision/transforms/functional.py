"""The interpolation modes again, and a conversion that refuses."""

from typing import Any

from . import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]


def pil_to_tensor(*_arguments: Any) -> None:
    """Refuse: this server has text models only."""
    raise NotImplementedError("torchvision stand-in: no image is converted here")
