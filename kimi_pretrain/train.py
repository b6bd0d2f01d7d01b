"""Builds everything, then the loop. Start here to see how the rooms fit together."""

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.access import open_data, open_tokenizer
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import check_shards, read_index
from data_pipeline.loader import Loader, LoaderError, StepBatch
from data_pipeline.plan.planner import DataUsedUp, GlobalPlan
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from kimi_pretrain import checkpoint
from kimi_pretrain.config import Config, ConfigError, describe
from kimi_pretrain.dep.memory import TooMuchMemory
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import Model
from kimi_pretrain.run_folder import MetricsWriter, describe_environment, log_to, write_trace
from kimi_pretrain.step import StepReport, TrainStep, needs
from kimi_pretrain.telemetry.line import Telemetry, record_of
from kimi_pretrain.update import Update
from kimi_pretrain.vision_plan import VisionPlanner
from kimi_pretrain.vision_weights import load_vision_weights
from moonvit3d.geometry import grids

log = logging.getLogger("kimi_pretrain.train")


class Run:
    """Everything a run is made of, built in the order in which it can fail.

    Cheap checks come first: the checkpoint's manifest, the store, the indices and shards; then the
    model. What remembers is the model, the optimizer and the loader.
    """

    def __init__(self, config: Config, mesh: Mesh, resume: Path | None = None):
        if resume is not None:
            checkpoint.read_manifest(resume, config)
        self.config, self.mesh = config, mesh
        self.planner = VisionPlanner(config)
        self.store = open_data(config.data)
        self.tokenizer = load_tokenizer(config, self.store)
        self.loader = self._open_loader()
        self.model = Model.build(config, mesh)
        self.encoder, self.backbone = self.model.encoder, self.model.backbone
        if resume is None:
            load_vision_weights(config, self.encoder.module)
        self.update = Update(config, mesh, self.encoder, self.backbone)
        self.train_step = TrainStep(config, mesh, self.model, self.update, self.planner)
        self.step = 0
        if resume is not None:
            self._resume(resume)
        self.update.check_replicas()

    def _open_loader(self) -> Loader:
        data = self.config.data
        indices = [read_index(self.store, name) for name in data.source_names]
        check_item_sizes(self.config, indices)
        for index in indices:  # ranks share the work of checking shards
            check_shards(self.store, index, self.mesh.world_size, self.mesh.rank)
        return Loader(data, self.store, indices, self.tokenizer, needs(self.mesh, self.planner))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything a checkpoint holds: the model's and the optimizer's tensors."""
        return self.model.tensors() | self.update.optimizer.state_dict()

    def run_state(self) -> checkpoint.RunState:
        """Return what a checkpoint holds besides tensors."""
        return checkpoint.RunState(self.step, self.update.optimizer.steps, self.loader.state_dict())

    def save(self, root: Path) -> Path:
        """Write a checkpoint of the step that was just done."""
        return checkpoint.save(root, self.config, self.mesh, self.tensors(), self.run_state())

    def _resume(self, folder: Path) -> None:
        state = checkpoint.load(folder, self.config, self.mesh, self.tensors())
        self.update.resume(state.step, state.optimizer_steps)
        self.loader.load_state_dict(state.loader)
        self.step = state.step
        if len(set(self.mesh.gather(self.step))) > 1:  # "latest" on a file system that lags
            raise checkpoint.CheckpointError(f"{folder}: ranks found checkpoints of other steps")

    def close(self) -> None:
        """End the loader's threads."""
        self.loader.close()


def check_item_sizes(config: Config, indices: Sequence[SourceIndex]) -> None:
    """Refuse media that no chunk could hold, before anything expensive starts.

    Raises:
        ConfigError: names the source, the sample and both sizes.
    """
    budget = config.dep.max_patches_per_chunk
    for index in indices:
        shape = (index.item_frames, index.item_height, index.item_width)
        sizes = grids(index.item_kind, *shape, config.data.limits).prod(axis=1)
        if len(sizes) and sizes.max() > budget:
            sample = int(np.searchsorted(index.item_ptr, sizes.argmax(), side="right")) - 1
            raise ConfigError(
                f"source {index.name!r}, sample {index.key_of(sample)!r}: a medium of "
                f"{sizes.max()} patches is over dep.max_patches_per_chunk={budget}; raise it, or "
                "lower data.limits so that media are shrunk"
            )


def check_node(config: Config) -> None:
    """Warn where the plan takes machines to be larger or smaller than they are."""
    here, per_node = os.environ.get("LOCAL_WORLD_SIZE"), config.dep.ranks_per_node
    world = config.layout.world_size()
    if here is not None and min(per_node, world) != int(here):
        log.warning(
            "dep.ranks_per_node=%d, but this machine runs %s of %d processes: items may be shared "
            "across machines, which is slow; set it to %s",
            per_node, here, world, here,
        )  # fmt: skip


def load_tokenizer(config: Config, store: Store) -> Tokenizer:
    """Read the tokenizer named in the config from the store and check it against the model.

    Raises:
        ConfigError: its vocabulary is larger than the model's.
    """
    tokenizer = open_tokenizer(config.data, store)
    if tokenizer.vocab_size > config.model.language.vocab_size:
        raise ConfigError(
            f"tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} ids, "
            f"model.language.vocab_size is {config.model.language.vocab_size}"
        )
    return tokenizer


def train(config: Config, run_dir: Path, resume: Path | None = None) -> None:
    """Train from scratch or from a checkpoint, in every process of the job.

    Args:
        config: of the run; written resolved into `run_dir`.
        run_dir: folder shared by all ranks; see docs/ARCHITECTURE.md for what it holds.
        resume: folder of a complete checkpoint.
    """
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    log_to(run_dir, mesh.rank)
    # Nothing is torn down on an error: other ranks may be inside a collective, and leaving it in
    # order would wait for them. The process ends, and with it the job.
    run = Run(config, mesh, resume)
    if mesh.rank == 0:
        describe_environment(run_dir, config)
        log.info("%s", describe(config))
        log.info("data: %s", run.loader.planner.report())
        check_node(config)
    _loop(run, run_dir)
    _write_state_hashes(run, run_dir / "state_hashes.json")
    if config.train.efficiency_pairs:
        _measure_efficiency(run, run_dir / "efficiency.json")
    run.close()
    mesh.barrier()
    engine_mesh.stop()


def _loop(run: Run, run_dir: Path) -> None:
    config, mesh = run.config, run.mesh
    writer = None
    if mesh.rank == 0:
        telemetry = Telemetry.on(config, mesh.device)
        writer = telemetry, MetricsWriter(run_dir, run.step, config.train.steps)
    while run.step < config.train.steps:
        start = time.time()
        batch = _next_batch(run, run_dir)
        fetched = time.time()
        report = run.train_step.run(batch)
        run.step += 1
        report.spans["1 wait for data"] = (start, fetched)
        seconds, first_stage = time.time() - start, mesh.is_first_stage
        mine = record_of(report, seconds, run.loader.stats, first_stage=first_stage)
        everyone: list[Any] = mesh.gather(mine)  # the one collective of measuring
        if writer is not None:
            telemetry, metrics = writer
            metrics.write(telemetry.line(run.step, batch.plan, report, everyone))
            if run.step == config.train.trace_step:
                write_trace(run_dir / "trace.json", everyone, telemetry.scopes)
        if report.skipped.size:  # the same on every rank, so this is collective
            _quarantine(run, batch.plan, report, run_dir / "quarantine.jsonl")
        every = config.checkpoint.every
        if every and (run.step % every == 0 or run.step == config.train.steps):
            run.save(run_dir / "checkpoints")
    if writer is not None:
        writer[1].close()


def _next_batch(run: Run, run_dir: Path) -> StepBatch:
    """Return the next step; where there can be none, keep what was trained so far and say so.

    The data is used up, or a step does not fit: with more memory or smaller chunks it may go on.
    """
    try:
        return next(run.loader)
    except LoaderError as error:
        if isinstance(error.__cause__, DataUsedUp | TooMuchMemory) and run.step:
            # A function of config and step: all ranks are here, and saving is collective.
            log.warning("step %d: %s; saving a checkpoint", run.step, error.__cause__)
            if not (run_dir / "checkpoints" / f"step_{run.step:08d}").exists():
                run.save(run_dir / "checkpoints")
        raise


def _quarantine(run: Run, plan: GlobalPlan, report: StepReport, file: Path) -> None:
    """Fill the places of unusable samples from later on, and write down what was wrong with them.

    In this step their loss did not count.
    """
    for bad in report.bad:
        log.warning("step %d: skipped a sample: %s", run.step, bad.reason)
    run.loader.quarantine(plan, report.skipped.tolist())
    found: list[Any] = run.mesh.gather([(b.sample, b.item, b.reason) for b in report.bad])
    if run.mesh.rank == 0:
        # Two stages that read the same row find the same fault.
        entries = {entry for part in found for entry in part}
        with file.open("a") as lines:
            for sample, item, reason in sorted(entries, key=str):
                index = run.loader.indices[plan.samples.source[sample]]
                key = index.key_of(int(plan.samples.index[sample]))
                line = {"step": run.step, "source": index.name, "key": key, "item": item}
                lines.write(json.dumps(line | {"reason": reason}) + "\n")


def _write_state_hashes(run: Run, file: Path) -> None:
    """Write SHA-256 of everything the run remembers, so that two runs can be compared."""
    model = checkpoint.hash_tensors(run.model.tensors(), run.mesh)
    optimizer = checkpoint.hash_tensors(run.update.optimizer.state_dict(), run.mesh)
    state = vars(run.run_state())
    hashes = {
        "step": run.step,
        "model": checkpoint.digest(model),
        "optimizer": checkpoint.digest(optimizer),
        "loader": checkpoint.digest(state),
        "tensors": len(model) + len(optimizer),
        "per_tensor": model | optimizer,
    }
    if run.mesh.rank == 0:
        file.write_text(json.dumps(hashes, indent=1) + "\n")


def _measure_efficiency(run: Run, file: Path) -> None:
    """Time steps with media and the same rows with text tokens in their place, in turns.

    The run is over and its state written down: these steps train on nonsense and are thrown away.
    """
    seconds: dict[str, list[float]] = {"multimodal": [], "text_only": []}
    for _ in range(run.config.train.efficiency_pairs):
        batch = next(run.loader)
        for name, times in seconds.items():
            run.mesh.barrier()
            start = time.time()
            run.train_step.run(batch, text_only=name == "text_only")
            run.mesh.barrier()
            times.append(time.time() - start)
    if run.mesh.rank == 0:
        file.write_text(json.dumps(seconds) + "\n")
