"""Decodes pictures of the page in a separate process, so that its memory can be returned.

The process decodes one picture at a time, with a limit on pixels and a memory limit enforced by
the system. It starts with the first picture. It ends when it holds much memory, when it has been
idle for a while, or when a picture takes too long.
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
    """Limits for one picture.

    Attributes:
        image, frame: most pixels of an image and of a video frame; a decoder holds many frames.
        memory: most bytes of memory of the process.
        kept: most bytes that the process may hold after a picture; above this it ends.
        idle_s: seconds without a picture after which the process ends.
        patience_s: most seconds for one picture.
    """

    image: int = 40_000_000
    frame: int = 10_000_000
    memory: int = 2 << 30
    kept: int = 384 << 20
    idle_s: float = 20.0
    patience_s: float = 20.0


class Decoder:
    """Decodes one picture at a time in another process; thread-safe; call `close` at the end."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None  # to the process

    def decode(
        self,
        data: bytes,
        kind: int,
        chunks: Sequence[int],
        limits: PatchLimits,
        grids: Sequence[Sequence[int]],
        draw: Any = None,
    ) -> list[NDArray[np.uint8]]:
        """Decode like `data_pipeline.decode.decode_items`.

        Raises:
            ValueError: the file does not decode, or needs more than `Bounds` allows.
        """
        with self._lock:
            for last in (False, True):  # the process may have ended after the previous picture
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
    """Decode the requests of a pipe; runs in the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
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
    """Return the decoded arrays and None, or None and the error."""
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
