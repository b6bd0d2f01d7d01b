"""Policy over saved tensors: keeps, recomputes, quantises to FP8 or offloads them.

`torch.autograd.graph.saved_tensors_hooks` passes every tensor that autograd saves to the policy,
which returns it for the backward pass. The treatment of a tensor is attached to its storage, whose
Python object torch keeps as long as the storage lives: views, `detach()` and tensors saved by
custom Functions all lead to the same storage.

- `remade(kind, make, *inputs)`: the outputs are dropped. The first consumer in the backward pass
  recomputes them from the inputs, and they are freed after the last consumer.
- `squeezed(x)`: autograd saves the FP8 codes of `x` (`fp8_tiles`).
- All other floating-point tensors may be offloaded to host memory (`host_memory`).

Inputs are kept and codes are made only when autograd saves the tensor, because products with frozen
weights save no input.

The autograd graph is unchanged, so recompute and offload are bit-exact. A consumer outside the
hooks keeps its tensor: that costs memory, but never reads freed data. As in autograd without hooks,
using a tensor that was modified after it was saved is an error.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kimi_pretrain.memory.fp8_tiles import from_fp8, to_fp8
from kimi_pretrain.memory.host_memory import HostMemory

_WEIGHT = "weight"


class Saved(Protocol):
    """Object that autograd holds in place of a saved tensor."""

    def give(self) -> Tensor:
        """Return the tensor."""
        ...


class Kept:
    """A tensor that is kept unchanged; its bytes count as `kind`."""

    __slots__ = ("__weakref__", "kind", "tensor", "version")

    def __init__(self, tensor: Tensor, kind: str):
        # Detached: a saved output with a reference to its node forms a cycle, which is never freed
        # without a backward pass.
        self.tensor, self.kind, self.version = tensor.detach(), kind, tensor._version

    def give(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was modified after it was saved.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that the backward pass needs was written to "
                f"after it was saved: version {self.tensor._version}, expected {self.version}"
            )
        return self.tensor


class Recipe:
    """A computation that can be repeated; its outputs live as long as the recipe is referenced.

    Args:
        make: the computation.
        inputs: tensors, wrapped in `Kept`, and other values.
    """

    def __init__(self, make: Callable[..., Any], inputs: list[Any]):
        self._make, self._inputs, self._saved = make, inputs, False
        self._made: tuple[Tensor, ...] | None = None

    def save(self, keep: Callable[[Tensor], Saved]) -> None:
        """Replace the tensor inputs by the results of `keep`; only the first call has an effect.

        Raises:
            RuntimeError: an input was modified since the computation.
        """
        if not self._saved:
            self._saved = True
            self._inputs = [keep(x.give()) if isinstance(x, Kept) else x for x in self._inputs]

    def output(self, index: int) -> Tensor:
        """Return one of the outputs; the first call computes all of them."""
        if self._made is None:
            inputs = [x.give() if hasattr(x, "give") else x for x in self._inputs]
            # Grad mode is on in a backward pass with create_graph; recompute never records a graph.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                made = self._make(*inputs)
            self._made = made if isinstance(made, tuple) else (made,)
        return self._made[index]


@dataclass(frozen=True)
class Treatment:
    """Mark on a storage that defines how it is saved, valid until the storage is modified.

    Attributes:
        shape, dtype, version: of the tensor that covers the whole storage.
    """

    shape: torch.Size
    dtype: torch.dtype
    version: int

    def covers(self, tensor: Tensor) -> bool:
        """Return whether the treatment is still valid for this tensor of the storage.

        `tensor.data` starts a separate version counter at 0. An alias made by it, as in
        Megatron-Core's `make_viewless_tensor`, is therefore covered, but writes through such an
        alias are not detected.
        """
        return tensor.dtype == self.dtype and tensor._version == self.version


@dataclass(frozen=True)
class Output(Treatment):
    """Treatment of a storage that is an output of a recipe."""

    recipe: Recipe
    index: int


@dataclass(frozen=True)
class Codes(Treatment):
    """Treatment of a storage that is saved as FP8 codes, made from the first saved tensor."""

    def made(self, tensor: Tensor) -> Output:
        """Make the codes of the whole storage from any view; return its values as a recipe."""
        whole = torch.empty(0, dtype=self.dtype, device=tensor.device)
        whole.set_(tensor.untyped_storage(), 0, self.shape)  # type: ignore[call-overload]
        codes, scales = to_fp8(whole)
        recipe = Recipe(from_fp8, [Kept(codes, "kept"), Kept(scales, "kept"), self.dtype])
        return Output(self.shape, self.dtype, self.version, recipe, 0)


class Remade:
    """One saved view of a recipe's output."""

    __slots__ = ("index", "place", "recipe")

    def __init__(self, recipe: Recipe, index: int, tensor: Tensor):
        self.recipe, self.index = recipe, index
        self.place = _place(tensor)

    def give(self) -> Tensor:
        """Return the view; the first call computes the outputs."""
        output = self.recipe.output(self.index)
        return output if _place(output) == self.place else output.as_strided(*self.place)


class Policy:
    """Treatment of saved tensors; the default policy keeps all of them, without a hook.

    Args:
        recompute: kinds of computations whose outputs are recomputed.
        fp8: whether `squeezed` tensors are saved as FP8 codes.
        host: host memory for offloaded tensors; None keeps them on the device.
    """

    def __init__(
        self, recompute: Collection[str] = (), *, fp8: bool = False, host: HostMemory | None = None
    ):
        self.recompute, self.fp8, self.host = frozenset(recompute), fp8, host
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    @property
    def active(self) -> bool:
        """True if the policy changes how any tensor is saved."""
        return bool(self.recompute) or self.fp8 or self.host is not None

    def begin_step(self) -> None:
        """Begin a step; the tensors of the previous step are no longer needed."""
        if self.host is not None:
            self.host.begin_step()

    def open_group(self) -> None:
        """Begin a layer's forward pass; offloaded tensors are grouped by layer."""
        if self.host is not None and torch.is_grad_enabled():
            self.host.open_group()

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which the policy treats the tensors that autograd saves."""
        return saved_tensors_hooks(self.keep, _give) if self.active else nullcontext()

    def remade(self, kind: str, make: Callable[..., Any], *inputs: Any) -> Any:
        """Return `make(*inputs)`; saved outputs are recomputed from the inputs.

        Args:
            kind: of the computation; only kinds in `recompute` are recomputed.
            make: returns a tensor or a tuple of tensors, with the same bits at every call. It runs
                once more in the backward pass, without a graph, and keeps the weights that it
                reads.
            inputs: tensors, which this policy saves, and other values.
        """
        out = make(*inputs)
        if kind in self.recompute and torch.is_grad_enabled():
            # The policy keeps the inputs only in `Recipe.save`; detached for the reason in `Kept`.
            held = [Kept(x, "kept") if isinstance(x, Tensor) else x for x in inputs]
            recipe = Recipe(make, held)
            own = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
            for index, tensor in enumerate(out if isinstance(out, tuple) else (out,)):
                # An output that is a view of an input would keep itself alive.
                if _is_whole(tensor) and tensor.untyped_storage()._cdata not in own:
                    _treat(tensor, Output, recipe, index)
        return out

    def squeezed(self, x: Tensor) -> Tensor:
        """Return `x` itself; autograd saves its FP8 codes, unless it is recomputed."""
        found = getattr(x.untyped_storage(), "treatment", None)
        if self.fp8 and torch.is_grad_enabled() and found is None and _is_whole(x):
            _treat(x, Codes)
        return x

    def keep(self, tensor: Tensor) -> Saved:
        """Return the replacement for a tensor that autograd saves."""
        storage: Any = tensor.untyped_storage()
        treatment = getattr(storage, "treatment", None)
        if isinstance(treatment, Codes):
            treatment = storage.treatment = treatment.made(tensor)
        if isinstance(treatment, Output) and treatment.covers(tensor):
            treatment.recipe.save(self.keep)
            return Remade(treatment.recipe, treatment.index, tensor)
        if self.host is not None and treatment != _WEIGHT:
            away = self.host.keep(tensor)
            if away is not None:
                return away
        kept = Kept(tensor, "weights" if treatment == _WEIGHT else "kept")
        self._kept.add(kept)
        return kept

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes currently held, counting each storage once.

        "kept" tensors stay on the device, "weights" are saved parameters, which take no extra
        memory; `HostMemory.bytes_by_kind` describes the other kinds.
        """
        storages = {
            kept.tensor.untyped_storage()._cdata: (kept.kind, kept.tensor.untyped_storage())
            for kept in list(self._kept)
        }
        found: Counter[str] = Counter()
        for kind, storage in storages.values():
            found[kind] += storage.nbytes()
        return dict(found) | (self.host.bytes_by_kind() if self.host is not None else {})


class Saves:
    """Module whose saved tensors a policy treats: `Policy()`, until `apply` sets another."""

    policy = Policy()


def apply(policy: Policy, modules: Iterable[object], params: Iterable[Tensor]) -> None:
    """Set the policy of all modules that are `Saves`, and mark the parameters as weights."""
    for module in modules:
        if isinstance(module, Saves):
            module.policy = policy
    mark_weights(params)


def trimmed() -> AbstractContextManager[Any]:
    """Return a context in which a saved integer tensor does not keep the rest of its storage.

    For third-party code that saves the first part of a sorted tensor: the part is copied.
    """
    return saved_tensors_hooks(_trim, _give)


def mark_weights(params: Iterable[Tensor]) -> None:
    """Mark the storages of parameters: they are always in memory, including views of them."""
    for param in params:
        param.untyped_storage().treatment = _WEIGHT  # type: ignore[attr-defined]


def _trim(tensor: Tensor) -> Saved:
    part = not tensor.is_floating_point() and tensor.nbytes < tensor.untyped_storage().nbytes()
    return Kept(tensor.clone() if part else tensor, "kept")


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.size(), x.stride(), x.storage_offset()


def _is_whole(x: Tensor) -> bool:
    """Return whether a tensor covers its storage in order; only then is a recomputed view valid."""
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def _treat(x: Tensor, treatment: type[Treatment], *rest: Any) -> None:
    storage: Any = x.untyped_storage()
    storage.treatment = treatment(x.shape, x.dtype, x._version, *rest)


def _give(saved: Saved) -> Tensor:
    return saved.give()
