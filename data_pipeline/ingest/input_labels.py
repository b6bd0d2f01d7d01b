"""Unique names for the inputs of an ingest, from which sample keys are made.

A name is the last part of the input's path, preceded by as many parent folders as uniqueness
needs: "train/metadata" and "val/metadata". So names do not change if all inputs move together.
"""

import os
from collections import Counter
from collections.abc import Sequence

from data_pipeline.ingest.byte_sources import in_store


def labels(inputs: Sequence[str], endings: Sequence[str]) -> list[str]:
    """Return a unique name for each input.

    Args:
        inputs: paths or URIs.
        endings: file endings, which a name omits if it stays unique.

    Raises:
        ValueError: an input is given twice.
    """
    seen = set[str]()
    for where in inputs:
        real = where if in_store(where) else os.path.realpath(where)
        if real in seen:
            raise ValueError(f"input {where} is given twice; give it once")
        seen.add(real)
    paths = [where if in_store(where) else os.path.abspath(where) for where in inputs]
    parts = [[part for part in path.split("/") if part] for path in paths]
    found, depth = [""] * len(inputs), 0
    while not all(found):
        depth += 1
        names = [_names(path, depth, endings) for path in parts]
        whole = Counter(name for _, name in names)
        either = Counter(name for pair in names for name in set(pair))
        for number, (short, long) in enumerate(names):
            free = short if either[short] == 1 else long if whole[long] == 1 else ""
            found[number] = found[number] or free
    return found


def _names(parts: Sequence[str], depth: int, endings: Sequence[str]) -> tuple[str, str]:
    """Return the last parts of a path, without and with the ending of a tar or manifest."""
    whole = "/".join(parts[-depth:])
    ending = max((e for e in endings if whole.endswith(e)), key=len, default="")
    return whole.removesuffix(ending), whole
