"""SHA-256 of what a run remembers, so that two runs can be compared."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh


def hash_tensors(tensors: dict[str, Tensor], mesh: "Mesh") -> dict[str, str]:
    """Return name -> SHA-256 of every tensor of the whole job, on every rank.

    Raises:
        RuntimeError: replicas of one tensor differ, which must never happen.
    """
    mine = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
    hashes: dict[str, str] = {}
    for rank, part in enumerate(mesh.gather(mine)):
        for name, found in part.items():  # type: ignore[union-attr]
            if hashes.setdefault(name, found) != found:
                raise RuntimeError(f"rank {rank} holds another {name} than the ranks before it")
    return dict(sorted(hashes.items()))


def hash_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    found = hashlib.sha256(head)
    found.update(raw.data)
    return found.hexdigest()


def digest(value: Any) -> str:
    """Return the SHA-256 of plain values (dicts, lists, numbers, strings), by their JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
