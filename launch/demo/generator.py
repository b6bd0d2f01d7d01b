"""Random generators keyed by (seed, purpose, item), for every choice of the demo corpus.

There is no global state, so a sample has the same bytes in whatever order or process it is built.
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
