"""MoonViT-3D: the native-resolution image and video encoder of Kimi K2.5, with its projector.

``geometry`` (sizes and token counts, integers only) and ``preprocess`` (pixels to patches) need no
torch; ``model`` holds the network. Names are loaded on first use, so a data process that only
counts tokens never imports torch. The package knows nothing of training and works alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonvit3d.config import MoonViTConfig
    from moonvit3d.flops import flops
    from moonvit3d.geometry import PatchLimits, VideoChunk, grid, grids, num_tokens, video_chunks
    from moonvit3d.model import MoonViT3D, VisionEncoder, initialise, normalise
    from moonvit3d.preprocess import image_patches, video_patches

_HOME = {
    "MoonViTConfig": "config",
    "flops": "flops",
    "PatchLimits": "geometry",
    "VideoChunk": "geometry",
    "grid": "geometry",
    "grids": "geometry",
    "num_tokens": "geometry",
    "video_chunks": "geometry",
    "MoonViT3D": "model",
    "VisionEncoder": "model",
    "initialise": "model",
    "normalise": "model",
    "image_patches": "preprocess",
    "video_patches": "preprocess",
}

__all__ = [
    "MoonViT3D",
    "MoonViTConfig",
    "PatchLimits",
    "VideoChunk",
    "VisionEncoder",
    "flops",
    "grid",
    "grids",
    "image_patches",
    "initialise",
    "normalise",
    "num_tokens",
    "video_chunks",
    "video_patches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moonvit3d' has no attribute {name!r}")
    value = getattr(import_module(f"moonvit3d.{_HOME[name]}"), name)
    globals()[name] = value
    return value
