"""Counts the bytes that tensors hold, as they are made and freed, on any device: meta, too."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside it, every storage that an operator returns counts for as long as it lives.

    What an operator takes and gives back within itself is not seen; what only exists outside of
    operators (a storage that none returned) is not either.
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
        """Return the bytes that live."""
        self._seen = {key: one for key, one in self._seen.items() if not one[0].expired()}
        return sum(size for _, size in self._seen.values())


class PeakBytes(LiveBytes):
    """Looks after every operator.

    Attributes:
        peak: most bytes that lived after one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.now())
        return result
