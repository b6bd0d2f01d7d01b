"""One process of a test job: `python worker.py OUT` runs the jobs in OUT/jobs.json; see jobs.py."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.dist.basic_case import ACTIONS as BASIC
from tests.dist.bubble_case import ACTIONS as BUBBLE
from tests.dist.caption_case import ACTIONS as CAPTION
from tests.dist.clip_case import ACTIONS as CLIP
from tests.dist.deepspeed_case import ACTIONS as DEEPSPEED
from tests.dist.gather_case import ACTIONS as GATHER
from tests.dist.memory_case import ACTIONS as MEMORY
from tests.dist.memory_plan_case import ACTIONS as MEMORY_PLAN
from tests.dist.muonclip_case import ACTIONS as MUONCLIP
from tests.dist.overlap_case import ACTIONS as OVERLAP
from tests.dist.owners_case import ACTIONS as OWNERS
from tests.dist.precision_case import ACTIONS as PRECISION
from tests.dist.routes_case import ACTIONS as ROUTES
from tests.dist.sequence_case import ACTIONS as SEQUENCE
from tests.dist.states_case import ACTIONS as STATES
from tests.dist.weights_case import ACTIONS as WEIGHTS


def main(out: Path) -> None:
    """Run the jobs in the same processes, because starting them takes longer than most jobs."""
    from kimi_pretrain.config import load_config
    from kimi_pretrain.engine import mesh as engine_mesh
    from kimi_pretrain.run import Run

    torch.set_num_threads(1)
    jobs, results = json.loads((out / "jobs.json").read_text()), {}
    mesh = of = None
    try:
        for name, action, overrides in jobs:
            config = load_config("tiny_cpu", overrides)
            wanted = config.layout, config.train.timeout_seconds
            if of != wanted:
                of, mesh = wanted, mesh_of(config, mesh)
            run = Run(config, mesh)
            try:
                results[name] = ACTIONS[action](run)
            finally:
                run.close()
        assert mesh is not None
        if mesh.rank == 0:
            torch.save(results, out / "result.pt")
        mesh.barrier()
    finally:
        engine_mesh.stop()


def mesh_of(config: Any, before: Any) -> Any:
    """Return the mesh of a layout and destroy the previous one.

    A mesh has twenty gloo groups, each with three threads that wake a hundred times a second. The
    threads of old meshes took a third of all time, and Megatron-Core only drops its references.
    """
    from megatron.core import parallel_state

    from kimi_pretrain.engine import mesh as engine_mesh

    if before is None:
        return engine_mesh.start(config.layout, config.train.timeout_seconds)
    before.barrier()  # no rank may still wait in an old group
    _, *groups = parallel_state._global_process_group_list or [None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        torch.distributed.destroy_process_group(group)
    return engine_mesh.build(config.layout, before.device, config.train.timeout_seconds)


ACTIONS = {
    **BASIC,
    **BUBBLE,
    **CAPTION,
    **MEMORY_PLAN,
    **MUONCLIP,
    **OVERLAP,
    **OWNERS,
    **ROUTES,
    **SEQUENCE,
    **STATES,
    **CLIP,
    **DEEPSPEED,
    **GATHER,
    **MEMORY,
    **PRECISION,
    **WEIGHTS,
}

if __name__ == "__main__":
    from launch.local.worker import leave

    main(Path(sys.argv[1]))
    leave(0)
