"""Random numbers that depend on a name and on nothing else.

Every choice of the demo corpus (which scan, where, how large) is drawn from a generator keyed by
(seed, purpose, item). No global state is touched, so a sample stays the same bytes whatever was
built before it, in whatever order or process.
"""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, item: int | str) -> np.random.Generator:
    """Return a Philox generator keyed by (seed, purpose, item).

    Args:
        seed: the corpus seed.
        purpose: what is drawn, for example "digits/page".
        item: number or name of the thing drawn for.

    """
    # A separator that cannot occur in the fields keeps ("a", "b1") and ("ab", "1") apart.
    name = f"{seed}\0{purpose}\0{item}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key))
