"""MoonViT-3D: the native-resolution image and video encoder of Kimi K2.5, with its projector.

`geometry` (sizes and token counts, integers only), `media` (bytes to pixels) and `preprocess`
(pixels to patches) need no torch; `model` has the network, `weights` its checkpoints. Names are
loaded on first use, so a data process that only counts tokens never imports torch. The package does
not depend on the training code; it needs only the base class in `typed_config`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonvit3d.config import MoonViTConfig
    from moonvit3d.flops import flops
    from moonvit3d.geometry import PatchLimits, VideoChunk, grid, grids, num_tokens, video_chunks
    from moonvit3d.layouts import from_siglip, from_transformers, to_transformers
    from moonvit3d.media import (
        MAX_PIXELS,
        MediaError,
        Probe,
        is_turned,
        probe,
        read_image,
        read_video,
        verify,
    )
    from moonvit3d.memory import activation_bytes
    from moonvit3d.model import MoonViT3D, VisionEncoder, initialise, normalise
    from moonvit3d.preprocess import image_patches, video_patches
    from moonvit3d.weights import load, save

_NAMES = {
    "config": ("MoonViTConfig",),
    "flops": ("flops",),
    "geometry": ("PatchLimits", "VideoChunk", "grid", "grids", "num_tokens", "video_chunks"),
    "layouts": ("from_siglip", "from_transformers", "to_transformers"),
    "media": ("MAX_PIXELS", "MediaError", "Probe", "is_turned", "probe")
    + ("read_image", "read_video", "verify"),
    "memory": ("activation_bytes",),
    "model": ("MoonViT3D", "VisionEncoder", "initialise", "normalise"),
    "preprocess": ("image_patches", "video_patches"),
    "weights": ("load", "save"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "MAX_PIXELS",
    "MediaError",
    "MoonViT3D",
    "MoonViTConfig",
    "PatchLimits",
    "Probe",
    "VideoChunk",
    "VisionEncoder",
    "activation_bytes",
    "flops",
    "from_siglip",
    "from_transformers",
    "grid",
    "grids",
    "image_patches",
    "initialise",
    "is_turned",
    "load",
    "normalise",
    "num_tokens",
    "probe",
    "read_image",
    "read_video",
    "save",
    "to_transformers",
    "verify",
    "video_chunks",
    "video_patches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moonvit3d' has no attribute {name!r}")
    value = getattr(import_module(f"moonvit3d.{_HOME[name]}"), name)
    globals()[name] = value
    return value
