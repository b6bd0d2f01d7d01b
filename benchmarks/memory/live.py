"""Counts the bytes of live tensors on any device, including meta."""

import time

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts every storage returned by an operator for as long as it lives.

    It does not see memory that an operator allocates and frees internally, or a storage that no
    operator returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def now(self) -> int:
        """Return the live bytes."""
        self._seen = {key: one for key, one in self._seen.items() if not one[0].expired()}
        return sum(size for _, size in self._seen.values())

    def settled(self) -> int:
        """Return the live bytes once no more memory is being released.

        A thread of gloo may hold the tensors of a collective for a moment after the waiting rank
        continues.
        """
        size, same = self.now(), 0
        while dist.is_initialized() and dist.get_world_size() > 1 and same < 50:
            time.sleep(2e-3)
            before, size = size, self.now()
            same = same + 1 if size == before else 0
        return size


class PeakBytes(LiveBytes):
    """Live bytes with a peak, updated after every operator.

    Attributes:
        peak: most live bytes after an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.now())
        return result
