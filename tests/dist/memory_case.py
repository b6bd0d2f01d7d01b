"""Actions of worker.py on saved tensors: one step under many memory policies."""

import sys
from collections import Counter

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kimi_pretrain.memory.saved import Codes, Policy, apply

ALL = ["norms", "swiglu", "mla_up"]
OFFLOAD = {"offload": True, "offload_min_mib": 0.0}
# Recomputation changes no bit. FP8 changes bits, but further options on top of it do not.
POLICIES: dict[str, dict] = {
    "none": {},
    "norms": {"recompute": ["norms"]},
    "swiglu": {"recompute": ["swiglu"]},
    "mla_up": {"recompute": ["mla_up"]},
    "recompute": {"recompute": ALL},
    "offload": OFFLOAD,
    "recompute, offload": {"recompute": ALL, **OFFLOAD},
    "fp8": {"recompute": ALL, "fp8_storage": True},
    "fp8, offload": {"recompute": ALL, "fp8_storage": True, **OFFLOAD},
}
EQUALS = {name: "none" for name in POLICIES if name != "none" and "fp8" not in name} | {
    "fp8, offload": "fp8"
}
COMBINED = ("none", "recompute", "offload", "recompute, offload", "fp8", "fp8, offload")
SHORT = ("none", "recompute, offload")
FP8 = ("fp8", "fp8, offload")


class Watched(Policy):
    """A policy that records its actions per module.

    Attributes:
        done: number of times a module class asked for a saving context ("saving DenseMlp"), had an
            output recomputed in the backward pass ("swiglu DenseMlp"), or had a tensor marked for
            saving as codes ("fp8 DenseMlp"); also the number of "codes" made, and of "groups".
        peak: peak bytes of each kind at the beginning of a layer; "left" are released storages that
            other code still holds.
    """

    def __init__(self, policy: Policy):
        super().__init__(policy.recompute, fp8=policy.fp8, host=policy.host)
        self.done, self.peak = Counter(), {}
        self._let_go: list[tuple[StorageWeakRef, int]] = []

    def _note(self, what):
        """Count an action of the module that called the calling method."""
        self.done[f"{what} {type(sys._getframe(2).f_locals['self']).__name__}"] += 1

    def open_group(self):
        groups = self.host._groups if self.host is not None else []
        going = groups[-2].alive() if len(groups) >= 2 else []
        storages = [
            (StorageWeakRef(copy._original.untyped_storage()), copy.nbytes)
            for copy in going
            if copy._original is not None and not groups[-2].expected
        ]
        super().open_group()
        if torch.is_grad_enabled():
            self._let_go = [one for one in (*self._let_go, *storages) if not one[0].expired()]
            held = self.bytes_by_kind() | {"left": sum(size for _, size in self._let_go)}
            self.done["groups"] += 1
            for kind, size in held.items():
                self.peak[kind] = max(size, self.peak.get(kind, 0))

    def saving(self):
        if torch.is_grad_enabled():
            self._note("saving")
        return super().saving()

    def remade(self, kind, make, *inputs):
        asked_by = type(sys._getframe(1).f_locals["self"]).__name__

        def counted(*values):
            self.done[f"{kind} {asked_by}"] += not torch.is_grad_enabled()
            return make(*values)

        return super().remade(kind, counted, *inputs)

    def keep(self, tensor):
        treatment = getattr(tensor.untyped_storage(), "treatment", None)
        self.done["codes"] += isinstance(treatment, Codes)
        return super().keep(tensor)

    def squeezed(self, x):
        found = super().squeezed(x)
        if hasattr(found.untyped_storage(), "treatment") and torch.is_grad_enabled():
            self._note("fp8")
        return found


def _watch(backbone):
    backbone.policy = Watched(backbone.policy)
    for chunk in backbone.chunks:
        apply(backbone.policy, chunk.modules(), chunk.parameters())


EMPTY = torch.zeros(0)


def policies(run, names=tuple(POLICIES)) -> dict:
    """Take one step on the same microbatches under every policy, with held-out losses after each.

    Returns for every policy: the names that differ on any rank from the policy of `EQUALS` (else
    from "none"); the bytes held after step and forward; the number of compared tensors; the groups
    that a second step prefetched late; the actions of the first step (`Watched`); and the tensor
    with the largest error, with its error. Also returns "padding", the padding tokens in all parts;
    "layers" and "dense layers", the layer forward passes on all ranks; and "bytes of a residual".
    """
    microbatches = _planted(run)
    found, results, late = {}, {}, 0
    for name in names:
        changed = POLICIES[name]
        train = run.config.train.model_copy(update=changed)
        run.backbone.config = run.config.model_copy(update={"train": train})
        run.backbone.apply_memory_policy()
        _watch(run.backbone)
        found[name] = _step(run, microbatches)
        watched = run.backbone.policy
        groups = len(watched.host._groups) if watched.host is not None else 0
        did = dict(watched.done), dict(watched.peak), groups
        if changed.get("offload"):  # repeat the step in the order that the first one recorded
            again = _step(run, microbatches)
            assert all(torch.equal(value, again[key]) for key, value in found[name].items())
            late = run.backbone.policy.host.late
        held_out = run.backbone.losses(microbatches)  # as in a validation
        found[name]["loss, held out"] = torch.cat([one.flatten() for one in held_out or [EMPTY]])
        other = found[EQUALS.get(name, "none")]
        differing = [
            key for key, value in found[name].items() if not torch.equal(value, other[key])
        ]
        assert found[name].keys() == other.keys()
        held = {k: v for k, v in run.backbone.policy.bytes_by_kind().items() if k != "weights"}
        far = [(_error(value, other[key]), key) for key, value in found[name].items()]
        parts = run.mesh.all_gather_object((differing, held, len(other), late, did, max(far)))
        results[name] = {
            "differing": sorted({key for part in parts for key in part[0]}),
            "held": [part[1] for part in parts],
            "compared": sum(part[2] for part in parts),
            "late": [part[3] for part in parts],
            "did": [part[4] for part in parts],
            "error": max(part[5] for part in parts),
        }
    padding = sum(int(one.padding.sum()) for one in microbatches)
    ranks = len(run.mesh.all_gather_object(None)) // run.config.layout.pp
    language = run.config.model.language
    return results | {
        "padding": sum(run.mesh.all_gather_object(padding)),
        "bytes of a residual": microbatches[0].padding.numel()
        * language.hidden_size
        * run.backbone.dtype.itemsize,
        "layers": language.num_layers * len(microbatches) * ranks,
        "dense layers": language.num_dense_layers * len(microbatches) * ranks,
    }


def _error(one, other) -> float:
    """Return the distance between two tensors, relative to the norm of the second."""
    one, other = one.double(), other.double()
    scale = other.norm()
    return float((one - other).norm() / scale) if scale > 0 else float(one.norm())


def _planted(run):
    """Return a step's microbatches with vision embeddings at every seventh position."""
    from kimi_pretrain.engine.microbatch import build_microbatches

    config, mesh = run.config, run.mesh
    none = np.zeros(0, np.int64)
    microbatches = build_microbatches(
        next(run.loader), mesh, config.train.rows_per_microbatch, none
    )
    if mesh.is_first_stage:
        for number, one in enumerate(microbatches):
            if number % 3 == 2:
                continue  # without media
            places = torch.arange(0, one.padding.shape[1], 7)
            generator = torch.Generator().manual_seed(number)
            leaf = torch.randn(len(places), config.model.language.hidden_size, generator=generator)
            one.leaf = (leaf * 0.02).to(run.backbone.dtype).requires_grad_()
            one.leaf_positions = places
    return microbatches


def _step(run, microbatches) -> dict[str, torch.Tensor]:
    """Return this rank's loss, owned gradients, leaf gradients, maxima and routing biases."""
    backbone = run.backbone
    for one in microbatches:
        if one.leaf is not None:
            one.leaf.grad = None
    found = {"loss": backbone.train_step(microbatches, 0.7).loss_sum}
    if backbone.trainable:
        leads = run.update.optimizer.leads
        owned = [view for view in backbone.views() if leads(view.name)]
        found |= {view.name: backbone.grad_of(view).clone() for view in owned}
    for number, one in enumerate(microbatches):
        if one.leaf is not None:
            found[f"leaf {number}"] = one.leaf.grad.clone()
    for layer, maxima in backbone.take_max_logits().items():
        found[f"maxima of layer {layer}"] = maxima.clone()
    for number, bias in enumerate(backbone._routing_biases()):
        found[f"routing bias {number}"] = bias.clone()
    backbone.undo_routing_biases()
    return found


# Actions of memory policies.
ACTIONS = {
    "every": policies,
    "combined": lambda run: policies(run, COMBINED),
    "some": lambda run: policies(run, SHORT),
    "FP8 storage": lambda run: policies(run, ("none", *FP8)),
}
