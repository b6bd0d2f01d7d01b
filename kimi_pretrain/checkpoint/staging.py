"""Staging: copies tensors to memory shared with the writer process, the only cost for training.

Each file of a checkpoint is one memfd with the layout of the file. A save copies the tensors, while
the header never changes. The memory is as large as this rank's share of a checkpoint and stays
allocated between saves, so that later saves have no page faults.

Only the update changes most tensors. A thread copies them while the step runs up to the update
(`BackgroundCopy`), so training usually does not wait at all.
"""

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from moonvit3d.safetensors_io import (
    FileLayout,
    SafetensorsError,
    entry_of,
    layout_of,
    tensor_at,
    wide_first,
)

log = logging.getLogger("kimi_pretrain.checkpoint")


class StagingBuffers:
    """The files of one rank, in memory.

    Args:
        files: file -> names of its tensors.
        tensors: all tensors, for their dtypes and shapes.
        texts: file -> contents of all other files, which never change.
        device: device of the tensors; memory is pinned for a CUDA device.

    Raises:
        CheckpointError: there is not enough memory.
    """

    def __init__(
        self,
        files: Mapping[str, list[str]],
        tensors: Mapping[str, Tensor],
        texts: Mapping[str, bytes],
        device: torch.device,
    ):
        self.sizes: dict[str, int] = {}  # file -> bytes
        self.fds: dict[str, int] = {}  # file -> descriptor
        self._targets: dict[str, Tensor] = {}
        self._pinned: list[Tensor] = []
        try:
            for file, names in files.items():
                layout = _layout(names, tensors)
                buffer = self._allocate(file, layout.size)
                buffer[: len(layout.head)] = torch.frombuffer(
                    bytearray(layout.head), dtype=torch.uint8
                )
                if device.type == "cuda":
                    self._pin(buffer)
                for name, entry in layout.entries.items():
                    self._targets[name] = tensor_at(buffer, entry)
            for file, text in texts.items():
                buffer = self._allocate(file, len(text))
                buffer[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        except BaseException:
            self.close()
            raise

    def _allocate(self, file: str, size: int) -> Tensor:
        fd = os.memfd_create(file)
        self.fds[file], self.sizes[file] = fd, size
        try:
            # Reserve the pages now; otherwise a lack of memory would kill the process in the copy.
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise CheckpointError(
                f"no memory to copy {size / 2**30:.1f} GiB of tensors aside for {file} "
                f"({error.strerror}); a rank needs its share of a checkpoint in host memory: use "
                "fewer ranks on a node, or more memory"
            ) from None
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)

    def _pin(self, buffer: Tensor) -> None:
        """Pin a buffer, which makes copies from the device several times faster."""
        failed = _cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(failed):
            log.warning("memory for checkpoints cannot be pinned (%s): saves stall longer", failed)
        else:
            self._pinned.append(buffer)

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the buffers fit these tensors in name, dtype and shape."""
        return all(
            name in tensors
            and (tensors[name].dtype, tensors[name].shape) == (target.dtype, target.shape)
            for name, target in self._targets.items()
        )

    @torch.no_grad()
    def copy(
        self, tensors: Mapping[str, Tensor], which: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Copy the tensors for which `which(name)` is true; they may change once this returns."""
        streams = set()
        for name, target in self._targets.items():
            if which(name):
                source = tensors[name]
                target.copy_(source, non_blocking=True)
                if source.device.type == "cuda":
                    streams.add(torch.cuda.current_stream(source.device))
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._pinned:
            _cudart().cudaHostUnregister(buffer.data_ptr())
        self._pinned, self._targets = [], {}
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}


def _layout(names: Iterable[str], tensors: Mapping[str, Tensor]) -> FileLayout:
    """Return the layout of a file: wide dtypes first, then by name."""
    found = ((name, tensors[name]) for name in sorted(names))
    try:
        entries = {name: entry_of(name, tensor.shape, tensor.dtype) for name, tensor in found}
    except SafetensorsError as error:
        raise CheckpointError(str(error)) from None
    return layout_of(wide_first(entries))


def _cudart() -> Any:
    return torch.cuda.cudart()


class BackgroundCopy:
    """A thread that stages tensors, which must not change until `wait` has returned.

    The process may exit without waiting for it, because a copy on a dead GPU never ends. On a CUDA
    device it uses a separate stream, which waits for the work already queued and runs concurrently
    with the step.
    """

    def __init__(
        self,
        buffers: StagingBuffers,
        tensors: Mapping[str, Tensor],
        which: Callable[[str], bool],
        device: torch.device,
    ):
        threads: int | None = None
        context: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            context = torch.cuda.stream(stream)
        else:
            threads = torch.get_num_threads()

        def work() -> None:
            if threads is None:  # a new thread would create a context on the node's first GPU
                torch.cuda.set_device(device)
            else:  # a new thread would use one torch thread per core
                torch.set_num_threads(threads)
            with context:
                buffers.copy(tensors, which)

        copied = self._copied = Future[None]()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                copied.set_exception(error)
            else:
                copied.set_result(None)

        # Not an executor, because Python waits for its threads at exit.
        Thread(target=run, name="checkpoint copy", daemon=True).start()

    def wait(self) -> None:
        """Wait until all tensors are copied; raise any error of the copy."""
        self._copied.result()
