"""The routed experts of one rank as one grouped product, the same code on CPU and GPU.

`torch.nn.functional.grouped_mm` multiplies each expert's tokens with that expert's matrix in one
call. The weights are 3-D, [experts, out, in], so that one expert's slice is exactly the matrix of
the Hugging Face checkpoint.

Shape suffixes: T tokens sorted by expert, E local experts, H hidden, F expert FFN width.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from kimi_pretrain.memory.pointwise import swiglu
from kimi_pretrain.memory.saved import Saves, trimmed


def grouped_linear(x_TI: Tensor, weight_EOI: Tensor, tokens_E: Tensor) -> Tensor:
    """Apply `x @ weight[e].T` to each expert's run of tokens.

    Args:
        x_TI: [tokens, in], sorted by expert.
        weight_EOI: [experts, out, in].
        tokens_E: how many tokens each expert has, integers [experts]; zero is fine.

    Returns:
        [tokens, out].
    """
    known = (torch.bfloat16,) if x_TI.is_cuda else (torch.bfloat16, torch.float32)
    if x_TI.dtype not in known:  # the kernel has no fp64, and on CUDA is specified for bf16 alone
        return grouped_linear_reference(x_TI, weight_EOI, tokens_E)
    ends_E = tokens_E.cumsum(0).to(device=x_TI.device, dtype=torch.int32)
    y_TO = F.grouped_mm(x_TI, rearrange(weight_EOI, "e o i -> e i o"), offs=ends_E)
    if y_TO.requires_grad:
        # The CPU kernel's backward refuses expanded gradients (a broadcast sum's, for example).
        y_TO.register_hook(torch.Tensor.contiguous)
    return y_TO


def grouped_linear_reference(x_TI: Tensor, weight_EOI: Tensor, tokens_E: Tensor) -> Tensor:
    """Return the same by a loop over experts: the plain twin."""
    runs = x_TI.split(tokens_E.tolist())
    return torch.cat([run @ weight.T for run, weight in zip(runs, weight_EOI, strict=True)])


class GroupedExperts(Saves, MegatronModule):
    """SwiGLU experts of this rank, for the `experts` place of Megatron-Core's MoE layer.

    `gate_up` [E, 2F, H] holds the gate projection above the up projection; `down` is [E, H, F].
    """

    def __init__(self, num_local_experts, config, *, pg_collection=None, name=None):
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up = self._weight(num_local_experts, 2 * ffn, hidden)
        self.down = self._weight(num_local_experts, hidden, ffn)

    def _weight(self, experts: int, out: int, inner: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(experts, out, inner, dtype=self.config.params_dtype))
        # False sends the gradient to the expert-data-parallel group: other expert-parallel ranks
        # hold other experts, and tensor-parallel ranks, which the dense group leaves out, the same.
        config = self.config
        weight.allreduce = (
            config.expert_model_parallel_size * config.tensor_model_parallel_size == 1
        )
        return weight

    def forward(self, x_TH: Tensor, tokens_E: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """Return [tokens, hidden] weighted by the router, and no bias.

        Args:
            x_TH: dispatched tokens, sorted by local expert.
            tokens_E: tokens of each local expert.
            probs_T: the router's weight of each token.
        """
        policy = self.policy
        with policy.saving():
            x_TH = policy.squeezed(x_TH)
            gate_up_TF = policy.squeezed(grouped_linear(x_TH, self.gate_up, tokens_E))
            # The weight multiplies before the down projection: linear, so the same, and F < H.
            inner_TF = policy.remade("swiglu", swiglu, gate_up_TF, probs_T)
            return grouped_linear(inner_TF, self.down, tokens_E), None

    def backward_dw(self) -> None:
        """Weight gradients are not split from the backward here."""


class ExpertLayer(MoELayer):
    """Megatron-Core's MoE layer, keeping the places of the tokens that are sent and no others.

    To put tokens into the order of experts it sorts all places of tokens x experts and saves the
    first of them as a view, which holds all: with K2's 384 experts 3,072 bytes a token for 64.
    """

    def preprocess(self, *args, **kwargs):
        """Return tokens in the order of experts, and their weights."""
        with trimmed():
            return super().preprocess(*args, **kwargs)


class PaddingAwareRouter(Saves, TopKRouter):
    """Megatron-Core's router, counting real tokens only, and those of all ranks that share a row.

    0.19.2 combines its flat padding mask [tokens] with the routing map [tokens, experts] without
    the missing axis, which fails for any batch with padding. Its balance loss is weighed by the
    ranks that share the row times the tokens that it takes for this rank's, and these are the row's
    already: the count was summed in place.

    Attributes:
        padding_of_plan: padding of the microbatch whose plan runs, bool [1, tokens], None outside a
            schedule; read where the schedule gives no mask, see `language_model`.
    """

    padding_of_plan: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None, *args, **kwargs):
        """Return probabilities and the routing map, both [tokens, experts].

        Args:
            input: [tokens, 1, hidden].
            padding_mask: True at padding, bool [tokens, 1].
        """
        if padding_mask is None and self.padding_of_plan is not None:
            padding_mask = rearrange(self.padding_of_plan, "1 t -> t 1")
        with self.policy.saving():
            return super().forward(input, padding_mask, *args, **kwargs)

    def _apply_seq_aux_loss(
        self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask=False
    ):
        """Attach the balance loss of the row, times its real tokens, to the probabilities.

        The counts are those of the whole row, the scores this rank's: the gradients of the ranks
        add up to the row's.

        Args:
            probs: of the chosen experts, [tokens, experts]; returned as they are.
            scores_for_aux_loss, routing_map: [tokens, experts], zero at padding.
            seq_length, bsz: of this rank; rows are laid end to end, so `bsz` is 1.
        """
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        assert bsz == 1, bsz
        counts_E = routing_map.sum(dim=0)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts_E, group=self.tp_cp_group)
        # A row may be all padding, where tombstones took its samples out: its loss is 0, not 0 / 0.
        tokens = (counts_E.sum() / self.topk).clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=counts_E,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * tokens)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None):
        if padding_mask is not None:
            padding_mask = rearrange(padding_mask, "t -> t 1")
        super()._apply_expert_bias(routing_map, padding_mask)
