"""Random generators keyed by (seed, purpose, item), for all random choices of the demo corpus.

There is no global state, so the bytes of a sample do not depend on the build order or the process.
"""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, item: int | str) -> np.random.Generator:
    """Return a Philox generator keyed by (seed, purpose, item).

    Args:
        seed: the corpus seed.
        purpose: name of the random choice, for example "digits/page".
        item: number or name of the item.
    """
    # A separator that cannot occur in the fields keeps ("a", "b1") and ("ab", "1") apart.
    name = f"{seed}\0{purpose}\0{item}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key))
