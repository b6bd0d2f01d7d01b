"""Reads replicated tensors from storage once and broadcasts them.

Every rank of a job holds a copy of the vision encoder, and every rank of a stage a copy of
attention and shared experts. If thousands of ranks opened the same hundreds of files, a file system
or an object store would be busy for minutes. Instead, one of its holders reads each such tensor and
broadcasts it over the network of the gradients.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from kimi_pretrain.parallel.errors import Outcome

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh

_THREADS = 4
T = TypeVar("T")


def tensors_to_read(
    names: Iterable[str], copies: Mapping[str, str], mesh: "Mesh | None"
) -> list[str]:
    """Return the tensors that this rank reads, sorted.

    Args:
        names: names of the tensors that this rank holds.
        copies: name -> group of ranks ("dense", "expert", "encoder") that hold identical copies;
            the same on all ranks of the group. Each holder reads all other tensors.
        mesh: mesh of the job; None for a single process, which reads everything.
    """
    held = sorted(names)
    if mesh is None:
        return held
    mine = [name for name in held if name not in copies]
    for group, shared in _by_group(held, copies).items():
        index, size = mesh.index_in(group)
        mine += shared[index::size]
    return sorted(mine)


def read_and_broadcast(
    tensors: Mapping[str, Tensor],
    copies: Mapping[str, str],
    mesh: "Mesh | None",
    read: Callable[[str], object],
    order: Callable[[str], Any],
) -> None:
    """Fill tensors in place; a collective call.

    Args:
        tensors: the tensors that this rank holds, by name.
        copies, mesh: see `tensors_to_read`.
        read: fills the tensor of a name; called from several threads.
        order: sort key of names, so that neighbours in a file are read one after the other.

    Raises:
        CheckpointError, StoreError: a rank could not read a tensor; all ranks raise the same error.
    """
    mine = sorted(tensors_to_read(tensors, copies, mesh), key=order)

    def fill() -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(read, mine):
                pass

    on_all_ranks(fill, mesh)
    if mesh is not None:
        for group, names in sorted(_by_group(sorted(tensors), copies).items()):
            mesh.broadcast_copies(group, [tensors[name] for name in names])


def on_all_ranks(work: Callable[[], T], mesh: "Mesh | None") -> list[T]:
    """Run `work` on every rank and return the (small) results of all ranks; a collective call.

    An error on any rank is raised on all ranks, because they would otherwise wait for it.

    Raises:
        Exception: the error of the first rank that failed.
    """
    if mesh is None:
        return [work()]
    mine = Outcome.of(work)
    everyone: list[Any] = mesh.all_gather_object(mine.sendable())
    everyone[mesh.rank] = mine
    return [outcome.result() for outcome in everyone]


def broadcast_from_rank0(make: Callable[[], T], mesh: "Mesh | None") -> T:
    """Call `make` on rank 0 and return its result on every rank; all ranks raise its error."""
    return make() if mesh is None else mesh.broadcast_from_rank0(make)


def _by_group(names: Iterable[str], copies: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        if name in copies:
            groups.setdefault(copies[name], []).append(name)
    return groups
