"""One process of a test job: `python worker.py OUT` does what OUT/jobs.json says; see jobs.py."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.dist.basic_case import ACTIONS as BASIC
from tests.dist.clip_case import ACTIONS as CLIP
from tests.dist.gather_case import ACTIONS as GATHER
from tests.dist.muonclip_case import ACTIONS as MUONCLIP
from tests.dist.overlap_case import ACTIONS as OVERLAP
from tests.dist.owners_case import ACTIONS as OWNERS
from tests.dist.routes_case import ACTIONS as ROUTES
from tests.dist.sequence_case import ACTIONS as SEQUENCE
from tests.dist.weights_case import ACTIONS as WEIGHTS


def main(out: Path) -> None:
    """Do each job in turn, in the same processes: to start them takes longer than most jobs."""
    from kimi_pretrain.engine import mesh as engine_mesh

    torch.set_num_threads(1)
    jobs, results, mesh = json.loads((out / "jobs.json").read_text()), {}, None
    try:
        for name, (action, overrides) in jobs.items():
            mesh, results[name] = do(action, overrides, mesh)
        assert mesh is not None
        if mesh.rank == 0:
            torch.save(results, out / "result.pt")
        mesh.barrier()
    finally:
        engine_mesh.stop()


def do(action: str, overrides: list[str], mesh: Any) -> tuple[Any, Any]:
    """Return the mesh of the job's layout, made anew after another job's, and its result."""
    from megatron.core import parallel_state

    from kimi_pretrain.config import load_config
    from kimi_pretrain.engine import mesh as engine_mesh
    from kimi_pretrain.run import Run

    config = load_config("tiny_cpu", overrides)
    if mesh is None:
        mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    else:
        parallel_state.destroy_model_parallel()
        mesh = engine_mesh.build(config.layout, mesh.device, config.train.timeout_seconds)
    run = Run(config, mesh)
    try:
        return mesh, ACTIONS[action](run)
    finally:
        run.close()


ACTIONS = {
    **BASIC,
    **MUONCLIP,
    **OVERLAP,
    **OWNERS,
    **ROUTES,
    **SEQUENCE,
    **CLIP,
    **GATHER,
    **WEIGHTS,
}

if __name__ == "__main__":
    from launch.local.worker import leave

    main(Path(sys.argv[1]))
    leave(0)
