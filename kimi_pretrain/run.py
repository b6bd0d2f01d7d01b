"""Builds data, model, optimizer and step of a training run; cheap checks come first."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from data_pipeline.access import open_data, run_sources
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.reads import check_shards
from data_pipeline.loader import Loader
from data_pipeline.plan.change import Change, change
from data_pipeline.plan.stage import taken_over
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.load import OPTIMIZER_STEPS, load
from kimi_pretrain.checkpoint.manifest import RunState
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import Checkpoint, open_place
from kimi_pretrain.config import Config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import Model
from kimi_pretrain.optim.groups import replicas_of
from kimi_pretrain.reliability.preflight import check_item_sizes, read_heldout, read_sources
from kimi_pretrain.reliability.replica_check import Replicas
from kimi_pretrain.siglip.step import train_step_of
from kimi_pretrain.step import needs
from kimi_pretrain.tools.validation import Validation
from kimi_pretrain.update import Update
from kimi_pretrain.weights.initial_weights import open_initial_weights

log = logging.getLogger("kimi_pretrain.train")


class Run:
    """All parts of a training run.

    They are built in the order initial weights, store, indices, shards, model, so that cheap checks
    fail first. Model, optimizer, guard and loader hold the state; `tensors` and `run_state` return
    all of it.

    Args:
        resume: checkpoint to resume from: the result of `find`, or a folder or URI, which is
            verified first.
        watch: called with the name of each start-up stage.
        change_data: switch to this configuration's sources and weights if the checkpoint was saved
            with different ones.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        resume: Checkpoint | str | os.PathLike[str] | None = None,
        watch: Callable[[str], None] = lambda phase: None,
        *,
        change_data: bool = False,
    ):
        if resume is not None and not isinstance(resume, Checkpoint):
            resume = find(resume, open_place(resume), config, mesh)
        start = open_initial_weights(config, mesh) if resume is None else None
        self.config, self.mesh, self._watch = config, mesh, watch
        self.began_from = {} if start is None else start.began_from()
        watch("open the data")
        self.planner = VisionPlanner(config)
        self.store = open_data(config.data)
        self.loader = self._open_loader()
        planner = self.loader.planner  # ranks would disagree if the file changed between reads
        planner.tombstones = mesh.broadcast_from_rank0(lambda: planner.tombstones)
        watch("build the model")
        self.model = Model.build(config, mesh)
        self.encoder, self.backbone = self.model.encoder, self.model.backbone
        watch("build the optimizer")
        trained = {view.name for view in self.backbone.views()}
        self._routing_biases = {view.name for view in self.backbone.views(buffers=True)} - trained
        self.update = Update(config, mesh, self.encoder, self.backbone)
        self.train_step = train_step_of(self)  # a `TrainStep`, with SigLIP's pairs if configured
        self.validation = None
        if config.train.validate_every is not None:
            found = (self.store, self.tokenizer, self._heldout)
            self.validation = Validation(config, mesh, self.model, *found)
        self.step = 0
        self.data_change: Change | None = None
        if start is not None:
            watch("read the first weights")
            progress = partial(watch, "read the first weights")
            start.fill(mesh, self.tensors(), self.replica_group_of(), progress)
            if start.keep:  # `train.start_optimizer` keeps more than the weights
                self._resume(start.checkpoint(), kept=True)
        if resume is not None:
            self._resume(resume, change_data=change_data)
        watch("compare the replicas")
        self.update.check_replicas()
        self.replicas = Replicas(self.model.tensors(), mesh, config.guard.replicas_every)
        self.update.hash_copies = lambda: self.replicas.hashes(self.step + 1)

    def _open_loader(self) -> Loader:
        data, self._heldout = self.config.data, list[SourceIndex]()
        self.tokenizer, indices = read_sources(self.config, self.store, shared=True)
        check_item_sizes(self.config, indices)
        if self.config.train.validate_every is not None:
            self._heldout = read_heldout(self.config, self.store, self.tokenizer, indices)
        for index in (*indices, *self._heldout):  # ranks share the work of checking shards
            self._watch("check the shards")
            check_shards(self.store, index, self.mesh.world_size, self.mesh.rank)
        return Loader(data, self.store, indices, self.tokenizer, needs(self.mesh, self.planner))

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Sources of this run, in the format of sources.json."""
        planner = self.loader.planner
        changes = planner.state_dict()["changes"]
        return run_sources(self.config.data, planner.indices, self._heldout, changes)

    @property
    def finished(self) -> str | None:
        """Reason why no step is left (all done, or budget used up); None while steps remain."""
        if self.step >= self.config.train.steps:
            return f"all {self.config.train.steps} steps (train.steps) are done"
        return self.loader.used_up

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of a checkpoint: those of the model and of the optimizer."""
        return self.model.tensors() | self.update.optimizer.state_dict()

    def replica_group_of(self) -> dict[str, str]:
        """Return the replica group of every tensor that other ranks also hold."""
        held = {name: replicas_of(name) for name in self.model.tensors()}
        return held | {OPTIMIZER_STEPS: "encoder"}  # every rank has this count, like the encoder

    def changes_only_in_update(self, name: str) -> bool:
        """Return True for tensors that only phase 7 changes; the backbone moves routing biases."""
        return name not in self._routing_biases

    def run_state(self) -> RunState:
        """Return the content of a checkpoint besides its tensors."""
        guard, updates = self.update.guard, self.update.optimizer.steps
        loader = self.loader.state_dict()
        return RunState(self.step, updates, loader, guard.losses, guard.skips_in_row)

    def save(self, root: str | os.PathLike[str]) -> str:
        """Write a checkpoint of the latest step, wait until it is complete, and return its URI."""
        checkpoints = CheckpointSaver(open_place(root), self.config, self.mesh)
        checkpoints.begin(self.tensors(), self.run_state())
        uri = checkpoints.finish()
        checkpoints.close()
        assert uri is not None
        return uri

    def _resume(
        self, checkpoint: Checkpoint, *, kept: bool = False, change_data: bool = False
    ) -> None:
        progress, copies = partial(self._watch, "load the checkpoint"), self.replica_group_of()
        tensors = self.update.optimizer.state_dict() if kept else self.tensors()
        state = load(checkpoint, tensors, progress, mesh=self.mesh, copies=copies)
        self.step = state.step
        self.update.resume(state.step, state.optimizer_steps)
        data, anew = state.loader, None
        if kept:
            data, anew = taken_over(self.loader.planner, data, state.step)
        if change_data:
            self.data_change = change(self.loader.planner, data)
            data = self.loader.planner.state_dict()
        self.loader.load_state_dict(data)
        if anew is None:
            self.update.guard.resume(state.losses, state.skips_in_row)  # losses on the same data
        else:
            log.warning("the data begin anew: %s", anew)
        log.info("resumed from %s: %d steps are done", checkpoint.uri, self.step)

    def close(self) -> None:
        """Stop the loader's threads."""
        self.loader.close()
