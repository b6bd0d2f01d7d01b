"""Which versions wrote a checkpoint."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("kimi-pretrain", "torch", "megatron-core", "numpy")


def versions() -> dict[str, str | None]:
    """Return the versions that a manifest names."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
