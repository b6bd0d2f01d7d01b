"""What a run that did all its steps leaves behind besides its last checkpoint.

All is trained and saved by then: what cannot be written is told, and ends nothing.
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
    """Write SHA-256 of everything the run remembers, so that two runs can be compared.

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
    """Time steps with media and the same rows with text tokens in their place, in turns.

    The run is over and its state written down: these steps train on nonsense and are thrown away.
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
