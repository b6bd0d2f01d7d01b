"""One process of the benchmark: torchrun --module benchmarks.dep.job PARTS SETUP.json OUT.json."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.dep import memory, timing
from kimi_pretrain.config import load_config
from kimi_pretrain.engine import mesh as engine_mesh


def main(parts: list[str], setup: dict[str, Any], out: Path) -> None:
    """Run the parts in order and let rank 0 write the results."""
    config = load_config(setup["config"], setup["overrides"])
    torch.set_num_threads(config.train.threads or 1)
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    found: dict[str, Any] = {}
    if "timing" in parts:
        seconds = setup["calibrate_seconds"]
        found["timing"] = timing.time_steps(config, mesh, setup["rounds"], seconds)
    if "memory" in parts:
        found["memory"] = memory.measure(config, mesh, setup["pages"], setup["counts"])
    if mesh.rank == 0:
        out.write_text(json.dumps(found) + "\n")
    mesh.barrier()
    engine_mesh.stop()


if __name__ == "__main__":
    main(sys.argv[1].split(","), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
