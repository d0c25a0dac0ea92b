"""Names that transformers imports to read images; here they refuse."""

import enum
from typing import Any


class ImageReadMode(enum.Enum):
    """How an image would be read."""

    RGB = "RGB"


def decode_image(*_arguments: Any) -> None:
    """Refuse: this server has text models only."""
    raise NotImplementedError("torchvision stand-in: no image is read here")
