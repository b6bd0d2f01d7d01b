"""Runs Megatron-Core 0.19.2 on a host without CUDA: every patch, each with its reason.

Megatron-Core assumes CUDA in about twenty places. On a machine that has CUDA `enable()` patches
nothing at all. Elsewhere it makes `torch.cuda` answer for the host: one in-order stream, the CPU
as current device, the default generator as the device's. Several of these patches are process
wide; that is the price of using the engine unmodified, and why they are all in this file.

The exact version is pinned: another version of Megatron-Core is refused, because a patch that no
longer fits could be silently wrong. tests/dist/test_layouts.py guards what the patches touch: the
same losses in every layout.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from importlib.metadata import version

import torch
from torch.utils._device import _device_constructors

MEGATRON_VERSION = "0.19.2"
_FACTORIES = (
    "tensor", "zeros", "empty", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like",
)  # fmt: skip
_enabled = False


class _Stream:
    """A stand-in for CUDA streams and events: the host has one stream, and it is in order."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        """Nothing to wait for: work on the host is in order."""

    def wait_event(self, event):
        """Nothing to wait for: work on the host is in order."""

    def record_event(self, event=None):
        """Return an event that has already happened."""
        return event or _Stream()

    def record(self, stream=None):
        """Nothing to record."""

    def wait(self, stream=None):
        """Nothing to wait for."""

    def synchronize(self):
        """Nothing to wait for."""

    @staticmethod
    def priority_range():
        """Return CUDA's usual range of stream priorities."""
        return (0, -1)


class _AbsentModule(types.ModuleType):
    """Stands in for triton: attributes and decorators resolve, nothing in it ever runs."""

    __version__ = "3.4.0"
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentModule(name)

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else lambda function: function


def enable() -> torch.device:
    """Prepare this process for `import megatron.core`; call it before that import.

    Returns the device that models live on: the current CUDA device, or the CPU.

    Raises:
        ImportError: another version of Megatron-Core is installed than the one pinned here, or
            Transformer Engine on a host without CUDA.
    """
    global _enabled
    if (found := version("megatron-core")) != MEGATRON_VERSION:
        raise ImportError(
            f"megatron-core {found} is installed, this code is tested with {MEGATRON_VERSION} "
            f"exactly; run `make setup` or `pip install megatron-core=={MEGATRON_VERSION}`"
        )
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if importlib.util.find_spec("transformer_engine") is not None:
        raise ImportError(
            "Transformer Engine is installed on a host without CUDA: it cannot be imported there, "
            "and Megatron-Core tries; pip uninstall transformer-engine transformer-engine-torch "
            "transformer-engine-cu12 transformer-engine-cu13"
        )
    if not _enabled:
        _patch_torch_cuda()
        _patch_tensors()
        with _stand_in_for_triton():
            _patch_megatron()
        _enabled = True
    return torch.device("cpu")


@contextlib.contextmanager
def _stand_in_for_triton() -> Iterator[None]:
    # transformer/moe/ops/paged_stash.py imports triton unconditionally, only to define kernels
    # that a host never launches. The stand-in is gone again before anything of torch looks for
    # triton: found, it would be used.
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    names = ("triton", "triton.language")
    for name in names:
        module = _AbsentModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["triton"].language = sys.modules["triton.language"]  # pyright: ignore
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _patch_torch_cuda() -> None:
    cuda, host, stream = torch.cuda, torch.device("cpu"), _Stream()
    generator = torch.default_generator
    # `device=torch.cuda.current_device()` is how Megatron-Core says "here".
    cuda.current_device = lambda: host  # type: ignore[assignment]
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = lambda *args, **kwargs: stream  # type: ignore[assignment]
    cuda.Stream, cuda.Event = _Stream, _Stream  # type: ignore[assignment]
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    # Recompute saves and restores "the device's" generator: on a host that is the default one.
    cuda.get_rng_state = lambda *args, **kwargs: generator.get_state()
    cuda.manual_seed = generator.manual_seed  # type: ignore[assignment]


def _patch_tensors() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment]
    # `with torch.device(...)` takes note of the factories at its first use: be that before they are
    # patched, or it sets no device, and a dry run fills an encoder of 471 million numbers.
    _device_constructors()
    # Tensor factories are called with the literal device="cuda" and with pin_memory.
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))


def _on_host(factory):
    def create(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _patch_megatron() -> None:
    # Its jit_fuser is torch.compile, applied while its modules are imported; on a host that would
    # start a C++ compiler for tiny functions. torch.compile itself is put back afterwards.
    compile_, torch.compile = torch.compile, lambda function=None, *args, **kwargs: function
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_
    jit.disable_jit_fuser()
    from megatron.core.transformer.moe import paged_stash  # noqa: F401  # while triton "is there"

    generator = torch.default_generator
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: generator.get_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
    if not hasattr(random, "FP8GlobalStateManager"):
        # Output-discarding recompute uses names that exist only with Transformer Engine.
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = lambda *args, **kwargs: contextlib.nullcontext()
        random.fp8_autocast = random.activation_recompute_forward
    # Split sizes of the expert all-to-all must be lists of ints for gloo.
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
