"""Shards a save: assigns each tensor to a rank that writes it, and to a file.

These are pure functions of names and sizes, so all ranks compute the same plan. A rank that is the
only holder of a tensor (usually optimizer state) writes it. The holder with the fewest bytes so far
writes a replicated tensor, the largest tensor first (`parallel.balance`). Tensors with few holders
are assigned first, because tensors with many holders can still even out the loads.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence

from kimi_pretrain.parallel.balance import least_loaded_of
from moonvit3d.safetensors_io import split_by_size

Sizes = Mapping[str, int]  # tensor -> bytes


def assign_writers(everyone: Sequence[Sizes]) -> dict[str, int]:
    """Return tensor -> rank that writes it.

    Args:
        everyone: sizes of the tensors that each rank holds, by rank.

    Raises:
        ValueError: a tensor has different sizes on two ranks.
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, held in enumerate(everyone):
        for name, size in held.items():
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"{name!r} has {size} bytes on rank {rank} and {sizes[name]} on rank "
                    f"{holders[name][0]}: one name must mean the same tensor everywhere"
                )
            holders.setdefault(name, []).append(rank)
    names = sorted(holders, key=lambda name: (len(holders[name]), -sizes[name], name))
    writers = least_loaded_of(((sizes[n], holders[n]) for n in names), [0] * len(everyone))
    return dict(zip(names, writers, strict=True))


def split_into_files(sizes: Sizes, limit: int) -> list[list[str]]:
    """Divide one rank's tensors among files in name order, so that neighbours share a file."""
    return split_by_size(dict(sorted(sizes.items())), limit)


def file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}_{number:03d}.safetensors"


def weight_map(everyone: Sequence[Sizes], limit: int) -> dict[str, str]:
    """Return tensor -> file for the whole job, sorted by tensor.

    A file has at most `limit` bytes, unless it holds one larger tensor.
    """
    mine: list[dict[str, int]] = [{} for _ in everyone]
    for name, writer in assign_writers(everyone).items():
        mine[writer][name] = everyone[writer][name]
    found = {
        name: file_name(rank, number)
        for rank, sizes in enumerate(mine)
        for number, names in enumerate(split_into_files(sizes, limit))
        for name in names
    }
    return dict(sorted(found.items()))


def files_of_rank(weights: Mapping[str, str], rank: int) -> dict[str, list[str]]:
    """Return file -> its tensors, for the files that one rank writes."""
    prefix = file_name(rank, 0).rpartition("_")[0] + "_"
    files: dict[str, list[str]] = {}
    for name, file in weights.items():
        if file.startswith(prefix):
            files.setdefault(file, []).append(name)
    return files


def index_text(weights: Mapping[str, str], total: int) -> str:
    """Return the text of index.json in Hugging Face's format, for `total` bytes of tensors."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(weights)}) + "\n"


def compressed(sizes: Sizes) -> bytes:
    """Return sizes in compressed form; names are repetitive, and every rank receives all sizes."""
    return zlib.compress(json.dumps(dict(sizes)).encode())


def decompressed(everyone: Iterable[bytes]) -> list[dict[str, int]]:
    """Return the sizes of all ranks from their `compressed` forms."""
    return [json.loads(zlib.decompress(part)) for part in everyone]
