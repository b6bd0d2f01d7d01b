"""A rank of a training with a planted fault: `python -m tests.dist.planted JOB`."""

import json
import logging
import math
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from launch.local import worker
from launch.local.job import Job

WORKER = "tests.dist.planted"


@dataclass(frozen=True)
class PlantedJob(Job):
    """A training with a fault.

    Attributes:
        plant: name of a function below.
        step: step of the fault, counted from 1.
        rank: rank of the fault.
    """

    plant: str = ""
    step: int = 1
    rank: int = 0

    @staticmethod
    def parse(argument: str) -> "PlantedJob":
        values = json.loads(argument)
        return PlantedJob(**{**values, "overrides": tuple(values["overrides"])})


def run_job(job: PlantedJob) -> None:
    def prepare(run: Any) -> None:
        if run.mesh.rank == job.rank:
            PLANTS[job.plant](run, job.step)

    worker.run_job(job, prepare=prepare)


def sleep_in_encoder(run: Any, step: int) -> None:
    """Sleep forever, while the other ranks wait for the embeddings."""
    begin = run.encoder.begin

    def late(*args: Any, **options: Any) -> Any:
        if run.step + 1 == step:
            time.sleep(1000)
        return begin(*args, **options)

    run.encoder.begin = late


def hang_in_a_read(run: Any, step: int) -> None:
    """Make the store stop answering, so that the loader waits."""
    from data_pipeline import fetch

    read, requests = fetch.read_parts, iter(range(1, 10**6))

    def late(*args: Any, **more: Any) -> Any:
        if next(requests) == step:
            time.sleep(1000)
        return read(*args, **more)

    fetch.read_parts = late


def not_a_number(run: Any, step: int) -> None:
    """Return a NaN loss in this step and the next."""
    train = run.backbone.train_step

    def poisoned(*args: Any) -> Any:
        result = train(*args)
        if run.step + 1 in (step, step + 1):
            result.loss_sum.fill_(math.nan)
        return result

    run.backbone.train_step = poisoned


def bug(run: Any, step: int) -> None:
    """Raise a library error in a step."""
    train = run.backbone.train_step

    def wrong(*args: Any) -> Any:
        if run.step + 1 == step:
            raise ValueError("operands could not be broadcast together")
        return train(*args)

    run.backbone.train_step = wrong


def spike(run: Any, step: int) -> None:
    """Multiply the loss by a hundred and leave the gradient unchanged."""
    train = run.backbone.train_step

    def higher(*args: Any) -> Any:
        result = train(*args)
        if run.step + 1 == step:
            result.loss_sum.mul_(100)
        return result

    run.backbone.train_step = higher


def flip_a_bit(run: Any, step: int) -> None:
    """Flip a bit before this step, in a copy that this step checks and its update overwrites."""
    train = run.train_step.run

    def flipped(batch: Any) -> Any:
        if run.step + 1 == step:
            names = [copy.name for copy in run.replicas.hashes(step)]
            name = next(name for name in names if not run.update.optimizer.owns(name))
            run.model.tensors()[name].view(-1)[:1].view(dtype=torch.uint8)[0] ^= 1
        return train(batch)

    run.train_step.run = flipped


def draws(run: Any, step: int) -> None:
    """Drop tokens from the loss at random, using torch's generator."""
    from dataclasses import replace

    import torch

    train = run.backbone.train_step

    def thinned(microbatches: list, aux_scale: float) -> Any:
        masks = [torch.rand(one.loss_mask.shape) < 0.9 for one in microbatches]
        thin = [replace(m, loss_mask=m.loss_mask & kept) for m, kept in zip(microbatches, masks)]
        return train(thin, aux_scale)

    run.backbone.train_step = thinned


def slow_copy(run: Any, step: int) -> None:
    """Delay the copy of tensors for a save until the next step wants to change them."""
    from kimi_pretrain.checkpoint.staging import StagingBuffers

    copy = StagingBuffers.copy

    def late(aside: Any, tensors: Any, which: Any = lambda name: True) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(3)
        copy(aside, tensors, which)

    StagingBuffers.copy = late


def term_at_the_start(run: Any, step: int) -> None:
    """Send the signal while the run is being built."""
    os.kill(os.getpid(), 15)


def ends_at_the_last_barrier(run: Any, step: int) -> None:
    """Raise an error at the final barrier, after the checkpoints are closed; report the status."""
    from kimi_pretrain.checkpoint.scheduler import CheckpointScheduler
    from kimi_pretrain.reliability.status import read_status

    close = CheckpointScheduler.close

    def barrier(folder: Any) -> None:
        raise RuntimeError(f"it said {read_status(folder)}")

    def closed(checkpoints: Any, **options: Any) -> None:
        close(checkpoints, **options)
        type(run.mesh).barrier = lambda _: barrier(checkpoints.place.folder.parent)

    CheckpointScheduler.close = closed


PLANTS = {
    plant.__name__: plant
    for plant in (
        *(sleep_in_encoder, hang_in_a_read, not_a_number, bug, spike, draws, slow_copy),
        *(term_at_the_start, flip_a_bit, ends_at_the_last_barrier),
    )
}


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())
    worker.leave(worker.main(sys.argv[1], PlantedJob.parse, run_job, stops=True))
