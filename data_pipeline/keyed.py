"""Stateless randomness: derives 64-bit keys from names, and mixes counters into random bits."""

import hashlib

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keyed(seed: int, purpose: str, *parts: int | str) -> int:
    """Return a 64-bit key for (seed, purpose, parts), the same on every machine."""
    text = "\x1f".join([str(seed), purpose, *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a bijection to 64-bit words (splitmix64's finaliser): uint64 [...] -> [...]."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
