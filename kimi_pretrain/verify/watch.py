"""Watches a run from inside its processes, so that two runs can be compared; changes nothing.

Before each step the hash of its plan is written down, before the first step after the stop also
hashes of everything the run remembers. It can give the run the signal of a scheduler that wants the
machine back, in the middle of a step, as `kill -USR1` would.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

from data_pipeline.loader import StepBatch
from kimi_pretrain.checkpoint.hashes import hash_tensors
from kimi_pretrain.run import Run
from kimi_pretrain.step import StepReport
from kimi_pretrain.verify.trace import RESUMED, WATCHED


def watch(run: Run, folder: Path, stop: int, *, interrupt: bool = False) -> None:
    """Watch the steps of a run from now on; called on every rank.

    Args:
        run: built, and resumed if it is to be.
        folder: where rank 0 writes; that of the run.
        stop: step after which a run of the comparison is stopped.
        interrupt: send the last rank USR1 while this step is going on.
    """
    train, began = run.train_step.run, run.step

    def watched(batch: StepBatch, **options: Any) -> StepReport:
        step = run.step + 1
        if step == stop + 1:
            _write_moment(run, folder)
        if run.mesh.rank == 0:
            with (folder / WATCHED).open("a") as lines:
                line = {"step": step, "samples": batch.plan.content_hash(), "began": began}
                lines.write(json.dumps(line) + "\n")
        if interrupt and step == stop and run.mesh.rank == run.mesh.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train(batch, **options)

    run.train_step.run = watched  # of this object alone


def _write_moment(run: Run, folder: Path) -> None:
    """Write hashes of all that the run remembers, its loader as it is with this step fetched."""
    tensors = hash_tensors(run.tensors(), run.mesh)
    if run.mesh.rank == 0:
        moment = {"tensors": tensors, "state": vars(run.run_state())}
        (folder / RESUMED).write_text(json.dumps(moment) + "\n")
