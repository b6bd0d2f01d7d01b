"""One policy over saved tensors: what the backward pass needs is kept, recomputed, or put away.

`torch.autograd.graph.saved_tensors_hooks` hands over every tensor that autograd saves, and asks for
it back. What becomes of a tensor is written on its storage, whose Python object torch keeps for as
long as the storage lives: views, `detach()` and what custom Functions save all lead to it.

- `remade(kind, make, *inputs)`: the outputs are dropped, and recomputed from the inputs for the
  first consumer that asks; the last one's end frees them.
- `squeezed(x)`: what is saved of `x` are its FP8 codes (`fp8_tiles`).
- all else of floating point may wait in host memory (`host_memory`).

Inputs are kept and codes made when autograd saves the tensor, and not before: products with frozen
weights save no input.

The graph is the ordinary one, so recompute and host memory change no bit. A consumer outside the
hooks, or one that nobody thought of, keeps its tensor: that costs memory, and reads nothing that is
gone. As autograd does without hooks, a tensor that was written to after it was saved is refused.
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
    """What autograd holds in the place of a tensor."""

    def give(self) -> Tensor:
        """Return the tensor."""
        ...


class Kept:
    """A tensor that stays as it is; its bytes count as `kind`."""

    __slots__ = ("__weakref__", "kind", "tensor", "version")

    def __init__(self, tensor: Tensor, kind: str):
        # Detached: a saved output that knew its node would be held by what it holds, for ever if no
        # backward pass comes.
        self.tensor, self.kind, self.version = tensor.detach(), kind, tensor._version

    def give(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that the backward pass needs was written to "
                f"after it was saved: version {self.tensor._version}, expected {self.version}"
            )
        return self.tensor


class Recipe:
    """A computation that can be done again; its outputs live as long as somebody holds it.

    Args:
        make: the computation.
        inputs: tensors, as `Kept`, and other values.
    """

    def __init__(self, make: Callable[..., Any], inputs: list[Any]):
        self._make, self._inputs, self._saved = make, inputs, False
        self._made: tuple[Tensor, ...] | None = None

    def save(self, keep: Callable[[Tensor], Saved]) -> None:
        """Put in the place of the inputs what `keep` gives for them; only the first call does.

        Raises:
            RuntimeError: one was written to since the computation.
        """
        if not self._saved:
            self._saved = True
            self._inputs = [keep(x.give()) if isinstance(x, Kept) else x for x in self._inputs]

    def output(self, index: int) -> Tensor:
        """Return one of the outputs; all are made at the first call."""
        if self._made is None:
            inputs = [x.give() if hasattr(x, "give") else x for x in self._inputs]
            # A backward pass records no graph, unless one is asked for.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                made = self._make(*inputs)
            self._made = made if isinstance(made, tuple) else (made,)
        return self._made[index]


@dataclass(frozen=True)
class Treatment:
    """On a storage: what is saved of it, as long as nobody writes to it.

    Attributes:
        shape, dtype, version: of the tensor that is all of the storage.
    """

    shape: torch.Size
    dtype: torch.dtype
    version: int

    def covers(self, tensor: Tensor) -> bool:
        """Whether this tensor of the storage holds what the treatment is for.

        `tensor.data` counts versions of its own, from 0. So an alias made by it, as Megatron-Core's
        `make_viewless_tensor` does, is covered; but what is written through one goes unseen.
        """
        return tensor.dtype == self.dtype and tensor._version == self.version


@dataclass(frozen=True)
class Output(Treatment):
    """This output of a recipe."""

    recipe: Recipe
    index: int


@dataclass(frozen=True)
class Codes(Treatment):
    """FP8 codes, which are made of the first tensor that is saved."""

    def made(self, tensor: Tensor) -> Output:
        """Return the codes of the whole storage as a recipe of it, given any view."""
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
        """Return the view, of an output that is made now if it is the first."""
        output = self.recipe.output(self.index)
        return output if _place(output) == self.place else output.as_strided(*self.place)


class Policy:
    """What becomes of saved tensors; the default keeps all of them, without a hook.

    Args:
        recompute: kinds of computations whose outputs are recomputed.
        fp8: whether `squeezed` tensors are saved as FP8 codes.
        host: where what is kept waits, if not on the device.
    """

    def __init__(
        self, recompute: Collection[str] = (), *, fp8: bool = False, host: HostMemory | None = None
    ):
        self.recompute, self.fp8, self.host = frozenset(recompute), fp8, host
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    @property
    def active(self) -> bool:
        """Whether anything is treated otherwise than without a policy."""
        return bool(self.recompute) or self.fp8 or self.host is not None

    def begin_step(self) -> None:
        """Say that a step begins: none of the last one's tensors is needed any more."""
        if self.host is not None:
            self.host.begin_step()

    def open_group(self) -> None:
        """Say that a layer's forward pass begins: what waits on the host goes by layers."""
        if self.host is not None and torch.is_grad_enabled():
            self.host.open_group()

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which what autograd saves is treated as the policy says."""
        return saved_tensors_hooks(self.keep, _give) if self.active else nullcontext()

    def remade(self, kind: str, make: Callable[..., Any], *inputs: Any) -> Any:
        """Return `make(*inputs)`; what is saved of it is recomputed from the inputs.

        Args:
            kind: of the computation; only kinds in `recompute` are recomputed.
            make: gives a tensor, or a tuple of them, and the same bits at every call. It runs once
                more in the backward pass, without a graph. Weights that it reads stay in it.
            inputs: tensors, saved by this policy, and other values.
        """
        out = make(*inputs)
        if kind in self.recompute and torch.is_grad_enabled():
            # Not yet kept, and detached as ever: see `Kept`.
            held = [Kept(x, "kept") if isinstance(x, Tensor) else x for x in inputs]
            recipe = Recipe(make, held)
            own = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
            for index, tensor in enumerate(out if isinstance(out, tuple) else (out,)):
                # A view of an input would keep itself alive.
                if _is_whole(tensor) and tensor.untyped_storage()._cdata not in own:
                    _treat(tensor, Output, recipe, index)
        return out

    def squeezed(self, x: Tensor) -> Tensor:
        """Return `x` itself; what is saved of it are its FP8 codes, unless it is recomputed."""
        found = getattr(x.untyped_storage(), "treatment", None)
        if self.fp8 and torch.is_grad_enabled() and found is None and _is_whole(x):
            _treat(x, Codes)
        return x

    def keep(self, tensor: Tensor) -> Saved:
        """Return what takes the place of a tensor that autograd saves."""
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
        """Return the bytes that are held right now, each storage once; weights are no activations.

        "kept" are those that stay on the device; see `HostMemory.bytes_by_kind` for the others.
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
    """A module whose saved tensors a policy treats: `Policy()`, until `apply` gives it another."""

    policy = Policy()


def apply(policy: Policy, modules: Iterable[object], params: Iterable[Tensor]) -> None:
    """Give the policy to all modules that are `Saves`, and tell it which tensors are weights."""
    for module in modules:
        if isinstance(module, Saves):
            module.policy = policy
    mark_weights(params)


def trimmed() -> AbstractContextManager[Any]:
    """Return a context in which integers that are saved do not hold the rest of their storage.

    For code of others that saves the beginning of what it sorted: the part is copied.
    """
    return saved_tensors_hooks(_trim, _give)


def mark_weights(params: Iterable[Tensor]) -> None:
    """Mark storages of parameters: they are there anyway, views of them included."""
    for param in params:
        param.untyped_storage().treatment = _WEIGHT  # type: ignore[attr-defined]


def _trim(tensor: Tensor) -> Saved:
    part = not tensor.is_floating_point() and tensor.nbytes < tensor.untyped_storage().nbytes()
    return Kept(tensor.clone() if part else tensor, "kept")


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.size(), x.stride(), x.storage_offset()


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order: else what is made again lies elsewhere."""
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def _treat(x: Tensor, treatment: type[Treatment], *rest: Any) -> None:
    storage: Any = x.untyped_storage()
    storage.treatment = treatment(x.shape, x.dtype, x._version, *rest)


def _give(saved: Saved) -> Tensor:
    return saved.give()
