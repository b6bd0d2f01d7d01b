"""Routed experts of one rank as a grouped matrix product, with the same code on CPU and GPU.

`torch.nn.functional.grouped_mm` multiplies each expert's tokens by that expert's matrix in one
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
        tokens_E: number of tokens of each expert, integers [experts]; may be zero.

    Returns:
        [tokens, out].
    """
    known = (torch.bfloat16,) if x_TI.is_cuda else (torch.bfloat16, torch.float32)
    if x_TI.dtype not in known:  # the kernel lacks fp64, and CUDA only specifies bf16
        return grouped_linear_reference(x_TI, weight_EOI, tokens_E)
    ends_E = tokens_E.cumsum(0).to(device=x_TI.device, dtype=torch.int32)
    y_TO = F.grouped_mm(x_TI, rearrange(weight_EOI, "e o i -> e i o"), offs=ends_E)
    if y_TO.requires_grad:
        # The CPU kernel's backward rejects expanded gradients, such as the gradient of a sum.
        y_TO.register_hook(torch.Tensor.contiguous)
    return y_TO


def grouped_linear_reference(x_TI: Tensor, weight_EOI: Tensor, tokens_E: Tensor) -> Tensor:
    """Return the same result with a plain loop over experts."""
    runs = x_TI.split(tokens_E.tolist())
    return torch.cat([run @ weight.T for run, weight in zip(runs, weight_EOI, strict=True)])


class GroupedExperts(Saves, MegatronModule):
    """SwiGLU experts of this rank; the `experts` submodule of Megatron-Core's MoE layer.

    `gate_up` [E, 2F, H] holds the gate projection, then the up projection; `down` is [E, H, F].
    """

    def __init__(self, num_local_experts, config, *, pg_collection=None, name=None):
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up = self._weight(num_local_experts, 2 * ffn, hidden)
        self.down = self._weight(num_local_experts, hidden, ffn)

    def _weight(self, experts: int, out: int, inner: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(experts, out, inner, dtype=self.config.params_dtype))
        # False reduces the gradient over the expert-data-parallel group. The dense group would be
        # wrong: its expert-parallel ranks hold other experts, and it lacks the tensor-parallel
        # ranks, which hold copies of these experts.
        config = self.config
        weight.allreduce = (
            config.expert_model_parallel_size * config.tensor_model_parallel_size == 1
        )
        return weight

    def forward(self, x_TH: Tensor, tokens_E: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """Return the output weighted by the router, [tokens, hidden], and None for the bias.

        Args:
            x_TH: dispatched tokens, sorted by local expert.
            tokens_E: number of tokens of each local expert.
            probs_T: the router's weight of each token.
        """
        policy = self.policy
        with policy.saving():
            x_TH = policy.squeezed(x_TH)
            gate_up_TF = policy.squeezed(grouped_linear(x_TH, self.gate_up, tokens_E))
            # The down projection is linear, so weighting its input is exact, and cheaper as F < H.
            inner_TF = policy.remade("swiglu", swiglu, gate_up_TF, probs_T)
            return grouped_linear(inner_TF, self.down, tokens_E), None

    def backward_dw(self) -> None:
        """Do nothing: these experts do not delay their weight gradients."""


class ExpertLayer(MoELayer):
    """Megatron-Core's MoE layer, saving only the indices of dispatched tokens.

    To order tokens by expert, Megatron-Core sorts the whole tokens x experts map and saves a view
    of its first entries, which keeps the whole result alive: with K2's 384 experts this is 3,072
    bytes a token where 64 suffice.
    """

    def preprocess(self, *args, **kwargs):
        """Return the tokens ordered by expert, and their weights."""
        with trimmed():
            return super().preprocess(*args, **kwargs)


class PaddingAwareRouter(Saves, TopKRouter):
    """Megatron-Core's router, counting only real tokens, over all ranks that share a row.

    Two bugs of 0.19.2 are corrected. It combines its flat padding mask [tokens] with the routing
    map [tokens, experts] without adding the missing axis, which fails for any batch with padding.
    It also multiplies the balance loss by the number of ranks that share the row and by their token
    count, which was summed over these ranks in place and is already the count of the whole row.

    Attributes:
        padding_of_plan: padding of the microbatch whose plan runs, bool [1, tokens]; None outside a
            schedule. Used if the schedule passes no mask; see `language_model`.
    """

    padding_of_plan: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None, *args, **kwargs):
        """Return the probabilities and the routing map, both [tokens, experts].

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
        """Attach the row's balance loss, times its number of real tokens, to the probabilities.

        The counts cover the whole row and the scores only this rank's tokens, so the gradients of
        the ranks add up to the gradient of the row.

        Args:
            probs: probabilities of the chosen experts, [tokens, experts]; returned unchanged.
            scores_for_aux_loss, routing_map: [tokens, experts], zero at padding.
            seq_length, bsz: sizes on this rank; rows are laid end to end, so `bsz` is 1.
        """
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        assert bsz == 1, bsz
        counts_E = routing_map.sum(dim=0)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts_E, group=self.tp_cp_group)
        # If tombstones removed all samples of a row, it is all padding and its loss must be 0.
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
