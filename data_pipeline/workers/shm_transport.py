"""Sends objects with large arrays over a Unix socket; the receiver maps them without a copy.

    sender                                         receiver
    pickle, arrays out of band (protocol 5)        map the segment (once)
    copy all into a segment                 ->     arrays are writeable views of it
    `reclaim` the segment, use it again     <-     `released`, when no such array is left

A segment is memory without a name (`memfd_create`), its descriptor travels over the socket. Nothing
lies in /dev/shm, nothing counts against its size, and nothing can be left behind: the kernel frees
a segment with the last process that holds it, whatever ended that process.

Segments are used again because fresh pages are what shared memory costs: zeroing, mapping and
freeing them takes several times as long as the copy. One that no object needed for the length of
`KEPT` objects is dropped; so there are never more than were in use at once shortly before.
An object of up to `INLINE` bytes goes through the socket itself.

What travels without a copy is what pickles out of band: contiguous numpy arrays that do not hold
Python objects. Everything else (bytes, strided arrays) arrives right, by way of the pickle stream.
"""

import errno
import mmap
import os
import pickle
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

INLINE = 64 << 10
KEPT = 8
# Arrays begin at multiples of a cache line; vector instructions need no more.
_ALIGN = 64
_HEADER = struct.Struct("<QQ")  # bytes of the header, bytes of the body that follows it
_LENGTH = struct.Struct("<Q")


class MessageHeader(NamedTuple):
    """Describes the body of a message to its receiver.

    Attributes:
        spans: (begin, end) of the pickle stream and of each of its buffers, in the body.
        segment: number of the segment that holds the body; None: it follows in the socket.
        capacity: bytes of the segment, if this is the first time it is sent; its descriptor comes
            with it.
        dropped: segments that will not be used again.
    """

    spans: list[tuple[int, int]]
    segment: int | None
    capacity: int | None
    dropped: list[int]


def spans_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Lay parts out one behind the other, each at a multiple of 64 bytes."""
    spans, end = [], 0
    for size in sizes:
        begin = -(-end // _ALIGN) * _ALIGN
        end = begin + size
        spans.append((begin, end))
    return spans


def anonymous_file() -> int:
    """Open memory without a name and return its descriptor.

    Where the system (macOS) or the build of Python has no `memfd_create`, it is a file without a
    name in /dev/shm, or else in TMPDIR.
    """
    try:
        return os.memfd_create("shm_transport")
    except (AttributeError, OSError):
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())


@dataclass
class _Segment:
    """Memory that the sender writes into. `filled`: bytes from the start whose pages exist."""

    number: int
    fd: int
    capacity: int
    mapping: mmap.mmap
    filled: int = 0
    known: bool = False  # to the receiver
    freed: int = 0  # how many objects had been sent in segments when it came back

    @classmethod
    def create(cls, number: int, size: int) -> "_Segment":
        # A power of two, so that the next, somewhat larger object fits too. Pages that are never
        # written take no memory.
        capacity = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
        fd = anonymous_file()
        try:
            os.ftruncate(fd, capacity)
            return cls(number, fd, capacity, mmap.mmap(fd, capacity))
        except BaseException:
            os.close(fd)
            raise

    def fill(self, parts: Sequence[memoryview], spans: Sequence[tuple[int, int]]) -> None:
        for part, (begin, end) in zip(parts, spans):
            if end <= self.filled:
                self.mapping[begin:end] = part
            else:
                # Through the file, new pages come faster, and if there is no memory for them it is
                # an OSError; through the mapping it would be SIGBUS.
                _write(self.fd, part, begin)
        self.filled = max(self.filled, spans[-1][1])

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


def _write(fd: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < part.nbytes:
        done += os.pwrite(fd, part[done:], offset + done)


@dataclass
class Message:
    """An object serialised by `Sender.pack`; it has to be the next one sent."""

    header: MessageHeader
    body: bytearray
    segment: _Segment | None


class Sender:
    """The end of a socket that sends objects. One thread at a time may use it."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lent: dict[int, _Segment] = {}
        self._free: list[_Segment] = []  # the longest free first
        self._dropped: list[int] = []
        self._created = 0
        self._packed = 0

    def pack(self, value: object) -> Message:
        """Pickle an object and copy it into a segment, or into the message if it is small.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: from pickle, as it pleases.
            OSError: there is no memory left for a segment.
        """
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(stream), *(buffer.raw() for buffer in buffers)]
        spans = spans_of(part.nbytes for part in parts)
        size = spans[-1][1]
        if size <= INLINE:
            body = bytearray(size)
            for part, (begin, end) in zip(parts, spans):
                body[begin:end] = part
            return Message(MessageHeader(spans, None, None, self._pop_dropped()), body, None)
        segment = self._segment(size)
        try:
            segment.fill(parts, spans)
        except BaseException:
            self._drop(segment)
            raise
        self._lent[segment.number] = segment
        capacity = None if segment.known else segment.capacity
        dropped = self._pop_dropped()
        return Message(
            MessageHeader(spans, segment.number, capacity, dropped), bytearray(), segment
        )

    def send(self, message: Message) -> None:
        """Send what `pack` returned.

        Raises:
            OSError: the other end is gone.
        """
        header = pickle.dumps(tuple(message.header))
        head = _HEADER.pack(len(header), len(message.body))
        if message.segment is not None and not message.segment.known:
            sent = socket.send_fds(self._sock, [head], [message.segment.fd])
            assert sent == len(head)
            head = b""
            message.segment.known = True
        self._sock.sendall(head + header + message.body)

    def reclaim(self, numbers: Iterable[int]) -> None:
        """Reuse segments that the receiver has released."""
        for number in numbers:
            segment = self._lent.pop(number)
            segment.freed = self._packed
            self._free.append(segment)
        while self._free and self._packed - self._free[0].freed > KEPT:
            self._drop(self._free.pop(0))

    def _segment(self, size: int) -> _Segment:
        self._packed += 1
        # Most recently released first, so that surplus segments age and are dropped.
        for place in reversed(range(len(self._free))):
            if self._free[place].capacity >= size:
                return self._free.pop(place)
        if self._free:  # all too small
            self._drop(self._free.pop(0))
        self._created += 1
        return _Segment.create(self._created, size)

    def _drop(self, segment: _Segment) -> None:
        segment.close()
        if segment.known:
            self._dropped.append(segment.number)

    def _pop_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped


@dataclass
class ReceivedMessage:
    """The bytes of a received object; `load` unpickles it, once."""

    spans: list[tuple[int, int]]
    view: memoryview

    def load(self) -> Any:
        """Unpickle the object; its arrays are views of the body.

        Raises:
            Exception: whatever unpickling raises, as when a module is missing here.
        """
        stream, *buffers = (self.view[begin:end] for begin, end in self.spans)
        return pickle.loads(stream, buffers=buffers)


class Receiver:
    """The end of a socket that receives objects. One thread at a time may use it."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._mappings: dict[int, mmap.mmap] = {}
        self._leases: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._returned: deque[int] = deque()

    def receive(self) -> ReceivedMessage:
        """Wait for the next object.

        Raises:
            EOFError: the other end is gone, perhaps in the middle of an object.
            OSError: from the socket, or memory cannot be mapped.
        """
        head, fd = self._head()
        try:
            header_size, body_size = _HEADER.unpack(head)
            header = MessageHeader(*pickle.loads(receive_exactly(self._sock, header_size)))
            for number in header.dropped:
                del self._mappings[number]
            if header.segment is None:
                body = receive_exactly(self._sock, body_size)
                return ReceivedMessage(header.spans, memoryview(body))
            if header.capacity is not None:
                if fd is None:
                    raise OSError(
                        errno.EMFILE,
                        "a segment came without its descriptor: this process has as many open "
                        "files as it may; raise `ulimit -n`, or hold fewer results at once",
                    )
                self._mappings[header.segment] = mmap.mmap(fd, header.capacity)
        finally:
            if fd is not None:  # the mapping has a descriptor of its own
                os.close(fd)
        return ReceivedMessage(header.spans, self._lease(header.segment, header.spans[-1][1]))

    def released(self) -> list[int]:
        """Return the segments without a live array, each once, for `Sender.reclaim`."""
        return [self._returned.popleft() for _ in range(len(self._returned))]

    def _lease(self, number: int, size: int) -> memoryview:
        # A slice of a memoryview keeps the exporting object alive, so that object dies with the
        # last array. It is an ndarray because that exports memory and allows weak references.
        lease = np.frombuffer(self._mappings[number], np.uint8, size)
        returned, leases = self._returned, self._leases

        def ended(_: object) -> None:  # in whatever thread drops the last array
            del leases[number]
            returned.append(number)

        leases[number] = weakref.ref(lease, ended)
        return lease.data

    def _head(self) -> tuple[bytes, int | None]:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        head, fds, _, _ = socket.recv_fds(self._sock, _HEADER.size, 1, flags)
        if not head:
            raise EOFError("the other end of the socket is closed")
        # A descriptor comes with the first byte, wherever the rest is cut.
        rest = receive_exactly(self._sock, _HEADER.size - len(head))
        return head + rest, fds[0] if fds else None


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Send bytes as one message.

    Raises:
        OSError: the other end is gone.
    """
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive_bytes(sock: socket.socket) -> bytearray:
    """Wait for what `send_bytes` sent.

    Raises:
        EOFError: the other end is gone, perhaps in the middle of a message.
        OSError: from the socket.
    """
    return receive_exactly(sock, *_LENGTH.unpack(receive_exactly(sock, _LENGTH.size)))


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Receive so many bytes.

    Raises:
        EOFError: the other end is gone before.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = sock.recv_into(view[done:])
        if not got:
            raise EOFError("the other end of the socket is closed")
        done += got
    return data
