"""Runs the language model (phase 4) under Megatron-Core's unmodified pipeline schedule.

`build_backbone` turns the configuration into this rank's chunks. `Backbone.train_step` runs forward
and backward of all microbatches. On the first stage, `_embed` scatters the vision embeddings of a
microbatch over the media-pad positions as a leaf tensor; after the schedule, the encoder receives
the leaf's `.grad`. Each microbatch has its own leaf, because with a single leaf every microbatch
would produce a full-size zero gradient.

All results (losses, parameter gradients, leaf gradients) are sums over tokens, because
`calculate_per_token_loss` is set. They are divided once, in `kimi_pretrain.update`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from kimi_pretrain.attention.choice import check_kind, kind_of
from kimi_pretrain.config import Config, ConfigError
from kimi_pretrain.engine.experts import PaddingAwareRouter
from kimi_pretrain.engine.gradient_buffers import GradientBuffers, Reduction
from kimi_pretrain.engine.language_model import LanguageModel
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.engine.model_builder import DTYPES, build_chunks, engine_config, initialise
from kimi_pretrain.engine.packed_attention import PackedCoreAttention
from kimi_pretrain.engine.param_names import View, views
from kimi_pretrain.engine.tp_full_params import FullParams
from kimi_pretrain.memory.fp8_tiles import fp8_problem
from kimi_pretrain.memory.host_memory import HostMemory
from kimi_pretrain.memory.saved import Policy, apply


def build_backbone(
    config: Config, mesh: Mesh, fill: Callable[["Backbone"], None] | None = None
) -> "Backbone":
    """Build this rank's part of the language model; the order of the steps matters.

    Expert, tensor and context parallelism happen inside Megatron-Core's modules, controlled by
    their configuration and process groups; pipeline parallelism decides which layers a chunk holds.
    `fill` replaces `Backbone.initialise` where the values of the weights do not matter.
    """
    check_kind(config)  # not in `build_chunks`, because a dry run needs none of the kernels
    if config.train.fp8_storage and (problem := fp8_problem(mesh.device)) is not None:
        raise ConfigError(f"train.fp8_storage=true {problem}")
    attention = kind_of(config)
    engine = engine_config(config, attention)  # sizes, layout, kernels, in Megatron-Core's terms
    chunks = build_chunks(config, engine, attention)  # one chunk per virtual stage of this rank
    for chunk in chunks:
        chunk.to(mesh.device)
    if "language_model" in config.train.frozen:
        freeze(chunks)  # before gradient buffers, as frozen parameters have none
    backbone = Backbone(config, mesh, engine, chunks)
    (fill or Backbone.initialise)(backbone)  # seeded by name: equal weights in all layouts
    backbone.add_gradient_buffers()
    backbone.apply_memory_policy()  # after every step that may move a parameter to new storage
    backbone.connect_schedule()
    return backbone


def freeze(chunks: Iterable[nn.Module]) -> None:
    """Exclude all parameters and the routing biases from training."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if isinstance(module, PaddingAwareRouter):
                module.frozen_expert_bias = True


@dataclass
class BackboneResult:
    """Sums over this rank's microbatches; zero off the last stage.

    Attributes:
        loss_sum: summed token losses, 0-d fp64.
        losses: token losses of each microbatch, [1, own tokens].
        outputs: for a forward without labels, the result of `collect` for each microbatch.
    """

    loss_sum: Tensor
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class Backbone:
    """This rank's chunks of the language model; built by `build_backbone`.

    Gradients accumulate in Megatron-Core's fp32 buffers (fp64 for fp64 parameters). The optimizer
    sums them over replicas: `reduction` is called for every tensor as soon as its gradient is
    complete, while the last backward pass is still running. Under tensor parallelism, full tensors
    exist only after the backward pass, so the sums start then.

    Attributes:
        reduction: sums the gradients; `train_step` requires it if the model is trainable.
        trainable: False if `train.frozen` names the language model. Its parameters then have no
            gradients and its routing biases do not change, but gradients still pass through to the
            vision leaves.
        full_params: full versions of the tensors that tensor-parallel ranks hold in slices.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        engine: MLATransformerConfig,
        chunks: list[LanguageModel],
    ):
        self.config, self.mesh, self.engine, self.chunks = config, mesh, engine, chunks
        self.trainable = "language_model" not in config.train.frozen
        self.dtype = DTYPES[config.train.dtype]
        tp_group = parallel_state.get_tensor_model_parallel_group()
        self.full_params = FullParams(self._slices(), tp_group)
        self.reduction: Reduction | None = None
        self.models: list[GradientBuffers] = []
        self._names = self._names_of_parameters()
        self._aux_scale = 1.0
        self._biases: list[tuple[Tensor, Tensor]] = []

    def initialise(self) -> None:
        """Fill every tensor from a generator keyed by its checkpoint name."""
        std, seed = self.config.model.language.init_std, self.config.train.seed
        with torch.no_grad():
            for view in self.views(buffers=True):
                initialise(view.name, view.data, std, seed)

    def add_gradient_buffers(self) -> None:
        """Wrap the chunks in Megatron-Core's gradient buffers; `models` are the wrapped chunks."""
        self.models = [
            GradientBuffers(
                self.engine,
                chunk,
                fp32=self.dtype != torch.float64,
                complete=self._complete,
                rest=self._all_complete,
            )
            for chunk in self.chunks
        ]

    def apply_memory_policy(self) -> None:
        """Apply the policy for saved activations to all chunks; see docs/MEMORY.md."""
        train, device = self.config.train, self.mesh.device
        host = HostMemory(device, int(train.offload_min_mib * 2**20)) if train.offload else None
        # Under context parallelism the row is always recomputed, whatever `train.recompute` says.
        kinds = [*train.recompute, "row"] if self.mesh.num_cp > 1 else train.recompute
        self.policy = Policy(kinds, fp8=train.fp8_storage, host=host)
        for chunk in self.chunks:
            apply(self.policy, chunk.modules(), chunk.parameters())

    def connect_schedule(self) -> None:
        """Choose Megatron-Core's pipeline schedule and set its callbacks."""
        self.schedule = get_forward_backward_func()
        no_sync = [model.no_sync for model in self.models]
        self.engine.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        # Without a token count, `finalize_model_grads` sums the norm gradients of tensor-parallel
        # ranks and updates the routing biases, but does not divide; `kimi_pretrain.update` does.
        self.engine.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: (
            finalize_model_grads(model, None, **kwargs)
        )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.engine.moe_grad_scale_func = lambda: torch.tensor([self._aux_scale], dtype=wide)

    def views(self, *, buffers: bool = False) -> Iterator[View]:
        """Yield the full checkpoint tensors that this rank holds; see `param_names`."""
        yield from map(self.full_params.of, self._slices(buffers=buffers))

    def _slices(self, *, buffers: bool = False) -> Iterator[View]:
        """Yield the same tensors as views of the model's own parameters, which may be slices."""
        mesh = self.mesh
        local = self.config.model.language.num_experts // mesh.num_expert_ranks
        tp = dict(tp_rank=mesh.tp_rank, num_tp=mesh.num_tp)
        for chunk in self.chunks:
            yield from views(chunk, mesh.expert_rank * local, buffers=buffers, **tp)

    def train_step(self, microbatches: list[Microbatch], aux_scale: float) -> BackboneResult:
        """Run forward and backward of all microbatches and sum gradients over replicas (phase 4).

        When this returns, `reduction` has placed each sum on the rank that owns the tensor.

        Args:
            microbatches: the microbatches of this replica, in order.
            aux_scale: loss tokens / tokens of the global batch. Megatron-Core weights the routers'
                balance loss by tokens; this factor makes its share of the divided gradient exact.
        """
        self.full_params.copy_to_model()
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.policy.begin_step()
        self._aux_scale = aux_scale
        self._biases = [(bias, bias.clone()) for bias in self._routing_biases()]
        found = self._run(microbatches, self._forward_step, forward_only=False)
        if self.trainable:
            assert self.reduction is not None, "set `reduction` first: it sums the gradients"
            self.full_params.gather_grads()
            self.reduction.finish()
        return self._summed(found)

    def undo_routing_biases(self) -> None:
        """Restore the routing biases from before the step, because its update was skipped.

        Megatron-Core updates them inside the schedule, before the gradient is known to be finite.
        """
        for bias, before in self._biases:
            bias.copy_(before)

    def _summed(self, found: list[dict[str, Tensor]]) -> BackboneResult:
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for one in found:
            total += one["loss_sum"]
        return BackboneResult(total, [one["losses"] for one in found])

    @torch.no_grad()
    def losses(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Run only the forward pass and return the losses, as in `BackboneResult.losses`."""
        self.full_params.copy_to_model()
        for model in self.models:
            model.eval()
        return self._summed(self._run(microbatches, self._forward_step, forward_only=True)).losses

    @torch.no_grad()
    def evaluate(self, microbatches: list[Microbatch], collect) -> BackboneResult:
        """Run only the forward pass; the last stage calls `collect(logits [1, tokens, vocab])`."""
        self.full_params.copy_to_model()
        for model in self.models:
            model.eval()
        step = partial(self._logits_step, collect)
        outputs = self._run(microbatches, step, forward_only=True, collect_non_loss_data=True)
        return BackboneResult(torch.zeros((), dtype=torch.float64), outputs=outputs)

    def take_max_logits(self) -> dict[int, Tensor]:
        """Return the largest logits since the last call: global layer (from 0) -> [heads]."""
        return {
            module.layer_number - 1: module.take_max_logits()
            for chunk in self.chunks
            for module in chunk.modules()
            if isinstance(module, PackedCoreAttention)
        }

    def routers(self) -> Iterator[tuple[int, PaddingAwareRouter]]:
        """Yield this rank's routers, each with its global layer (from 0)."""
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, PaddingAwareRouter):
                    assert module.layer_number is not None
                    yield module.layer_number - 1, module

    def grad_of(self, view: View) -> Tensor:
        """Return the gradient of one tensor, as a view into the buffer.

        After a step it is the sum over the replicas if this rank owns the tensor. The backbone must
        be `trainable`.
        """
        if view.name in self.full_params.grads:
            return self.full_params.grads[view.name]
        return view.of(view.param.main_grad)  # type: ignore[attr-defined]

    def gradient_order(self) -> list[str]:
        """Return the names of all trained tensors in the order of their complete gradients.

        The last backward pass completes the last chunk first, and each chunk from its end. Tensors
        of one fused parameter keep their order in memory.
        """
        if not self.trainable:
            return []
        return [name for names in reversed(self._names.values()) for name in names]

    def sum_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups that sum gradients of "dense" and "expert" tensors.

        All tensor-parallel ranks have the same full gradient of a dense tensor, so the dense group
        of a rank contains only the ranks with the same tensor-parallel index.
        """
        return {
            "dense": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "expert": self.mesh.groups["expert"],
        }

    def _names_of_parameters(self) -> dict[Tensor, list[str]]:
        names: dict[Tensor, list[str]] = {}
        for view in self._slices():
            names.setdefault(view.param, []).append(view.name)
        return names

    def _complete(self, param: nn.Parameter) -> None:
        # Under tensor parallelism the gradient of a parameter is not complete yet: it is a slice,
        # or, for a norm, a partial sum.
        if self.reduction is not None and self.mesh.num_tp == 1:
            for name in self._names[param]:
                self.reduction.ready(name)

    def _all_complete(self) -> None:
        # Launch before `finalize_model_grads` issues collectives on other groups of the same ranks:
        # all ranks must issue all collectives in the same order.
        if self.reduction is not None and self.mesh.num_tp == 1 and self.trainable:
            self.reduction.launch_rest()

    def _routing_biases(self) -> list[Tensor]:
        named = self.views(buffers=True)
        return [v.data for v in named if v.name.endswith("e_score_correction_bias")]

    def _run(self, microbatches, forward_step, **options) -> list[Any]:
        virtual = self.config.layout.vpp > 1
        rows = self.config.train.rows_per_microbatch
        each = [iter(microbatches) for _ in self.models]
        results = self.schedule(
            forward_step_func=forward_step,
            data_iterator=each if virtual else each[0],
            model=self.models if virtual else self.models[0],
            num_microbatches=len(microbatches),
            seq_length=rows * self.config.data.seq_len,
            micro_batch_size=1,
            **options,
        )
        for chunk in self.chunks:
            chunk.forget_plans()
        return results

    def _forward_step(
        self, microbatches: Iterator[Microbatch], model, return_schedule_plan: bool = False
    ):
        # With overlapped experts, the schedule passes the unwrapped chunk, requests a plan of its
        # forward pass, and interleaves its layers with another microbatch's backward pass.
        batch = next(microbatches)
        forward = model.build_schedule_plan if return_schedule_plan else model
        return self.forward(batch, model, batch.labels, forward), partial(
            _sum_loss, batch.loss_mask
        )

    def _logits_step(self, collect, microbatches: Iterator[Microbatch], model):
        logits = self.forward(next(microbatches), model, None)
        return logits, lambda logits, non_loss_data: collect(logits)

    def forward(self, batch: Microbatch, model, labels: Tensor | None, forward=None):
        """Return the output of `forward` (by default the model) for a microbatch."""
        chunk = getattr(model, "module", model)
        embedded = self._embed(batch, chunk) if chunk.pre_process else None
        return (forward or model)(
            input_ids=batch.tokens,
            position_ids=None,
            attention_mask=None,
            decoder_input=embedded,
            labels=labels if chunk.post_process else None,
            packed_seq_params=batch.packed,
            padding_mask=batch.padding,
        )

    def _embed(self, batch: Microbatch, chunk) -> Tensor:
        """Return text embeddings with the vision leaf inserted, [tokens of this part, 1, hidden].

        Under tensor parallelism the text embeddings are already scattered over the parts. The
        embedding is called even for rows without text; otherwise its gradient would never be
        reported as complete.
        """
        embedded = chunk.embedding(input_ids=batch.tokens, position_ids=None)
        if not self.trainable and torch.is_grad_enabled():
            # Every rank must run the backward pass, even without media, because it has collectives.
            embedded.requires_grad_()
        vision = batch.leaf if batch.media is None else batch.media()
        if vision is None:
            return embedded
        flat = rearrange(embedded, "t 1 h -> t h")
        # An offloaded leaf is in host memory, and so is its gradient.
        flat = flat.index_copy(0, batch.leaf_positions, vision.to(flat, non_blocking=True))
        return rearrange(flat, "t h -> t 1 h")


def _sum_loss(loss_mask: Tensor, losses: Tensor):
    """Return (sum of the unmasked token losses, their count, results to keep)."""
    counted = (losses * loss_mask).sum()
    # Copy, because the combined schedule frees the storage of this node's inputs on CUDA.
    found = {"loss_sum": counted.detach().double().clone(), "losses": losses.detach().clone()}
    return counted, loss_mask.sum().int(), found
