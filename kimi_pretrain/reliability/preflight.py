"""Preflight checks: refuse or warn about a run before any of its processes starts.

Every launcher, local or remote, calls `check_start`. It reports all problems that the config and
the indices reveal. Importing this module does not load torch.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from data_pipeline.access import check_tokenizer, open_data, open_tokenizer
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import read_index
from data_pipeline.index.shared import read_shared_index
from data_pipeline.plan.budget import BudgetEnd, budget_end, budget_notices, end_state
from data_pipeline.plan.layout import lay_out
from data_pipeline.plan.once import once
from data_pipeline.plan.planner import GlobalPlan, Planner, State
from data_pipeline.plan.report import blend_report
from data_pipeline.plan.source import choose
from data_pipeline.plan.stage import taken_over
from data_pipeline.plan.tombstones import tombstones_of
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from kimi_pretrain.config import Config, ConfigError
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.optim.schedule import learning_rate, stretches, total_steps
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.siglip.tokenizer import TextTokenizer
from moonvit3d.geometry import grids

log = logging.getLogger("kimi_pretrain.reliability.preflight")


@dataclass(frozen=True)
class Checked:
    """Result of a successful check: indices as in `data.source_names`, plans of the first steps.

    `notices` lists, by source, samples that are selected or do not fit, and where a budget ends the
    run. `end_state` returns the loader state at the end of the run, or shortly before it.
    """

    tokenizer: Tokenizer
    indices: list[SourceIndex]
    plans: list[GlobalPlan]
    notices: list[str] = field(default_factory=list)
    end_state: Callable[[], State] | None = None


def check_start(
    config: Config,
    steps: int = 1,
    patience: float | None = None,
    *,
    data_alone: bool = False,
    ranks_here: int | None = None,
    goes_on: State | None = None,
    to_come: Mapping[str, Callable[[], State]] | None = None,
) -> Checked:
    """Check that a run can start and run its first steps.

    Reads the tokenizer, the indices and the listing of `checkpoint.place`. Builds no model and
    writes nothing.

    Args:
        config: config of the run.
        steps: number of steps to plan, from the first step; 0 for a run that resumes.
        patience: longest wait in seconds for a store that does not answer; None: `data.patience`.
        data_alone: check only the tokenizer and the sources; for callers that save nothing and
            report oversized samples themselves.
        ranks_here: number of ranks on this machine; None if it runs no ranks.
        goes_on: loader state in the checkpoint that a resumed run starts from.
        to_come: maps the folder of an unfinished run to a function that returns the state in which
            it will end. It replaces the folder's newest checkpoint for train.start_optimizer=keep.

    Raises:
        ValueError: invalid tokenizer, sources, mixture weights, sizes, memory or checkpoint place.
        IndexMismatch: a source is damaged or was made with another tokenizer.
        StoreError: `data.root` or the checkpoint place cannot be read or lacks a file.
    """
    wait = config.data.patience if patience is None else min(patience, config.data.patience)
    if config.train.memory_limit_gib is not None:
        from kimi_pretrain.memory.limits import check_memory_limit  # it loads torch

        check_memory_limit(config)
    if config.optim.deepspeed is not None:
        from kimi_pretrain.optim.deepspeed_zero import check_installed  # it loads torch

        check_installed(f"optim.deepspeed={config.optim.deepspeed}")
    if ranks_here is not None and config.train.offload:
        from kimi_pretrain.memory.limits import check_host_memory

        world = config.layout.world_size()
        check_host_memory(
            config, [range(first, first + ranks_here) for first in range(0, world, ranks_here)]
        )
    # Without the cache, which belongs to the run's own processes.
    store = open_data(config.data.replace(cache=None, patience=wait))
    tokenizer, indices = read_sources(config, store)
    if data_alone:
        return Checked(tokenizer, indices, [])
    check_item_sizes(config, indices)
    if config.train.validate_every is not None:
        _check_heldout(config, read_heldout(config, store, tokenizer, indices))
    planner, vision = Planner(indices, config.data), VisionPlanner(config)
    unknown = config.train.memory_limit_gib is not None and config.data.vision_token_ratio is None
    if unknown and (share := blend_report(planner)["vision_token_ratio"]):
        # The first memory check could not know the media ratio, which follows from the sources.
        from kimi_pretrain.memory.limits import check_memory_limit

        data = config.data.replace(vision_token_ratio=share)
        check_memory_limit(config.model_copy(update={"data": data}))
    if goes_on is not None:
        planner.load_state_dict(goes_on)
    elif steps and config.train.start_optimizer == "keep":
        _take_over(planner, config, to_come or {})
    plans, state = list[GlobalPlan](), planner.state_dict()
    for _ in range(steps):
        plan, state = planner.plan(state)
        vision.plan(plan)  # raises if the step does not fit into memory
        plans.append(plan)
    if config.checkpoint.place is not None:
        _check_place(config.checkpoint.place, wait)
    end = budget_end(planner)
    notices = [
        *planner.notices(),
        *budget_notices(end, config.train.steps),
        *_rate_notices(end, config),
    ]
    ends = partial(end_state, planner, config.train.steps)
    return Checked(tokenizer, indices, plans, notices, ends)


def _rate_notices(end: BudgetEnd | None, config: Config) -> list[str]:
    """Warn if a budget ends the run at a different step than the learning-rate schedule.

    The two count different tokens: a budget counts sample tokens, a schedule counts whole rows.
    """
    if end is None or config.train.steps < end.step:
        return []
    placed = stretches(config.optim, config.tokens_per_step())
    falls = [one for one in placed if one.begin_lr > one.segment.lr and one.end > one.start]
    rest = total_steps(config.optim, config.tokens_per_step())
    if not falls or math.isclose(end.step, rest, rel_tol=0.01):
        return []
    rate = learning_rate(end.step - 1, config.optim, config.tokens_per_step())
    last = placed[-1].segment.lr
    return [
        f"data.budget ends the run after {end.step:,} steps with a learning rate of {rate:g}; "
        f"optim's schedule comes to {last:g} at step {rest:,}"
    ]


def read_sources(
    config: Config, store: Store, *, shared: bool = False
) -> tuple[Tokenizer, list[SourceIndex]]:
    """Read the tokenizer and the indices of all sources, and check that they belong together.

    Args:
        shared: share one copy of each index between the processes of this node.

    Raises:
        ConfigError, IndexMismatch, StoreError: see `check_start`.
    """
    tokenizer = load_tokenizer(config, store)
    read = read_shared_index if shared else read_index
    indices = [read(store, name) for name in config.data.source_names]
    for index in indices:
        check_tokenizer(index, tokenizer)
    _check_pairs(config, store, indices)
    return tokenizer, indices


def _check_pairs(config: Config, store: Store, indices: Sequence[SourceIndex]) -> None:
    """Refuse the SigLIP objective without its tokenizer, or if no sample has exactly one item."""
    if config.train.siglip is None:
        return
    TextTokenizer.open(config.train.siglip, config.data, store)
    if not any((np.diff(index.item_ptr) == 1).any() for index in indices):
        names = ", ".join(index.name for index in indices)
        raise ConfigError(
            f"train.siglip: no sample of {names} has one medium: expected a source of images with "
            "captions; add one to data.sources, or set train.siglip=null"
        )


def read_heldout(
    config: Config, store: Store, tokenizer: Tokenizer, trained_on: Sequence[SourceIndex]
) -> list[SourceIndex]:
    """Read the indices of `data.heldout`, and check that training does not draw from them.

    A source with the same content under another name is refused, as is a source that shares shards,
    for example an extended copy. Single samples that are in both are not detected
    (`kimi-pretrain data stats --duplicates` does that).

    Raises:
        ConfigError, IndexMismatch, StoreError: see `check_start`.
    """
    indices = [read_index(store, name) for name in sorted(config.data.heldout)]
    drawn = {shard.sha256: index.name for index in trained_on for shard in index.shards}
    for index in indices:
        check_tokenizer(index, tokenizer)
        shared = (drawn[shard.sha256] for shard in index.shards if shard.sha256 in drawn)
        if (same := next(shared, None)) is not None:
            raise ConfigError(
                f"data.heldout.{index.name} holds the samples of data.sources.{same}: its loss "
                "would be that of training data; give samples that training does not draw"
            )
    check_item_sizes(config, indices)
    return indices


def _check_heldout(config: Config, indices: Sequence[SourceIndex]) -> None:
    """Plan the held-out samples as validation does, and refuse samples that exceed the memory."""
    tombstones = tombstones_of(config.data, indices)
    config = config.model_copy(update={"data": config.data.of_heldout()})
    vision = VisionPlanner(config, training=False)
    planner = Planner(indices, config.data, tombstones)
    plans = once(planner, config.data.heldout_tokens, config.row_group())
    for number, plan in enumerate(plans):
        try:
            vision.plan(plan)
        except ValueError as error:
            names = ", ".join(sorted(config.data.sources))
            raise ConfigError(f"data.heldout ({names}), batch {number + 1}: {error}") from None


def _take_over(
    planner: Planner, config: Config, to_come: Mapping[str, Callable[[], State]]
) -> None:
    """Set the planner to continue from the previous stage, as a run that keeps its optimizer.

    If the previous stage has no readable checkpoint yet, do nothing: the check of initial weights
    reports that.

    Raises:
        ConfigError: the data cannot continue, or nothing of the budget or of train.steps is left.
    """
    where = config.train.start_from
    assert where is not None  # checked with the configuration
    if where in to_come:
        before = to_come[where]()
        step = before["step"]
    else:
        try:
            where = latest_in(where)
            found = open_checkpoint(where).manifest().state
        except (FileNotFoundError, CheckpointError):
            return
        before, step = found.loader, found.step
    if step >= config.train.steps:
        raise ConfigError(
            f"train.start_from: {where}: train.steps={config.train.steps} leave nothing to train "
            f"after the {step} of the stages before; give the steps of all of them together"
        )
    try:
        state, _ = taken_over(planner, before, step)
    except ValueError as error:
        raise ConfigError(f"train.start_from: {where}: {error}") from None
    planner.load_state_dict(state)


def _check_place(uri: str, patience: float) -> None:
    """Refuse a checkpoint place that cannot be listed, or a folder that is not writable."""
    place = open_place(uri, patience)
    try:
        place.steps()
    finally:
        place.close()
    if place.folder is None:
        return
    folder = place.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "may not be written" if there.is_dir() else "is no folder"
        raise ConfigError(f"checkpoint.place={uri}: {there} {what}; give another place")


def check_item_sizes(
    config: Config, indices: Sequence[SourceIndex], *, every: bool = False
) -> None:
    """Refuse items that exceed the encoder's chunk size, before anything expensive starts.

    Args:
        every: also check samples that the source's length bounds exclude.

    Raises:
        ConfigError: names the source, the sample and both sizes.
    """
    budget = config.dep.max_patches_per_chunk
    for index in indices:
        shape = (index.item_frames, index.item_height, index.item_width)
        sizes = grids(index.item_kind, *shape, config.data.limits).prod(axis=1)
        if len(sizes) and not every and (choice := config.data.chosen(index.name)) is not None:
            samples = np.arange(index.num_samples)
            length = lay_out(index, config.data.limits, samples, np.zeros_like(samples)).length
            chosen = choose(index.name, length, choice)
            sizes = np.where(np.repeat(chosen, np.diff(index.item_ptr)), sizes, 0)
        if len(sizes) and sizes.max() > budget:
            sample = int(np.searchsorted(index.item_ptr, sizes.argmax(), side="right")) - 1
            raise ConfigError(
                f"source {index.name!r}, sample {index.key_of(sample)!r}: a medium of "
                f"{sizes.max()} patches is over dep.max_patches_per_chunk={budget}; raise it, or "
                "lower data.limits so that media are shrunk"
            )


def data_is_here(config: Config) -> bool:
    """Return True if `data.root` is a local folder, so that reading it is cheap."""
    root = config.data.root
    return ("://" not in root or root.startswith("file://")) and Path(
        root.removeprefix("file://")
    ).expanduser().is_dir()


def unsaved(config: Config) -> str | None:
    """Return a warning for a run that ends without a checkpoint; None if it saves at the end."""
    if config.checkpoint.every is not None:
        return None
    return (
        f"checkpoint.every is null: a run that does all {config.train.steps} steps ends without a "
        "checkpoint, only a stop saves one; to keep its weights set checkpoint.every, for example "
        f"checkpoint.every={config.train.steps} for the last step alone"
    )


def check_node(config: Config) -> None:
    """Warn if the config assumes more or fewer ranks on this machine than it runs.

    Every rank calls this, because machines may differ. The first process of each machine compares,
    and the warning is in the log of that rank.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    here, per_node = os.environ.get("LOCAL_WORLD_SIZE"), config.dep.ranks_per_node
    world = config.layout.world_size()
    if here is not None and min(per_node, world) != int(here):
        log.warning(
            "dep.ranks_per_node=%d, but this machine runs %s of %d processes: items may be shared "
            "across machines, which is slow; set it to %s",
            per_node, here, world, here,
        )  # fmt: skip


def check_host(config: Config) -> None:
    """Refuse offload without enough host memory; for ranks that no launcher here started.

    As in `check_node`, the first process of each machine checks its own machine.

    Raises:
        ConfigError: see `check_host_memory`.
    """
    if not config.train.offload or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    from kimi_pretrain.memory.limits import check_host_memory

    first, world = int(os.environ.get("RANK", "0")), config.layout.world_size()
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here is None and world > 1 and "RANK" in os.environ:
        return  # the launcher does not say how many ranks this machine has
    check_host_memory(config, [range(first, min(first + int(here or world), world))])


def load_tokenizer(config: Config, store: Store) -> Tokenizer:
    """Read the tokenizer named in the config from the store and check it against the model.

    Raises:
        ConfigError: the tokenizer's vocabulary is larger than the model's.
    """
    tokenizer = open_tokenizer(config.data, store)
    if tokenizer.vocab_size > config.model.language.vocab_size:
        raise ConfigError(
            f"tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} ids, "
            f"model.language.vocab_size is {config.model.language.vocab_size}"
        )
    return tokenizer
