"""Time that storage adds to a step: loader reads and checkpoint stalls. Pure.

Each rank reads its rows and media: ranges of shards, which `get_many` merges, or blocks of the
node's cache. Checkpoints are divided among the ranks as in a save. An asynchronous save stalls
training only if its copy is not finished when the weights change, or if the next save is due before
it is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from data_pipeline.cache.cached_store import RUN_BYTES
from data_pipeline.index.columns import SourceIndex
from data_pipeline.plan.planner import GlobalPlan
from data_pipeline.store.objects import MAX_GAP, range_starts
from kimi_pretrain.checkpoint.sharding import assign_writers
from kimi_pretrain.config import ITEMSIZE, Config
from kimi_pretrain.dep.vision_plan import VisionPlan
from kimi_pretrain.memory.states import Sizes, divide_config, replica_groups
from kimi_pretrain.optim.groups import MOMENTS
from kimi_pretrain.tools.optimizer_division import Division

Ints = NDArray[np.int64]
FOREVER = float("inf")


# Reads --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReads:
    """Reads of the nodes from storage in one step, including gaps between merged ranges.

    Attributes:
        bytes, requests: per node, int64 [nodes].
    """

    bytes: Ints
    requests: Ints

    def seconds(self, config: Config, storage: float | None) -> float:
        """Return the seconds of the slowest node's reads; unknown limits count as unbounded.

        Args:
            storage: bandwidth of a node, bytes/s; None: not known.
        """
        by_bytes = self.bytes / (FOREVER if storage is None else storage)
        by_requests = self.requests / (config.data.requests_per_second or FOREVER)
        return float(np.maximum(by_bytes, by_requests).max())


class Reading:
    """Counts the reads of consecutive steps; a cache holds the blocks that earlier steps read.

    The cache is empty before the first step and never evicts.

    Args:
        indices: of the sources, as plans number them.
    """

    def __init__(self, config: Config, indices: Sequence[SourceIndex]):
        self.config, self.indices = config, indices
        shards = [len(index.shards) for index in indices]
        self._first_shard = np.cumsum([0, *shards])
        self._sizes = np.array([one.size for index in indices for one in index.shards], np.int64)
        self._cached = np.zeros(0, np.int64)

    def of(self, plan: GlobalPlan, vision: VisionPlan) -> StepReads:
        """Return the reads of a step.

        Args:
            vision: assignment of media to ranks; the rank that encodes a medium also reads it.
        """
        layout, per_node = self.config.layout, self.config.dep.ranks_per_node
        nodes = -(-layout.world_size() // per_node)
        ranks, shard, begin, length = self._spans(plan, vision)
        some = length > 0
        ranks, shard, begin, length = ranks[some], shard[some], begin[some], length[some]
        if not len(ranks):
            return StepReads(np.zeros(nodes, np.int64), np.zeros(nodes, np.int64))
        cache = self.config.data.cache
        if cache is not None:
            return self._blocks(ranks // per_node, shard, begin, length, nodes, cache.block_bytes)
        key = ranks * len(self._sizes) + shard
        order = np.lexsort((length, begin, key))
        key, begin, length = key[order], begin[order], length[order]
        first, reach = range_starts(key, begin, length, MAX_GAP)
        last = np.append(first[1:], len(key)) - 1
        node = key[first] // len(self._sizes) // per_node
        return _per_node(node, reach[last] - begin[first], nodes)

    def _spans(self, plan: GlobalPlan, vision: VisionPlan) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (rank, shard, begin, length) of every document and medium that a rank reads.

        First and last stages read the rows of their replica, as in `step.needs`.
        """
        layout, samples, items = self.config.layout, plan.samples, plan.items
        replica = samples.row.astype(np.int64) // (plan.num_rows // layout.dp)
        shared, per_stage = layout.cp * layout.tp, layout.world_size() // layout.pp
        parts = list[tuple[Ints, Ints, Ints, Ints]]()
        for number, index in enumerate(self.indices):
            at = self._first_shard[number]
            mine = np.flatnonzero(samples.source == number)
            line = samples.index[mine]
            document = at + index.shard[line], index.json_offset[line], index.json_length[line]
            for stage in sorted({0, layout.pp - 1}):
                for member in range(shared):
                    rank = stage * per_stage + replica[mine] * shared + member
                    parts.append((rank, *document))
            media = np.flatnonzero(samples.source[items.sample] == number)
            line = items.index_line[media]
            sample = np.searchsorted(index.item_ptr, line, side="right") - 1
            file = at + index.shard[sample], index.item_offset[line], index.item_length[line]
            parts.append((vision.rank[media], *file))
        rank, shard, begin, length = (np.concatenate(column) for column in zip(*parts))
        return rank, shard, begin, length

    def _blocks(
        self, node: Ints, shard: Ints, begin: Ints, length: Ints, nodes: int, size: int
    ) -> StepReads:
        """Return the reads of blocks missing in a node's cache; adjacent blocks share a request."""
        # Block numbers per shard; one spare number keeps blocks of different shards non-adjacent.
        most = int(-(-self._sizes.max() // size)) + 1
        first, end = begin // size, -(-(begin + length) // size)
        spans = np.repeat(np.arange(len(first)), end - first)
        before = np.cumsum(end - first) - (end - first)
        block = first[spans] + np.arange(len(spans)) - before[spans]
        one = (node[spans] * len(self._sizes) + shard[spans]) * most + block
        missing = np.setdiff1d(one, self._cached)
        self._cached = np.union1d(self._cached, missing)
        place, block = missing // most, missing % most
        node, shard = place // len(self._sizes), place % len(self._sizes)
        sizes = np.minimum(size, self._sizes[shard] - block * size)
        read = np.bincount(node, sizes, nodes).astype(np.int64)
        # Runs of adjacent blocks of one shard, split at the maximum size of a request.
        fresh = np.ones(len(missing), np.bool_)
        fresh[1:] = np.diff(missing) > 1
        heads = np.flatnonzero(fresh)
        long = np.diff(np.append(heads, len(missing)))
        requests = -(-long // max(1, RUN_BYTES // size))
        return StepReads(read, np.bincount(node[heads], requests, nodes).astype(np.int64))


def _per_node(node: Ints, sizes: Ints, nodes: int) -> StepReads:
    read = np.bincount(node, sizes, nodes).astype(np.int64)
    return StepReads(read, np.bincount(node, minlength=nodes).astype(np.int64))


def loader_wait(config: Config, reading: float, step: float) -> float:
    """Return the seconds that a step waits for data, which are prefetched during the step before.

    Args:
        reading: seconds of the reads.
        step: seconds of a step without this wait.
    """
    return reading if not config.data.prefetch_steps else max(0.0, reading - step)


# Checkpoints --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """One checkpoint of a run that saves periodically.

    Attributes:
        host: bandwidth from a rank's device to host memory, bytes/s.
        storage: bandwidth of a node, bytes/s; None: not known.
        given: seconds of the stall; None: computed from the other values.
        division: of the optimizer's state.
    """

    config: Config
    host: float
    storage: float | None
    given: float | None
    division: Division

    @cached_property
    def bytes(self) -> Ints:
        """Bytes that each rank writes, int64 [ranks]."""
        return checkpoint_bytes(self.config, self.division)

    @property
    def copying(self) -> float:
        """Seconds in which the rank with the largest share copies it into host memory."""
        return float(self.bytes.max()) / self.host

    @property
    def writing(self) -> float | None:
        """Seconds in which the slowest node writes; None if its bandwidth is not known."""
        if self.storage is None:
            return None
        first = np.arange(0, len(self.bytes), self.config.dep.ranks_per_node)
        return float(np.add.reduceat(self.bytes, first).max()) / self.storage

    def stall(self, step: float, until_update: float) -> float:
        """Return the seconds that a save stalls training.

        Args:
            step: seconds of a step without stalls.
            until_update: seconds of the step before the update, in which the copy can run.
        """
        if self.given is not None:
            return self.given
        checkpoint = self.config.checkpoint
        if not checkpoint.asynchronous:
            return self.copying + (self.writing or 0.0)
        assert checkpoint.every is not None
        apart = checkpoint.every * step
        if self._is_hidden(until_update, apart):
            return 0.0
        # The next save waits for this one, whose writing starts after its copy.
        left = self.copying + (self.writing or 0.0) - apart
        return max(0.0, self.copying - until_update, left)

    def _is_hidden(self, until_update: float, apart: float) -> bool:
        """Return whether the save would be hidden even if every rank wrote all that it holds.

        This bound avoids the choice of writers, which takes a second.
        """
        copying = self._most / self.host
        node = self._most * self.config.dep.ranks_per_node
        writing = 0.0 if self.storage is None else node / self.storage
        return copying <= until_update and copying + writing <= apart

    @cached_property
    def _most(self) -> float:
        """Upper bound on the bytes of weights and optimizer state of any rank."""
        sizes, item = Sizes.of(self.config), ITEMSIZE[self.config.train.dtype]
        weights = item * (max(sum(stage) for stage in sizes.stages) + sizes.encoder[0])
        return weights + max(load.state_bytes for load in self.division.loads)


def plan_save(
    config: Config,
    host: float,
    storage: float | None,
    given: float | None = None,
    division: Division | None = None,
) -> Save | None:
    """Return the periodic save of a run; None if it saves nothing periodically.

    Args:
        host, storage, given: as in `Save`.
        division: of the optimizer's state, if it is known.
    """
    if config.checkpoint.every is None:
        return None
    return Save(config, host, storage, given, division or divide_config(config))


def checkpoint_bytes(config: Config, division: Division) -> Ints:
    """Return the bytes of a checkpoint that each rank writes, int64 [ranks].

    Counts weights and optimizer state, with the writers that a save chooses; routing biases and the
    small files are left out.
    """
    held: list[dict[str, int]] = [{} for _ in division.loads]
    for group in replica_groups(config, trained=False):
        weights = {one.name: one.elements * one.itemsize for one in group.tensors}
        for rank in group.ranks:
            held[rank].update(weights)
    for group, costs, owners in zip(division.groups, division.costs, division.owners, strict=True):
        for one in group.tensors:
            parts = MOMENTS["muon" if costs[one.name].is_muon else "adamw"]
            parts = (*parts, "master") if one.itemsize < 4 else parts
            state = {f"optim.{part}.{one.name}": one.elements * max(4, one.itemsize)
                     for part in parts}  # fmt: skip
            for rank in group.ranks if owners is None else (owners[one.name],):
                held[rank].update(state)
    sizes = {name: size for mine in held for name, size in mine.items()}
    written = np.zeros(len(held), np.int64)
    for name, rank in assign_writers(held).items():
        written[rank] += sizes[name]
    return written
