"""Writes state hashes and efficiency timings after the last step of a run.

The run is trained and saved by then, so a write error is logged and does not fail the run.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_pretrain.checkpoint.hashes import hash_tensors
from kimi_pretrain.checkpoint.manifest import digest
from kimi_pretrain.reliability.run_files import best_effort, write_whole

if TYPE_CHECKING:
    from kimi_pretrain.run import Run


def write_state_hashes(run: "Run", file: Path) -> None:
    """Write SHA-256 hashes of the run's whole state, so that two runs can be compared.

    Collective; rank 0 writes.
    """
    model = hash_tensors(run.model.tensors(), run.mesh)
    optimizer = hash_tensors(run.update.optimizer.state_dict(), run.mesh)
    if run.mesh.rank != 0:
        return
    state = vars(run.run_state())
    hashes = {
        "step": run.step,
        "model": digest(model),
        "optimizer": digest(optimizer),
        "loader": digest(state),
        "tensors": len(model) + len(optimizer),
        "per_tensor": model | optimizer,
    }
    with best_effort():
        write_whole(file, json.dumps(hashes, indent=1) + "\n")


def measure_efficiency(run: "Run", file: Path) -> None:
    """Time steps with media and, in turn, the same rows with text tokens in their place.

    Call it after the run's state is saved: these steps train on nonsense, and their updates are
    discarded.
    """
    seconds: dict[str, list[float]] = {"multimodal": [], "text_only": []}
    for _ in range(run.config.train.efficiency_pairs):
        batch = next(run.loader)
        for name, times in seconds.items():
            run.mesh.barrier()
            start = time.perf_counter()
            run.train_step.run(batch, text_only=name == "text_only")
            run.mesh.barrier()
            times.append(time.perf_counter() - start)
    if run.mesh.rank == 0:
        with best_effort():
            write_whole(file, json.dumps(seconds) + "\n")
