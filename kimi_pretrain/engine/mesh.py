"""Device mesh: one object that holds all ranks, sizes and process groups.

World size = pipeline stages x replicas x context-parallel x tensor-parallel ranks. The ranks of a
stage and replica share its rows: each context-parallel rank holds some of the tokens
(`kimi_pretrain.parallel.sequence`), each tensor-parallel rank some of the heads and widths. Experts
are distributed over all ranks of a stage.

The ranks of three kinds of groups hold identical copies of parameters: "dense" (the ranks of one
stage; tensor-parallel ranks keep full tensors next to their slices, see `engine.tp_full_params`),
"expert" (the ranks with the same slice of the experts) and "encoder" (all ranks, because every rank
has the vision encoder).
"""

import gc
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from kimi_pretrain.engine import host
from kimi_pretrain.parallel.errors import Outcome
from kimi_pretrain.parallel.layout import LayoutConfig
from kimi_pretrain.parallel.rendezvous import meeting_store, own_store

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """Coordinates and process groups of this rank.

    Attributes:
        rank, world_size: global rank and size of the job.
        stage, num_stages: pipeline rank and size.
        replica, num_replicas: data-parallel rank and size; the ranks of a replica share its rows.
        expert_rank, num_expert_ranks: index of this rank's slice of the experts, number of slices.
        groups: "dense", "expert", "encoder" -> process group whose ranks hold identical copies.
        cp_rank, num_cp: context-parallel rank and size.
        tp_rank, num_tp: tensor-parallel rank and size.
    """

    rank: int
    world_size: int
    device: torch.device
    stage: int
    num_stages: int
    replica: int
    num_replicas: int
    expert_rank: int
    num_expert_ranks: int
    groups: dict[str, dist.ProcessGroup]
    cp_rank: int = 0
    num_cp: int = 1
    tp_rank: int = 0
    num_tp: int = 1

    @property
    def is_first_stage(self) -> bool:
        """True if this rank embeds tokens and receives the vision embeddings."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes the loss."""
        return self.stage == self.num_stages - 1

    @property
    def counts_loss(self) -> bool:
        """True if sums over all ranks include this rank's losses and loss tokens.

        Context-parallel ranks hold different tokens; tensor-parallel ranks hold the same tokens.
        """
        return self.is_last_stage and self.tp_rank == 0

    @property
    def part(self) -> int:
        """Index of this rank's part of its replica's rows; see `parallel.sequence`."""
        return self.cp_rank * self.num_tp + self.tp_rank

    def sum(self, values: list[float]) -> list[float]:
        """Return element-wise sums over all ranks, in fp64."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Return element-wise maxima over all ranks, in fp64."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def sum_(self, values: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place, without a device synchronisation."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM)

    def max_(self, values: torch.Tensor) -> None:
        """Compute element-wise maxima over all ranks in place, without a device synchronisation."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)

    def differing(self, group: str, values: list[float]) -> list[int]:
        """Return the indices where the values differ between ranks of a group."""
        both = torch.tensor([values, [-value for value in values]], dtype=torch.float64)
        both = both.to(self.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.groups[group])
        return torch.nonzero(both[0] != -both[1]).flatten().tolist()

    def all_gather_object(self, value: object) -> list[object]:
        """Return the (small) objects of all ranks, in rank order, on every rank.

        torch's function of this name copies from a CUDA device once for every rank, and
        synchronises each time. This one makes two copies for any number of ranks: the lengths, and
        the pickles, all padded to the longest.
        """
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([len(mine)], dtype=torch.int64)).tolist()
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        sent = self._all_gather(padded).cpu().numpy().data
        starts = range(0, longest * self.world_size, longest)
        return [
            pickle.loads(sent[at : at + length]) for at, length in zip(starts, lengths, strict=True)
        ]

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and broadcast its result; all ranks raise its exception."""
        outcome = Outcome.of(make) if self.rank == 0 else Outcome()
        sent = [outcome.sendable()]
        dist.broadcast_object_list(sent, src=0)
        return (outcome if self.rank == 0 else sent[0]).result()

    def index_in(self, group: str) -> tuple[int, int]:
        """Return this rank's index in a group of `groups`, and the group's size."""
        return dist.get_rank(self.groups[group]), dist.get_world_size(self.groups[group])

    def broadcast_copies(self, group: str, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast tensors in place; the i-th comes from member i % n of the group."""
        ranks = dist.get_process_group_ranks(self.groups[group])
        for index, tensor in enumerate(tensors if len(ranks) > 1 else ()):
            sent = tensor.detach().to(self.device).contiguous()
            # Sent as bytes, because not every backend supports every dtype.
            flat = sent.view(-1).view(torch.uint8)
            dist.broadcast(flat, ranks[index % len(ranks)], group=self.groups[group])
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the concatenated vectors of all ranks, which have equal lengths, on the device."""
        mine = mine.to(self.device)
        everyone = mine.new_empty(self.world_size * len(mine))
        dist.all_gather_into_tensor(everyone, mine)
        return everyone

    def _all_reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


def start(layout: LayoutConfig, timeout_seconds: float = 600.0) -> Mesh:
    """Join the job and build all process groups; a world size of one needs no launcher.

    Raises:
        ValueError: the number of processes differs from the layout's world size.
    """
    device = host.enable()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != layout.world_size():
        raise ValueError(
            f"{world_size} processes were started, the layout needs layout.pp={layout.pp} x "
            f"layout.dp={layout.dp} x layout.cp={layout.cp} x layout.tp={layout.tp} = "
            f"{layout.world_size()}; "
            f"start it with torchrun --nproc-per-node {layout.world_size()}"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    store = meeting_store(world_size, timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        rank = int(os.environ.get("RANK", "0"))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    return build(layout, device, timeout_seconds)


@contextmanager
def alone() -> Iterator[Mesh]:
    """Yield a mesh of only this process, even if the launcher started several.

    No other mesh may exist; the mesh is destroyed at the end.
    """
    device = host.enable()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=own_store(), rank=0, world_size=1)
    try:
        yield build(LayoutConfig(), device)
    finally:
        gc.collect()  # models have reference cycles, which keep process groups and their threads
        stop()


def build(layout: LayoutConfig, device: torch.device, timeout_seconds: float = 600.0) -> Mesh:
    """Build the mesh over an already initialised process group, which may be a fake one."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,  # a second set next to NCCL's, not used here
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # unused: initialisation is seeded by name
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank()
    cp_rank = parallel_state.get_context_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    # Megatron's rank order is tp-cp-dp-pp: the parts of a replica have adjacent ranks.
    parts = layout.cp * layout.tp
    if layout.tp > 1:
        dense = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rank = dist.get_rank()
    place = (stage * layout.dp + replica) * parts + cp_rank * layout.tp + tp_rank
    assert rank == place, (rank, place, stage, replica, cp_rank, tp_rank, layout)
    return Mesh(
        rank=rank,
        world_size=dist.get_world_size(),
        device=device,
        stage=stage,
        num_stages=layout.pp,
        replica=replica,
        num_replicas=layout.dp,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        num_expert_ranks=layout.ep,
        groups={
            "dense": dense,
            "expert": parallel_state.get_expert_data_parallel_group(),
            "encoder": dist.group.WORLD,
        },
        cp_rank=cp_rank,
        num_cp=layout.cp,
        tp_rank=tp_rank,
        num_tp=layout.tp,
    )


def stop() -> None:
    """Leave the job and destroy all process groups.

    Without this, gloo was seen to abort at exit after a successful run. Megatron-Core only drops
    its references to the groups, and each gloo group keeps threads that wake a hundred times a
    second, which would slow down the later work of this process.
    """
    _, *groups = parallel_state._global_process_group_list or [None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
