"""Shards the saving of a checkpoint: which rank writes which tensor, and into which file.

Pure functions of names and sizes, so that all ranks come to the same plan by themselves. A tensor
that one rank alone holds (optimizer state, as a rule) is written by that rank. A replicated one is
written by the holder with the fewest bytes so far, the largest tensor first (`parallel.balance`);
tensors with few holders come first, because those with many can still even out the loads.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence

from kimi_pretrain.parallel.balance import least_loaded_of
from moonvit3d.safetensors_io import split_by_size

Sizes = Mapping[str, int]  # tensor -> bytes


def assign_writers(everyone: Sequence[Sizes]) -> dict[str, int]:
    """Return tensor -> the rank that writes it, from what each rank holds.

    Raises:
        ValueError: ranks hold tensors of one name and of different sizes.
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
    """Divide one rank's tensors among files; by name, so that neighbours are read together."""
    return split_by_size(dict(sorted(sizes.items())), limit)


def file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}_{number:03d}.safetensors"


def weight_map(everyone: Sequence[Sizes], limit: int) -> dict[str, str]:
    """Return tensor -> file of at most `limit` bytes, of the whole job, sorted by tensor."""
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
    """Return file -> its tensors, of the files that one rank writes."""
    prefix = file_name(rank, 0).rpartition("_")[0] + "_"
    files: dict[str, list[str]] = {}
    for name, file in weights.items():
        if file.startswith(prefix):
            files.setdefault(file, []).append(name)
    return files


def index_text(weights: Mapping[str, str], total: int) -> str:
    """Return the text of index.json, as Hugging Face writes it; `total` bytes of tensors."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(weights)}) + "\n"


def compressed(sizes: Sizes) -> bytes:
    """Return sizes in few bytes: names repeat themselves, and every rank receives those of all."""
    return zlib.compress(json.dumps(dict(sizes)).encode())


def decompressed(everyone: Iterable[bytes]) -> list[dict[str, int]]:
    """Return what `compressed` was given, of all ranks."""
    return [json.loads(zlib.decompress(part)) for part in everyone]
