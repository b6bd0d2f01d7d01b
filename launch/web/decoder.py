"""Decodes pictures of the page in a process of its own, which ends with the memory it took.

One picture at a time, of a bounded number of pixels, under a limit of memory that the system keeps.
The process begins with the first picture; it ends when it holds much memory, when nobody asks for
a while, and when a picture takes too long.
"""

import multiprocessing
import resource
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.decode import decode_items
from launch.pages.html import num_bytes
from moonvit3d.geometry import KIND_IMAGE, PatchLimits
from moonvit3d.media import MediaError, probe


class Bounds(NamedTuple):
    """What one picture may take.

    Attributes:
        image, frame: pixels of an image, and of a frame of a video, whose decoder holds many.
        memory: bytes that the process may have.
        kept: bytes that it may hold when it has decoded a picture.
        idle_s: seconds without a picture after which it ends.
        patience_s: seconds for one picture.
    """

    image: int = 40_000_000
    frame: int = 10_000_000
    memory: int = 2 << 30
    kept: int = 384 << 20
    idle_s: float = 20.0
    patience_s: float = 20.0


class Decoder:
    """Decodes in another process, from any thread, one picture at a time; `close` it."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None  # to it

    def decode(
        self,
        data: bytes,
        kind: int,
        chunks: Sequence[int],
        limits: PatchLimits,
        grids: Sequence[Sequence[int]],
        draw: Any = None,
    ) -> list[NDArray[np.uint8]]:
        """Decode as `data_pipeline.decode.decode_items` does.

        Raises:
            ValueError: the file does not decode, or takes more than `Bounds` allow.
        """
        with self._lock:
            for last in (False, True):  # it may have ended since the picture before
                pipe = self._begun()
                try:
                    pipe.send((data, kind, chunks, limits, grids, draw))
                    if not pipe.poll(self._bounds.patience_s):
                        self._end()
                        break
                    found, error = pipe.recv()
                except (EOFError, OSError):
                    self._end()
                    if last:
                        raise MediaError("the process that decodes it died, twice") from None
                    continue
                if error is not None:
                    raise error
                return found
            raise MediaError(f"it does not decode within {self._bounds.patience_s:g} s")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _begun(self) -> Any:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, self._bounds), daemon=True)
            self._process.start()
            other.close()
        return self._pipe

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._pipe = self._process = None


def _serve(pipe: Connection, bounds: Bounds) -> None:
    """Decode what comes through a pipe; runs in the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its owner ends it
    resource.setrlimit(resource.RLIMIT_DATA, (bounds.memory, bounds.memory))
    while pipe.poll(bounds.idle_s):
        try:
            asked = pipe.recv()
        except EOFError:
            return
        pipe.send(_decoded(bounds, *asked))
        del asked
        if _held() > bounds.kept:
            return


def _decoded(bounds: Bounds, data: bytes, kind: int, *more: Any) -> tuple[Any, Exception | None]:
    """Return what decodes, or what is wrong."""
    try:
        found, most = probe(data, kind), bounds.image if kind == KIND_IMAGE else bounds.frame
        if found.width * found.height > most:
            raise MediaError(
                f"{found.width} x {found.height} pixels; only pictures of up to {most:,} are "
                "decoded here"
            )
        return decode_items(data, kind, *more), None
    except MemoryError:
        return None, MediaError(f"it takes more than {num_bytes(bounds.memory)} to decode")
    except ValueError as error:
        return None, MediaError(str(error))
    except Exception as error:
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _held() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
