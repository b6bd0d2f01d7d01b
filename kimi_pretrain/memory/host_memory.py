"""Saved tensors in host memory, group by group, brought back one group ahead of the backward pass.

A group is what one layer saves in the forward pass of one microbatch. When a storage is saved, its
copy to the host starts; the storage itself is let go two groups later, so that copies run beside
the next layer's work. When a group is needed, its own storages come back, and the copy of the group
after it starts: in the order in which the last step needed them, which a schedule repeats (in the
first step: the group before). Whatever the order, what is needed is brought; only the time at which
its copy starts is a guess.

On CUDA there is one stream for each direction, so that neither waits for the other nor for work;
the host's memory is pinned. Without CUDA the same happens with plain copies.

Host memory is slabs of one size, used one after the other; a storage may lie in several. They go
back into the pool with the last storage in them, so the pool hardly grows after the first steps.
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
        used: bytes that are taken, from the beginning.
        pieces: parts of them whose storage is still needed.
        read: when the last copy from it to the device is done.
    """

    memory: Tensor
    used: int = 0
    pieces: int = 0
    read: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Piece:
    """Room for some bytes of a storage, from `start` to `end`.

    Attributes:
        memory: of the slab, uint8 [end - start].
    """

    slab: Slab
    memory: Tensor
    start: int
    end: int

    def of(self, storage: Tensor) -> Tensor:
        """Return these bytes of a storage, a view: itself where the room is for all of it."""
        whole = len(self.memory) == len(storage)
        return storage if whole else storage[self.start : self.end]


class Copies:
    """Copies between device and host that are done when the call returns: there are no events."""

    def slab(self, size: int) -> Tensor:
        """Return new host memory, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8)

    def out(self, source: Tensor, pieces: list[Piece]) -> torch.cuda.Event | None:
        """Start the copy of a storage's bytes to the host; return the event of its end."""
        for piece in pieces:
            piece.memory.copy_(piece.of(source))
        return None

    def back(
        self, size: int, pieces: list[Piece], written: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy of pieces into new bytes on the device, once `written` has come.

        Returns:
            the bytes, uint8 [size], and the event of the copy's end.
        """
        target = torch.empty(size, dtype=torch.uint8)
        for piece in pieces:
            piece.of(target).copy_(piece.memory)
        return target, None

    def wait(self, event: torch.cuda.Event | None, *used: Tensor) -> None:
        """Let all work that is issued from now on wait for an event; it will use these tensors."""


class StreamCopies(Copies):
    """Copies on two streams of a CUDA device, beside its work.

    Not run by us: there was no CUDA device.
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
                if piece.slab.read is not None:  # what lay there before may still be on its way
                    self._outward.wait_event(piece.slab.read)
                piece.memory.copy_(piece.of(source), non_blocking=True)
        return _recorded(self._outward)

    def back(
        self, size: int, pieces: list[Piece], written: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event]:
        """See `Copies.back`. Memory is taken on the copying stream: there it has no older use."""
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
    """Slabs of host memory: some in use, the rest free.

    Args:
        copies: makes their memory.
        slab_bytes: the size of each.
    """

    def __init__(self, copies: Copies, slab_bytes: int):
        self._copies, self._slab_bytes = copies, slab_bytes
        self._free: deque[Slab] = deque()
        self._open: Slab | None = None
        self._returned: deque[list[Piece]] = deque()  # not yet taken back
        self.slabs = 0

    def take(self, size: int) -> list[Piece]:
        """Return room for a storage of so many bytes.

        Raises:
            ValueError: the host has not so much memory left.
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
        except BaseException:  # a storage that is only in part there is of no use
            self.give_back(pieces)
            raise
        return pieces

    def give_back(self, pieces: list[Piece]) -> None:
        """Say that what `take` gave is needed no more; the next `take` may use it.

        The garbage collector may call this at any point of any method, so it appends and no more.
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
    """A storage in host memory, for all saved views of it; brought back once for all of them."""

    def __init__(self, tensor: Tensor, group: "Group", copies: Copies, pool: Pool):
        storage = tensor.untyped_storage()
        self.nbytes, self.group, self.version = storage.nbytes(), group, tensor._version
        self._copies, self._pool = copies, pool
        self._pieces: list[Piece] = []  # if there is no room, nothing has to be given back
        self._pieces = pool.take(self.nbytes)
        # Held while it is copied: memory that is let go may be written to.
        self._original: Tensor | None = tensor.detach()
        self._back: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._written = copies.out(_bytes_of(storage), self._pieces)

    def __del__(self):
        self._pool.give_back(self._pieces)

    def let_go(self) -> None:
        """Let the storage on the device go, once it is copied.

        Raises:
            RuntimeError: it was written to since it was saved.
        """
        if self._original is not None:
            self._check()
            # As a user of the storage: it may belong to another stream (that of an exchange), which
            # would hand its memory on at once, while it is still being copied.
            self._copies.wait(self._written, self._original)
            self._original = None

    def load(self) -> None:
        """Start to bring the storage back, unless it is on the device."""
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
        """Bytes on the device: the storage before it is let go, or after it is brought back."""
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
    """What one layer saves in the forward pass of one microbatch."""

    number: int
    home: "HostMemory"
    copies: list[weakref.ref[Copy]] = field(default_factory=list)
    expected: bool = False  # needed next, so that what is still on the device stays
    was_needed: bool = False

    def alive(self) -> list[Copy]:
        """Return the copies that the backward pass has not been over yet."""
        return [copy for ref in self.copies if (copy := ref()) is not None]

    def needed(self) -> None:
        """At the first call start the copies of this group and of the one after it."""
        if not self.was_needed:
            self.was_needed = True
            self.home.load_from(self)


class HostMemory:
    """Moves saved tensors of a device to host memory and back.

    Args:
        device: of the tensors; its own memory is meant, so "cpu" copies from host to host.
        least_bytes: smaller storages stay.
        slab_bytes: see `Pool`.

    Attributes:
        late: groups of this step whose copies started only when they were needed.
    """

    def __init__(self, device: torch.device, least_bytes: int, slab_bytes: int = SLAB_BYTES):
        self._device, self._least = device, least_bytes
        self._copies = StreamCopies(device) if device.type == "cuda" else Copies()
        self.pool = Pool(self._copies, slab_bytes)
        self._groups: list[Group] = []
        self._order: list[int] = []  # groups of this step as they were needed
        self._next: dict[int, int] = {}  # of the last step: group -> the one needed after it
        self._first: tuple[int, int] | None = None  # the same: last group opened before the first
        self._opened_before = 0
        self._all: weakref.WeakSet[Copy] = weakref.WeakSet()
        self.late = 0

    def begin_step(self) -> None:
        """Number groups from 0 again; the order of the last step is the guess for this one."""
        if self._order:
            self._next = dict(pairwise(self._order))
            self._first = self._opened_before, self._order[0]
        self._groups, self._order, self.late = [], [], 0

    def open_group(self) -> None:
        """What is saved from now on is another layer's.

        Raises:
            RuntimeError: a tensor was written to since it was saved.
        """
        if len(self._groups) >= 2 and not self._groups[-2].expected:
            for copy in self._groups[-2].alive():
                copy.let_go()
        self._groups.append(Group(len(self._groups), self))
        if self._first is not None and self._first[0] == len(self._groups) - 1:
            self._load(self._first[1])

    def keep(self, tensor: Tensor) -> FromHost | None:
        """Return what takes the place of a saved tensor; None for one that stays."""
        storage = tensor.untyped_storage()
        if (
            not self._groups
            or not tensor.is_floating_point()
            or tensor.device != self._device
            or storage.nbytes() < self._least
        ):
            return None
        # Weak: once the last saved view is gone, so is the copy.
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
        """Start the copies of a group that is needed now, and of the next."""
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
        """Return the bytes that are held: "host", and "moving", copies of these on the device."""
        copies = list(self._all)
        found = {
            "host": sum(copy.nbytes for copy in copies),
            "moving": sum(copy.bytes_on_device for copy in copies),
        }
        return {kind: size for kind, size in found.items() if size}


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that comes once what the stream has to do by now is done."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore
