"""The few names of torchvision that a text model's server imports; no image is ever touched.

The index has no build of torchvision that fits the CPU build of torch.
"""

__version__ = "0.28.0"
