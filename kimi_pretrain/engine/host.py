"""Patches Megatron-Core 0.19.2 to run on a host without CUDA.

Megatron-Core assumes CUDA in about twenty places. On a machine with CUDA, `enable()` patches
nothing. On other machines it makes `torch.cuda` describe the host: one in-order stream, the CPU as
current device, the default generator as the device's generator. Several patches affect the whole
process, because Megatron-Core itself is used unmodified, so all of them are in this file.

The exact version is pinned: other versions of Megatron-Core are refused, because a patch that no
longer fits could be silently wrong. tests/dist/test_layouts.py checks the patched code: losses must
be the same in every layout.
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
    """Replacement for CUDA streams and events; the host has one in-order stream."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        """Do nothing, because host work is in order."""

    def wait_event(self, event):
        """Do nothing, because host work is in order."""

    def record_event(self, event=None):
        """Return an event that is already complete."""
        return event or _Stream()

    def record(self, stream=None):
        """Do nothing, because host work is in order."""

    def wait(self, stream=None):
        """Do nothing, because host work is in order."""

    def synchronize(self):
        """Do nothing, because host work is synchronous."""

    @staticmethod
    def priority_range():
        """Return CUDA's usual range of stream priorities."""
        return (0, -1)


class _AbsentModule(types.ModuleType):
    """Stub for triton: attributes and decorators resolve, but no kernel ever runs."""

    __version__ = "3.4.0"
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentModule(name)

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else lambda function: function


def enable() -> torch.device:
    """Prepare this process for `import megatron.core`; must be called before that import.

    Returns:
        the device for models: the current CUDA device, or the CPU.

    Raises:
        ImportError: the installed version of Megatron-Core is not the pinned one, or Transformer
            Engine is installed on a host without CUDA.
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
    # that a host never launches. The stub is removed before torch looks for triton, because torch
    # would use it.
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
    # Megatron-Core passes `device=torch.cuda.current_device()` to place tensors.
    cuda.current_device = lambda: host  # type: ignore[assignment]
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = lambda *args, **kwargs: stream  # type: ignore[assignment]
    cuda.Stream, cuda.Event = _Stream, _Stream  # type: ignore[assignment]
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    # Recompute saves and restores the device's generator, which is the default one on a host.
    cuda.get_rng_state = lambda *args, **kwargs: generator.get_state()
    cuda.manual_seed = generator.manual_seed  # type: ignore[assignment]


def _patch_tensors() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment]
    # `with torch.device(...)` records the factories at its first use. This must happen before they
    # are patched: otherwise the context sets no device, and a dry run initialises an encoder of 471
    # million parameters.
    _device_constructors()
    # Megatron-Core calls tensor factories with the literal device="cuda" and with pin_memory.
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
    # Megatron-Core applies its jit_fuser, which is torch.compile, when its modules are imported; on
    # a host that would start a C++ compiler for tiny functions.
    compile_, torch.compile = torch.compile, lambda function=None, *args, **kwargs: function
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_
    jit.disable_jit_fuser()
    from megatron.core.transformer.moe import paged_stash  # noqa: F401  # while the stub exists

    generator = torch.default_generator
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: generator.get_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
    if not hasattr(random, "FP8GlobalStateManager"):
        # Recompute that discards outputs uses names that exist only with Transformer Engine.
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = lambda *args, **kwargs: contextlib.nullcontext()
        random.fp8_autocast = random.activation_recompute_forward
    # gloo needs the split sizes of the expert all-to-all on the host.
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
