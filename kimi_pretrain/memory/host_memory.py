"""Offloads saved tensors to host memory by group and prefetches them for the backward pass.

A group holds the tensors that one layer saves in the forward pass of one microbatch. When a storage
is saved, its copy to the host starts. The storage is released two groups later, so that the copies
overlap with the next layer's compute. When the backward pass needs a group, its storages are loaded
and the copy of the next group starts. The prefetch order is the order in which the last step needed
the groups, because a schedule repeats it (in the first step: the previous group). A wrong guess
only delays a copy: needed data are always loaded.

On CUDA there is one stream for each direction, so that neither waits for the other nor for compute;
host memory is pinned. Without CUDA the same happens with plain copies.

Host memory consists of slabs of one size that are filled one after the other; a storage may span
several. A slab returns to the pool with its last storage, so the pool hardly grows after the first
steps.
"""

import weakref
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kimi_pretrain.memory.host_room import host_room

SLAB_BYTES = 64 * 2**20  # a power of two: torch would round pinned memory up to one


@dataclass
class Slab:
    """A block of host memory, which storages fill one after the other.

    Attributes:
        memory: uint8 [size].
        used: number of used bytes, counted from the beginning.
        pieces: number of pieces whose storage is still needed.
        read: event at the end of the last copy from the slab to the device.
    """

    memory: Tensor
    used: int = 0
    pieces: int = 0
    read: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Piece:
    """Host memory for the bytes from `start` to `end` of a storage.

    Attributes:
        memory: view of the slab, uint8 [end - start].
    """

    slab: Slab
    memory: Tensor
    start: int
    end: int

    def of(self, storage: Tensor) -> Tensor:
        """Return a view of these bytes of a storage; the storage itself if the piece covers it."""
        whole = len(self.memory) == len(storage)
        return storage if whole else storage[self.start : self.end]


class Copies:
    """Synchronous copies between device and host: they need no events."""

    def slab(self, size: int) -> Tensor:
        """Return new host memory, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8)

    def out(self, source: Tensor, pieces: list[Piece]) -> torch.cuda.Event | None:
        """Start the copy of a storage's bytes to the host; return the event at its end."""
        for piece in pieces:
            piece.memory.copy_(piece.of(source))
        return None

    def back(
        self, size: int, pieces: list[Piece], written: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy of pieces into new device memory, after the event `written`.

        Returns:
            the bytes, uint8 [size], and the event at the end of the copy.
        """
        target = torch.empty(size, dtype=torch.uint8)
        for piece in pieces:
            piece.of(target).copy_(piece.memory)
        return target, None

    def wait(self, event: torch.cuda.Event | None, *used: Tensor) -> None:
        """Make work issued from now on wait for an event; this work uses the given tensors."""


class StreamCopies(Copies):
    """Copies on two streams of a CUDA device, concurrent with its compute.

    Untested on a GPU, because none was available.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def slab(self, size: int) -> Tensor:
        """Return new pinned memory, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def out(self, source: Tensor, pieces: list[Piece]) -> torch.cuda.Event:
        """See `Copies.out`. The caller holds the source until work waits for the event."""
        self._outward.wait_event(_recorded(torch.cuda.current_stream(self._device)))
        with torch.cuda.stream(self._outward):
            for piece in pieces:
                if piece.slab.read is not None:  # a copy of the slab's old data may still run
                    self._outward.wait_event(piece.slab.read)
                piece.memory.copy_(piece.of(source), non_blocking=True)
        return _recorded(self._outward)

    def back(
        self, size: int, pieces: list[Piece], written: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event]:
        """See `Copies.back`. Allocates on the copying stream, so that no earlier use is pending."""
        assert written is not None
        self._inward.wait_event(written)
        with torch.cuda.stream(self._inward):
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
            for piece in pieces:
                piece.of(target).copy_(piece.memory, non_blocking=True)
        done = _recorded(self._inward)
        for piece in pieces:
            piece.slab.read = done
        return target, done

    def wait(self, event: torch.cuda.Event | None, *used: Tensor) -> None:
        """See `Copies.wait`: the current stream waits, the host does not."""
        current = torch.cuda.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
        for tensor in used:
            tensor.record_stream(current)


class Pool:
    """Pool of slabs of host memory.

    Args:
        copies: allocates their memory.
        slab_bytes: size of each slab.
    """

    def __init__(self, copies: Copies, slab_bytes: int):
        self._copies, self._slab_bytes = copies, slab_bytes
        self._free: deque[Slab] = deque()
        self._open: Slab | None = None
        self._returned: deque[list[Piece]] = deque()  # given back, not yet processed
        self.slabs = 0

    def take(self, size: int) -> list[Piece]:
        """Return host memory for a storage of `size` bytes.

        Raises:
            ValueError: the host does not have enough memory left.
        """
        while self._returned:
            self._take_back(self._returned.popleft())
        pieces: list[Piece] = []
        start = 0
        try:
            while start < size:
                slab = self._slab_with_room()
                length = min(size - start, self._slab_bytes - slab.used)
                memory = slab.memory[slab.used : slab.used + length]
                pieces.append(Piece(slab, memory, start, start + length))
                slab.used += length
                slab.pieces += 1
                start += length
        except BaseException:  # a partial allocation is of no use
            self.give_back(pieces)
            raise
        return pieces

    def give_back(self, pieces: list[Piece]) -> None:
        """Return pieces from `take` that are no longer needed; the next `take` may reuse them.

        The garbage collector may call this at any point of any method, so it only appends.
        """
        self._returned.append(pieces)

    def _take_back(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            piece.slab.pieces -= 1
            self._free_if_empty(piece.slab)

    def _slab_with_room(self) -> Slab:
        if self._open is not None and self._open.used < self._slab_bytes:
            return self._open
        full, self._open = self._open, self._free.popleft() if self._free else self._new()
        if full is not None:
            self._free_if_empty(full)
        return self._open

    def _free_if_empty(self, slab: Slab) -> None:
        if slab.pieces == 0:
            slab.used = 0
            if slab is not self._open:
                self._free.append(slab)

    def _new(self) -> Slab:
        left = host_room()
        if left.size < 2 * self._slab_bytes:
            held = self.slabs * self._slab_bytes
            raise ValueError(
                f"train.offload=true: this process keeps {held / 2**30:.1f} GiB of activations in "
                f"host memory and needs more, of which {left.size / 2**30:.1f} GiB are left "
                f"({left.bound}); set train.offload=false, or have fewer tokens in flight"
            )
        self.slabs += 1
        return Slab(self._copies.slab(self._slab_bytes))


class Copy:
    """A storage in host memory, shared by all its saved views and loaded once for all of them."""

    def __init__(self, tensor: Tensor, group: "Group", copies: Copies, pool: Pool):
        storage = tensor.untyped_storage()
        self.nbytes, self.group, self.version = storage.nbytes(), group, tensor._version
        self._copies, self._pool = copies, pool
        self._pieces: list[Piece] = []  # for __del__, if `take` raises
        self._pieces = pool.take(self.nbytes)
        # Held during the copy, because released memory may be overwritten.
        self._original: Tensor | None = tensor.detach()
        self._back: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._written = copies.out(_bytes_of(storage), self._pieces)

    def __del__(self):
        self._pool.give_back(self._pieces)

    def let_go(self) -> None:
        """Release the storage on the device after its copy.

        Raises:
            RuntimeError: it was modified since it was saved.
        """
        if self._original is not None:
            self._check()
            # Record the current stream as a user of the storage. The storage may belong to another
            # stream (that of an exchange), which could reuse the memory during the copy.
            self._copies.wait(self._written, self._original)
            self._original = None

    def load(self) -> None:
        """Start to load the storage, unless it is on the device."""
        if self._original is None and self._back is None:
            self._back = self._copies.back(self.nbytes, self._pieces, self._written)

    def give(self) -> torch.UntypedStorage:
        """Return the storage on the device, for work that is issued from now on."""
        self.group.needed()
        if self._original is not None:
            self._check()
            return self._original.untyped_storage()
        self.load()
        assert self._back is not None
        target, done = self._back
        self._copies.wait(done, target)
        return target.untyped_storage()

    @property
    def bytes_on_device(self) -> int:
        """Bytes on the device: not 0 before the storage is released and after it is loaded."""
        return self.nbytes if self._original is not None or self._back is not None else 0

    def _check(self) -> None:
        assert self._original is not None
        if self._original._version != self.version:
            raise RuntimeError(
                f"a tensor of {self.nbytes} bytes that the backward pass needs was written to "
                f"after it was saved: version {self._original._version}, expected {self.version}"
            )


class FromHost:
    """One saved view of a storage in host memory."""

    __slots__ = ("copy", "dtype", "place")

    def __init__(self, copy: Copy, tensor: Tensor):
        self.copy, self.dtype = copy, tensor.dtype
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def give(self) -> Tensor:
        """Return the view."""
        storage = self.copy.give()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.place)


@dataclass(eq=False)
class Group:
    """The tensors that one layer saves in the forward pass of one microbatch."""

    number: int
    home: "HostMemory"
    copies: list[weakref.ref[Copy]] = field(default_factory=list)
    expected: bool = False  # needed next, so storages still on the device stay there
    was_needed: bool = False

    def alive(self) -> list[Copy]:
        """Return the copies that the backward pass has not consumed yet."""
        return [copy for ref in self.copies if (copy := ref()) is not None]

    def needed(self) -> None:
        """Start to load this group and the next one; only the first call has an effect."""
        if not self.was_needed:
            self.was_needed = True
            self.home.load_from(self)


class HostMemory:
    """Moves saved tensors of a device to host memory and back.

    Args:
        device: of the tensors; "cpu" copies from host memory to host memory.
        least_bytes: smaller storages stay on the device.
        slab_bytes: see `Pool`.

    Attributes:
        late: number of groups in this step whose loads started only when they were needed.
    """

    def __init__(self, device: torch.device, least_bytes: int, slab_bytes: int = SLAB_BYTES):
        self._device, self._least = device, least_bytes
        self._copies = StreamCopies(device) if device.type == "cuda" else Copies()
        self.pool = Pool(self._copies, slab_bytes)
        self._groups: list[Group] = []
        self._order: list[int] = []  # groups of this step in the order of their use
        self._next: dict[int, int] = {}  # in the last step: group -> group needed after it
        # In the last step: the last group opened before the first use, and the group used first.
        self._first: tuple[int, int] | None = None
        self._opened_before = 0
        self._all: weakref.WeakSet[Copy] = weakref.WeakSet()
        self.late = 0

    def begin_step(self) -> None:
        """Restart group numbers at 0; the order of the last step becomes the prefetch order."""
        if self._order:
            self._next = dict(pairwise(self._order))
            self._first = self._opened_before, self._order[0]
        self._groups, self._order, self.late = [], [], 0

    def open_group(self) -> None:
        """Begin a new group for the tensors that the next layer saves.

        Raises:
            RuntimeError: a tensor was modified since it was saved.
        """
        if len(self._groups) >= 2 and not self._groups[-2].expected:
            for copy in self._groups[-2].alive():
                copy.let_go()
        self._groups.append(Group(len(self._groups), self))
        if self._first is not None and self._first[0] == len(self._groups) - 1:
            self._load(self._first[1])

    def keep(self, tensor: Tensor) -> FromHost | None:
        """Return the replacement for a saved tensor; None if it stays on the device."""
        storage = tensor.untyped_storage()
        if (
            not self._groups
            or not tensor.is_floating_point()
            or tensor.device != self._device
            or storage.nbytes() < self._least
        ):
            return None
        # A weak reference, so that the copy dies with the last saved view.
        ref = getattr(storage, "copy_on_host", None)
        copy = ref() if ref is not None else None
        if copy is None or copy.version != tensor._version:
            group = self._groups[-1]
            copy = Copy(tensor, group, self._copies, self.pool)
            ref = storage.copy_on_host = weakref.ref(copy)  # type: ignore[attr-defined]
            group.copies.append(ref)
            self._all.add(copy)
        return FromHost(copy, tensor)

    def load_from(self, group: Group) -> None:
        """Start to load a group that is needed now, and the group expected next."""
        if not self._order:
            self._opened_before = len(self._groups) - 1
        self._order.append(group.number)
        waiting = [copy for copy in group.alive() if not copy.bytes_on_device]
        self.late += bool(waiting)
        for copy in waiting:
            copy.load()
        self._load(self._next.get(group.number, group.number - 1))

    def _load(self, number: int) -> None:
        if 0 <= number < len(self._groups):
            self._groups[number].expected = True
            for copy in self._groups[number].alive():
                copy.load()

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes held: "host" in host memory, "moving" on the device at the same time."""
        copies = list(self._all)
        found = {
            "host": sum(copy.nbytes for copy in copies),
            "moving": sum(copy.bytes_on_device for copy in copies),
        }
        return {kind: size for kind, size in found.items() if size}


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event recorded after all work issued to the stream so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore
