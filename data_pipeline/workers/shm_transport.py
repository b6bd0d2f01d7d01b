"""Sends objects with large arrays over a Unix socket; the receiver maps them without a copy.

    sender                                         receiver
    pickle, arrays out of band (protocol 5)        map the segment (once)
    copy all into a segment                 ->     arrays are writeable views of it
    `reclaim` the segment, reuse it         <-     `released`, when no such array is left

A segment is anonymous memory (`memfd_create`), and the socket carries its descriptor. Segments use
no space in /dev/shm and cannot leak: the kernel frees a segment when the last process that holds it
exits, for any reason.

Segments are reused because fresh pages dominate the cost of shared memory: zeroing, mapping and
freeing them takes several times as long as the copy. A segment is dropped after `KEPT` objects did
not need it, so the number of segments follows the recent peak of concurrent use. Objects of up to
`INLINE` bytes are sent through the socket itself.

Only data that pickles out of band avoids the copy: contiguous numpy arrays without Python objects.
All other data (bytes, strided arrays) is sent correctly in the pickle stream.
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
# Arrays start at multiples of a cache line, which satisfies all vector instructions.
_ALIGN = 64
_HEADER = struct.Struct("<QQ")  # bytes of the header, bytes of the body that follows it
_LENGTH = struct.Struct("<Q")


class MessageHeader(NamedTuple):
    """Describes the body of a message to its receiver.

    Attributes:
        spans: (begin, end) of the pickle stream and of each of its buffers, in the body.
        segment: number of the segment that holds the body; None if the body follows in the socket.
        capacity: bytes of the segment if it is sent for the first time, together with its
            descriptor; else None.
        dropped: numbers of segments that will not be used again.
    """

    spans: list[tuple[int, int]]
    segment: int | None
    capacity: int | None
    dropped: list[int]


def spans_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return consecutive (begin, end) spans of parts, each starting at a multiple of 64 bytes."""
    spans, end = [], 0
    for size in sizes:
        begin = -(-end // _ALIGN) * _ALIGN
        end = begin + size
        spans.append((begin, end))
    return spans


def anonymous_file() -> int:
    """Open anonymous memory and return its descriptor.

    Without `memfd_create` (macOS, some Python builds), this is an unnamed file in /dev/shm, or
    else in TMPDIR.
    """
    try:
        return os.memfd_create("shm_transport")
    except (AttributeError, OSError):
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())


@dataclass
class _Segment:
    """Memory that the sender writes to; `filled` bytes from the start have allocated pages."""

    number: int
    fd: int
    capacity: int
    mapping: mmap.mmap
    filled: int = 0
    known: bool = False  # True if the receiver has mapped it
    freed: int = 0  # number of objects sent in segments when it was released

    @classmethod
    def create(cls, number: int, size: int) -> "_Segment":
        # A power of two, so that a slightly larger next object fits too. Pages that are never
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
                # Writing through the file allocates pages faster and raises OSError if memory runs
                # out; writing through the mapping would raise SIGBUS.
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
    """An object serialised by `Sender.pack`; must be sent before the next `pack`."""

    header: MessageHeader
    body: bytearray
    segment: _Segment | None


class Sender:
    """The end of a socket that sends objects. One thread at a time may use it."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lent: dict[int, _Segment] = {}
        self._free: list[_Segment] = []  # the longest-free first
        self._dropped: list[int] = []
        self._created = 0
        self._packed = 0

    def pack(self, value: object) -> Message:
        """Pickle an object and copy it into a segment, or into the message if it is small.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: the object cannot be pickled.
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
        """Send a message from `pack`.

        Raises:
            OSError: the other end is closed.
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
        if self._free:  # all are too small
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
            Exception: any exception of unpickling, for example if a module is missing here.
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
            EOFError: the other end is closed, possibly in the middle of an object.
            OSError: a socket error, or memory cannot be mapped.
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
            if fd is not None:  # the mapping keeps its own descriptor
                os.close(fd)
        return ReceivedMessage(header.spans, self._lease(header.segment, header.spans[-1][1]))

    def released(self) -> list[int]:
        """Return newly released segments (no array left alive), for `Sender.reclaim`."""
        return [self._returned.popleft() for _ in range(len(self._returned))]

    def _lease(self, number: int, size: int) -> memoryview:
        # Memoryview slices keep the exporting object alive, so that object dies with the last
        # array. It is an ndarray because an ndarray exports memory and allows weak references.
        lease = np.frombuffer(self._mappings[number], np.uint8, size)
        returned, leases = self._returned, self._leases

        def ended(_: object) -> None:  # runs in the thread that drops the last array
            del leases[number]
            returned.append(number)

        leases[number] = weakref.ref(lease, ended)
        return lease.data

    def _head(self) -> tuple[bytes, int | None]:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        head, fds, _, _ = socket.recv_fds(self._sock, _HEADER.size, 1, flags)
        if not head:
            raise EOFError("the other end of the socket is closed")
        # The descriptor comes with the first byte, even if the header arrives in pieces.
        rest = receive_exactly(self._sock, _HEADER.size - len(head))
        return head + rest, fds[0] if fds else None


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Send bytes as one message.

    Raises:
        OSError: the other end is closed.
    """
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive_bytes(sock: socket.socket) -> bytearray:
    """Wait for a message of `send_bytes` and return it.

    Raises:
        EOFError: the other end is closed, possibly in the middle of a message.
        OSError: a socket error.
    """
    return receive_exactly(sock, *_LENGTH.unpack(receive_exactly(sock, _LENGTH.size)))


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Receive exactly `size` bytes.

    Raises:
        EOFError: the other end is closed before all bytes have arrived.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = sock.recv_into(view[done:])
        if not got:
            raise EOFError("the other end of the socket is closed")
        done += got
    return data
