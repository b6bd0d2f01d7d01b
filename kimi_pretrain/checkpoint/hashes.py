"""SHA-256 of a run's state, to compare two runs.

Every rank hashes its tensors. Most of thousands of ranks hold copies, and all their hashes together
would fill a device, so the ranks first exchange one digest each. The first rank with each digest
then sends its hashes to rank 0, in pieces of bounded size.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.manifest import digest

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh


# Maximum bytes that all ranks send in one round; each rank may always send PIECE.
TOGETHER = 32 << 20
PIECE = 1 << 10


def hash_tensors(tensors: Mapping[str, Tensor], mesh: "Mesh") -> dict[str, str]:
    """Return name -> SHA-256 of every tensor of the job on rank 0; a collective call.

    Returns:
        the hashes sorted by name on rank 0, an empty dict on the other ranks.

    Raises:
        RuntimeError: replicas of a tensor differ, which must never happen; raised on all ranks.
    """
    mine = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
    everyone: list[Any] = mesh.all_gather_object(digest(mine))
    senders = _senders(everyone)
    sent = zlib.compress(json.dumps(mine).encode()) if mesh.rank in senders else b""
    parts = _to_first(sent, mesh)
    found: dict[str, str] = {}

    def merge() -> None:
        found.update(_merged((rank, json.loads(zlib.decompress(parts[rank]))) for rank in senders))

    mesh.broadcast_from_rank0(merge)
    return found


def _senders(everyone: Sequence[str]) -> list[int]:
    """Return the first rank with each digest; together, these ranks have all hashes.

    A copy that differs has another digest, so both versions are sent.
    """
    first: dict[str, int] = {}
    for rank, said in enumerate(everyone):
        first.setdefault(said, rank)
    return sorted(first.values())


def _to_first(mine: bytes, mesh: "Mesh") -> list[bytes]:
    """Return the bytes of all ranks on rank 0, sent in pieces that fit on an almost full device."""
    piece = max(PIECE, TOGETHER // mesh.world_size)
    lengths: list[Any] = mesh.all_gather_object(len(mine))
    parts: list[list[bytes]] = [[] for _ in lengths]
    for at in range(0, max(lengths), piece):
        pieces: list[Any] = mesh.all_gather_object(mine[at : at + piece])
        if mesh.rank == 0:
            for part, got in zip(parts, pieces, strict=True):
                part.append(got)
    return [b"".join(part) for part in parts]


def _merged(parts: Iterable[tuple[int, Mapping[str, str]]]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for rank, part in parts:
        for name, found in part.items():
            if hashes.setdefault(name, found) != found:
                raise RuntimeError(f"rank {rank} holds another {name} than the ranks before it")
    return dict(sorted(hashes.items()))


def hash_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    found = hashlib.sha256(head)
    found.update(raw.data)
    return found.hexdigest()
