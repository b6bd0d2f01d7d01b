"""The order in which a person goes through a model's tensors: as data flows. Pure."""

import re
from collections.abc import Iterable

# The first pattern that is found in a name places it; numbers in a name count as numbers.
_PLACES = (
    r"vision_tower\.patch_embed", r"vision_tower\.", r"mm_projector\.", r"embed_tokens",
    r"model\.layers\.", r"model\.norm", r"lm_head",
)  # fmt: skip
_OPTIMIZER = re.compile(r"optim\.(\w+)\.(.+)")


def in_model_order(names: Iterable[str]) -> list[str]:
    """Return names of a checkpoint from the pictures' end of the model to the loss's.

    What the optimizer keeps of a tensor ("optim.momentum.NAME") comes after all weights, in the
    same order; its count of steps comes last.
    """
    return sorted(names, key=_key)


def _key(name: str) -> tuple[bool, int, list[tuple[bool, int, str]], str]:
    kept = _OPTIMIZER.fullmatch(name)
    tensor = kept[2] if kept else name
    place = next((at for at, one in enumerate(_PLACES) if re.search(one, tensor)), len(_PLACES))
    parts = [
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in tensor.split(".")
    ]
    return name.startswith("optim."), place, parts, name
