"""Imports peers that require more packages than they use."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def import_streaming() -> ModuleType:
    """Import mosaicml-streaming without torchvision.

    The package takes two names from torchvision at import, and this benchmark uses neither. The
    wheel on PyPI is built for CUDA and does not load with a CPU build of torch, so it is not
    installed.
    """
    if "torchvision" not in sys.modules:
        names = ("", ".datasets", ".transforms", ".transforms.functional")
        vision, datasets, transforms, functional = (ModuleType(f"torchvision{n}") for n in names)
        vision.__dict__.update(datasets=datasets, transforms=transforms, __version__="0.0.0")
        datasets.__dict__.update(
            VisionDataset=type("VisionDataset", (), {}), CIFAR10=type("C", (), {})
        )
        transforms.__dict__.update(functional=functional)
        functional.__dict__.update(to_tensor=_absent)
        for module in (vision, datasets, transforms, functional):
            module.__spec__ = ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
    import streaming

    return streaming


def _absent(*_: object) -> None:
    raise RuntimeError("torchvision is not installed")
