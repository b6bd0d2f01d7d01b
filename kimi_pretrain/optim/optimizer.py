"""MuonClip as a `torch.optim.Optimizer`, for any model; docs/alone/muonclip.md has an example.

Rules by name select the parameters that Muon and AdamW train. Learning rates, weight decay,
momentum and betas are in torch's parameter groups, where torch's schedulers change them.
`muonclip.DistributedMuonClip` implements updates, state and their division among ranks. With a
process group, one rank updates each parameter and broadcasts it (ZeRO-1 by whole tensors), so
gradients must already be summed over ranks, as DistributedDataParallel does.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.config import GroupValues
from kimi_pretrain.optim.groups import NamedTensor, Piece, Rule
from kimi_pretrain.optim.muonclip import DistributedMuonClip
from kimi_pretrain.optim.qk_clip import factors, scale_heads_
from kimi_pretrain.optim.replica_group import ReplicaGroup


@dataclass(frozen=True)
class Split:
    """Division of a weight into matrices that are orthogonalised separately.

    Args:
        rows: number of rows of each part of a fused weight, in order: (d, d, d) for a fused QKV; ()
            for a single part.
        blocks: number of repetitions of the parts. The same part of all blocks is one matrix: rows
            (64, 32) and 16 blocks give one matrix of all heads' content rows and one of all heads'
            rotary rows.
        stacked: True if the first axis enumerates matrices, as in experts [experts, rows, columns].
    """

    rows: tuple[int, ...] = ()
    blocks: int = 1
    stacked: bool = False

    def pieces(self, name: str, shape: Sequence[int]) -> tuple[Piece, ...]:
        """Return the pieces of a weight, as rows of the matrix [rows of the whole stack, columns].

        Raises:
            ValueError: the weight does not divide into these parts.
        """
        if len(shape) < 2 + self.stacked or 0 in shape or (self.stacked and self.blocks > 1):
            raise ValueError(
                f"optimizer: '{name}' {tuple(shape)} cannot be read as {self}: a matrix has two "
                "dimensions or more, a stack three or more and one block"
            )
        stack, total = (shape[0], shape[1]) if self.stacked else (1, shape[0])
        parts = self.rows or (total // self.blocks,)
        if total != self.blocks * sum(parts):
            raise ValueError(
                f"optimizer: '{name}' {tuple(shape)} has {total} rows, {self} has "
                f"{self.blocks} x {parts} = {self.blocks * sum(parts)}"
            )
        return tuple(
            Piece(f"{matrix}.{part}", self.blocks, matrix * total + start, matrix * total + stop)
            for matrix in range(stack)
            for part, (start, stop) in enumerate(pairwise(accumulate(parts, initial=0)))
        )


Treatment = Literal["muon", "adamw"] | Split
Rules = Mapping[str, Treatment] | Callable[[str, Tensor], Treatment]


Rows = str | tuple[str, int, int]  # a parameter, or (its name, first row, end row)


@dataclass(frozen=True)
class AttentionHeads:
    """Query and key rows of one attention layer's heads, for QK-Clip.

    Args:
        query: parameter name, or (name, first row, end row) of a fused parameter. The rows are
            ordered by head.
        key: the same for keys. None if heads share keys (GQA, MQA); gamma then scales only the
            query.
        rope_rows: number of rows at the end of each query head whose key all heads share (the
            rotary rows of latent attention).
        value_rows: number of rows at the end of each key head that are values (kv_b of latent
            attention).
    """

    query: Rows
    key: Rows | None
    rope_rows: int = 0
    value_rows: int = 0


class MuonClip(torch.optim.Optimizer):
    """Muon with AdamW's update RMS for matrices, AdamW for other parameters, and QK-Clip.

    State is fp32, or fp64 for fp64 parameters; parameters below fp32 get an fp32 master. A step
    does not change parameters without a gradient.

    Args:
        params: `model.named_parameters()`, or parameter groups whose "params" are such pairs.
        lr: learning rate, shared by Muon and AdamW (updates of both have RMS 0.2).
        rules: optimizer of each parameter: a mapping from patterns ("blocks.*.weight"; the first
            match counts) to "muon", "adamw" or a `Split`, or a function of name and parameter.
            "muon" treats the parameter as one matrix, with one row per output channel for a
            convolution. Embeddings and output heads should be "adamw". Parameters with fewer than
            two dimensions need no pattern; AdamW trains them.
        weight_decay: decoupled weight decay of every parameter.
        momentum, nesterov: hyperparameters of Muon.
        betas, eps: hyperparameters of AdamW.
        attention: layers for `qk_clip`.
        qk_clip_threshold: attention logit above which a head is clipped.
        process_group: ranks with equal parameters that divide state and updates; None for a single
            process. All ranks must construct, step and clip together.
        ns_steps: number of Newton-Schulz iterations.
        ns_dtype: precision of the Newton-Schulz products.
        bucket_elements: maximum elements of a bucket that is updated and broadcast at once.

    Raises:
        ValueError: a parameter has no name, two names, no rule, or no contiguous memory; a pattern
            matches no parameter; a split or attention rows do not fit; a value is out of range; or
            ranks have different parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        rules: Rules,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        attention: Sequence[AttentionHeads] = (),
        qk_clip_threshold: float = 100.0,
        process_group: ProcessGroup | None = None,
        ns_steps: int = 5,
        ns_dtype: Literal["float32", "bfloat16"] = "bfloat16",
        bucket_elements: int = 2**23,
    ):
        defaults = GroupValues(lr, weight_decay, momentum, nesterov, betas, eps)._asdict()
        super().__init__(params, defaults)
        self._params = _by_name(self.param_groups)
        _require(
            ns_steps=(ns_steps, ns_steps >= 1),
            ns_dtype=(ns_dtype, ns_dtype in ("float32", "bfloat16")),
            bucket_elements=(bucket_elements, bucket_elements >= 1),
            qk_clip_threshold=(qk_clip_threshold, qk_clip_threshold > 0),
        )
        _check_patterns(rules, self._params)
        splits = {name: _split(name, param, rules) for name, param in self._params.items()}
        self._stacked = frozenset(name for name, split in splits.items() if split and split.stacked)
        table = _RuleTable(
            (name, Rule("muon", str(number), split.pieces(name, param.shape)))
            if (split := splits[name])
            else (name, Rule("adamw", str(number)))
            for number, group in enumerate(self.param_groups)
            for name, param in zip(group["param_names"], group["params"], strict=True)
        )
        named = [
            NamedTensor(name, self._matrix(name, param), self._gradient(name), "dense")
            for name, param in self._params.items()
        ]
        self._matrices = {tensor.name: tensor.data for tensor in named}
        for name, param in self._params.items():
            if param.is_meta or param.data_ptr() != self._matrices[name].data_ptr():
                what = "on the meta device" if param.is_meta else "not contiguous"
                raise ValueError(f"MuonClip: '{name}' is {what}; its updates would be lost")
        self._rules, self._attention, self._threshold = rules, tuple(attention), qk_clip_threshold
        _check_attention(self._attention, self._matrices)
        self._values = _Values(self.param_groups, ns_steps, ns_dtype, bucket_elements)
        self._group = ReplicaGroup.of(process_group)
        self._core = DistributedMuonClip(named, {"dense": process_group}, self._values, table)
        self._show_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MuonClip":
        """Return an optimizer for copied parameters; collective with a process group.

        If the same call copies the model, the new optimizer refers to the copied parameters. Hooks
        are not copied.
        """
        groups = [
            {**group, "params": list(zip(group.pop("param_names"), group["params"], strict=True))}
            for group in copy.deepcopy(self.param_groups, memo)
        ]
        twin = type(self)(
            groups,
            rules=self._rules,
            **self.defaults,
            attention=self._attention,
            qk_clip_threshold=self._threshold,
            process_group=self._group.group,
            ns_steps=self._values.ns_steps,
            ns_dtype=self._values.ns_dtype,
            bucket_elements=self._values.bucket_elements,
        )
        twin.load_state_dict(self.state_dict())
        return twin

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: torch pickles only groups and state, which cannot step."""
        raise TypeError("MuonClip cannot be pickled; save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; only the constructor may call it.

        Raises:
            ValueError: parameters have no names, or a value is out of range.
            RuntimeError: the optimizer is already constructed, so its division among ranks is
                fixed.
        """
        if hasattr(self, "_core"):
            raise RuntimeError("MuonClip: give all parameter groups when it is constructed")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if "param_names" not in group:
            raise ValueError(
                "MuonClip: rules go by name; give model.named_parameters(), or groups "
                "{'params': [(name, parameter), ...]}"
            )
        _check_values(group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; with a process group, this is a collective call.

        Raises:
            RuntimeError: a parameter's memory was replaced since construction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, param in self._params.items():
            matrix = self._matrices[name]
            if (param.data_ptr(), param.device) != (matrix.data_ptr(), matrix.device):
                raise RuntimeError(
                    f"MuonClip: the memory of '{name}' was replaced, so updates would be lost. "
                    "Move or load the model (model.to, load_state_dict(assign=True)) before "
                    "the optimizer is constructed"
                )
        if self._core.steps == 0:
            self._core.sync_masters()  # weights may have been loaded since construction
        self._values.param_groups = self.param_groups
        without = {name for name, param in self._params.items() if param.grad is None}
        self._core.step(1.0, without=without)
        self._show_state()
        return loss

    @torch.no_grad()
    def qk_clip(self, max_logits: Tensor) -> int:
        """Scale down query and key weights of heads whose logits exceed the threshold.

        Call it after `step`; see Kimi K2, arXiv:2507.20534, section 2.1. With a process group this
        is a collective call that uses the maxima of all ranks, so all ranks clip equally.

        Args:
            max_logits: [layers, heads] largest softmax input (scaled) of each head on this rank
                since the last step, in the order of `attention`; -inf for a head without tokens.

        Returns:
            Number of clipped heads.

        Raises:
            ValueError: the number of layers differs, or the rows do not divide into the heads.
        """
        if max_logits.ndim != 2 or len(max_logits) != len(self._attention):
            raise ValueError(
                f"qk-clip: maxima are {tuple(max_logits.shape)}, expected [layers, heads] of the "
                f"{len(self._attention)} layers given as attention"
            )
        for layer in self._attention:
            _check_heads(layer, max_logits.shape[1], self._matrices)
        # Replace NaN by infinity, because a MAX over ranks may drop NaN; both mean "no factor".
        maxima = max_logits.detach().to(next(iter(self._matrices.values())).device).double()
        maxima = self._group.maximum(maxima.masked_fill(maxima.isnan(), torch.inf))
        gamma = factors(maxima, self._threshold)
        for heads, own in zip(self._attention, gamma):
            if bool((own < 1).any()):
                shared = own if heads.key is None else own.sqrt()
                self._scale(heads.query, shared, heads.rope_rows, own)
                if heads.key is not None:
                    self._scale(heads.key, shared, heads.value_rows, None)
        return int((gamma < 1).sum())

    def sync_masters(self) -> None:
        """Copy parameters into fp32 masters; needed after changing them outside the optimizer."""
        self._core.sync_masters()

    def full_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Return the state dict of all ranks, on the CPU; a collective call.

        `state_dict` only holds the state of the parameters that this rank owns.

        Args:
            to: index in the process group of the rank that receives the state dict; all other ranks
                receive None.
        """
        own = self.state_dict()
        own["state"] = {
            index: {part: value.cpu() for part, value in state.items()}
            for index, state in own["state"].items()
        }
        found = self._group.gather_object(own["state"], to)
        if found is None:
            return None
        merged = {index: state for states in found for index, state in states.items()}
        return own | {"state": {index: merged[index] for index in sorted(merged)}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the entries that this rank owns, from a state of any number of ranks.

        Values keep their dtype, while torch would cast fp32 state to a bf16 parameter's dtype.
        Parameters are matched by order, as in torch, and their names must agree.

        Raises:
            ValueError: groups, names or hyperparameters do not fit, or an entry is missing or has
                another shape or dtype; no state has changed then.
        """
        groups = state_dict["param_groups"]
        sizes, own = ([len(g["params"]) for g in some] for some in (groups, self.param_groups))
        if sizes != own:
            raise ValueError(f"MuonClip: groups of {sizes} parameters in the state, {own} here")
        for theirs, ours in zip(groups, self.param_groups, strict=True):
            _check_saved_group(theirs, ours["param_names"])
        saved = [index for group in groups for index in group["params"]]
        entries, done = {}, dict.fromkeys(self._params, 0)
        for index, (name, param) in zip(saved, self._params.items(), strict=True):
            for part, value in state_dict["state"].get(index, {}).items():
                if part == "step":
                    done[name] = int(value)
                else:
                    fits = value.shape == param.shape
                    key = f"optim.{_CORE_NAMES.get(part, part)}.{name}"
                    entries[key] = self._matrix(name, value) if fits else value
        most = max(done.values(), default=0)
        self._core.load_state_dict({"optim.step": torch.tensor(most), **entries})
        self._core.missed = Counter({name: most - steps for name, steps in done.items()})
        super().load_state_dict({**state_dict, "state": {}})
        self._show_state()

    def _matrix(self, name: str, x: Tensor) -> Tensor:
        """Return a parameter as the update sees it; a stack becomes one matrix of all its rows."""
        return x.detach().flatten(0, 1) if name in self._stacked else x.detach()

    def _gradient(self, name: str) -> Callable[[], Tensor]:
        def gradient() -> Tensor:
            found = self._params[name].grad
            assert found is not None  # `step` leaves such parameters out
            return self._matrix(name, found)

        return gradient

    def _show_state(self) -> None:
        """Store views of the core's state in `self.state`, in the parameters' shapes."""
        for name, param in self._params.items():
            if parts := self._core.parts(name):
                done = self._core.steps - self._core.missed[name]
                self.state[param] = {"step": torch.tensor(float(done))} | {
                    _TORCH_NAMES.get(part, part): tensor.view(param.shape)
                    for part, tensor in parts.items()
                }

    def _scale(self, rows: Rows, content: Tensor, other_rows: int, other: Tensor | None) -> None:
        name, start, stop = _bounds(rows, self._matrices)

        def scale(weight: Tensor) -> None:
            on = weight.device  # devices of a model may differ
            rest = None if other is None else other.to(on)
            scale_heads_(weight[start:stop], content.to(on), other_rows, rest)

        self._core.change_weight(name, scale)


_TORCH_NAMES = {"momentum": "momentum_buffer"}
_CORE_NAMES = {theirs: ours for ours, theirs in _TORCH_NAMES.items()}


@dataclass
class _Values:
    """`UpdateSettings` that read the current values of torch's parameter groups at each step."""

    param_groups: list[dict[str, Any]]
    ns_steps: int
    ns_dtype: Literal["float32", "bfloat16"]
    bucket_elements: int
    matrices: Literal["muon", "adamw"] = "muon"
    shard_state: bool = True
    measure_orthogonality: bool = False

    def group_values(self, group: str, lr: float) -> GroupValues:
        own = self.param_groups[int(group)]
        values = GroupValues(**{name: own[name] for name in GroupValues._fields})
        return values._replace(lr=lr * float(values.lr))


class _RuleTable(dict[str, Rule]):
    """`TensorRules` of known parameters; a rule's group is the index of torch's parameter group."""

    def rule_of(self, name: str, shape: Sequence[int], matrices: str = "muon") -> Rule:
        return self[name]


def _by_name(groups: Sequence[Mapping[str, Any]]) -> dict[str, torch.nn.Parameter]:
    pairs = [pair for group in groups for pair in zip(group["param_names"], group["params"])]
    if len(found := dict(pairs)) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"MuonClip: {[n for n in names if names[n] > 1]} given twice")
    first: dict[int, str] = {}
    for name, param in pairs:
        if (other := first.setdefault(id(param), name)) != name:
            raise ValueError(
                f"MuonClip: '{other}' and '{name}' are one parameter, which would be updated "
                "twice; give it once, under one name"
            )
    return found


def _check_patterns(rules: Rules, names: Collection[str]) -> None:
    """Refuse a pattern that matches no parameter, because another rule would silently apply."""
    for pattern in () if callable(rules) else rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(
                f"MuonClip: no parameter's name matches the rule '{pattern}'; the nearest is {near}"
            )


def _split(name: str, param: Tensor, rules: Rules) -> Split | None:
    """Return the matrices of a parameter, or None if AdamW trains it."""
    if callable(rules):
        found = rules(name, param)
    elif param.ndim < 2:
        return None
    else:
        found = next((rule for at, rule in rules.items() if fnmatchcase(name, at)), None)
    if found == "adamw" or isinstance(found, Split):
        return None if found == "adamw" else found
    if found == "muon" and param.ndim != 3:
        return Split()
    raise ValueError(
        f"MuonClip: the rule for '{name}' {tuple(param.shape)} is {found!r}; give 'muon', 'adamw' "
        "or a Split (of three dimensions Split(stacked=True) for a stack of matrices, Split() for "
        "a convolution). Embeddings and output heads are usually AdamW's"
    )


def _bounds(rows: Rows, matrices: Mapping[str, Tensor]) -> tuple[str, int, int]:
    """Return the parameter name, first row and end row."""
    if isinstance(rows, str):
        return rows, 0, len(matrices[rows]) if rows in matrices else 0
    return rows


def _check_attention(layers: Sequence[AttentionHeads], matrices: Mapping[str, Tensor]) -> None:
    taken: dict[str, list[tuple[int, int]]] = {}
    for rows in (rows for layer in layers for rows in (layer.query, layer.key) if rows):
        name, start, stop = _bounds(rows, matrices)
        if name not in matrices:
            raise ValueError(f"qk-clip: there is no parameter '{name}'")
        shape = tuple(matrices[name].shape)
        if len(shape) != 2 or not 0 <= start < stop <= shape[0]:
            raise ValueError(f"qk-clip: {rows!r} are no rows of '{name}', a matrix of {shape}")
        for first, end in taken.setdefault(name, []):
            if start < end and first < stop:
                raise ValueError(
                    f"qk-clip: rows {max(start, first)} to {min(stop, end)} of '{name}' are given "
                    "twice and would be clipped twice"
                )
        taken[name].append((start, stop))


def _check_heads(layer: AttentionHeads, heads: int, matrices: Mapping[str, Tensor]) -> None:
    for rows, other in ((layer.query, layer.rope_rows), (layer.key, layer.value_rows)):
        if rows is not None:
            name, start, stop = _bounds(rows, matrices)
            if heads < 1 or (stop - start) % heads or (stop - start) // heads < max(other, 1):
                raise ValueError(
                    f"qk-clip: {stop - start} rows of '{name}' are not those of {heads} heads "
                    f"(the maxima's), each with {other} rows of another kind"
                )


def _check_saved_group(saved: Mapping[str, Any], names: Sequence[str]) -> None:
    if missing := [name for name in GroupValues._fields if name not in saved]:
        raise ValueError(f"MuonClip: a group of the state has no {missing}: of another optimizer?")
    _check_values(saved)
    found = saved.get("param_names", names)
    if different := [pair for pair in zip(found, names, strict=True) if pair[0] != pair[1]]:
        there, here = different[0]
        raise ValueError(f"MuonClip: the state is of '{there}' where this model has '{here}'")


def _check_values(group: Mapping[str, Any]) -> None:
    betas = group["betas"]
    _require(
        lr=(group["lr"], 0 <= group["lr"] < math.inf),
        weight_decay=(group["weight_decay"], 0 <= group["weight_decay"] < math.inf),
        momentum=(group["momentum"], 0 <= group["momentum"] < 1),
        betas=(betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
        eps=(group["eps"], 0 < group["eps"] < math.inf),
    )


def _require(**settings: tuple[Any, bool]) -> None:
    """Raise for the first setting (value, is in range) that is out of range."""
    for name, (value, holds) in settings.items():
        if not holds:
            raise ValueError(f"MuonClip: {name} is {value!r}, which is out of range")
