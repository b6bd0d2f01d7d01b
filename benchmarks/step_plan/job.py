"""One process of the benchmark: torchrun --module benchmarks.step_plan.job SETUP.json OUT.json.

Each process calibrates separately, at the same time as the other one. Both then form the layout of
the configuration, time the network and run steps.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.dep.settings import DEP
from benchmarks.dep.timing import ready_seconds
from benchmarks.dep.variants import Bench, Variant, fetch
from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.dep.config import CostConfig, PassCostConfig, UpdateCostConfig
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.experts import GroupedExperts
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.telemetry.phases import seconds_of_phases
from kimi_pretrain.tools.calibrate import calibrate
from kimi_pretrain.tools.calibrate_passes import calibrate_passes
from kimi_pretrain.tools.predict_step import as_json, predict_planned
from kimi_pretrain.tools.text_passes import Traffic
from launch.local.quiet import quiet_libraries

NETWORK_BYTES = 1 << 22
NETWORK_REPEATS = 15
KINDS = {"cost": CostConfig, "pass_cost": PassCostConfig, "update_cost": UpdateCostConfig}


def main(setup: Mapping[str, Any], out: Path) -> None:
    """Run one case and let rank 0 write the results."""
    quiet_libraries()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    config = load_config(setup["config"], setup["overrides"])
    costs = calibrated(config, setup["calibrate_seconds"])
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    found = measured(config, mesh, costs, setup["steps"])
    if mesh.rank == 0:
        out.write_text(json.dumps(found) + "\n")
    mesh.barrier()
    engine_mesh.stop()


def calibrated(config: Config, seconds: float) -> dict[str, dict[str, float]]:
    """Return the costs that this process measures, by config section."""
    media = config.data.vision_token_ratio is not None
    passes = calibrate_passes(config, seconds)
    assert passes.update is not None
    found = {"pass_cost": passes.passes.model_dump(), "update_cost": passes.update.model_dump()}
    return found | ({"cost": calibrate(config, seconds).cost} if media else {})


def measured(config: Config, mesh: Mesh, costs: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Run steps and predict the same steps.

    Args:
        costs: costs of this rank; they are averaged over the ranks, because all ranks must plan
            alike.
        steps: timed steps, after one warm-up step.

    Returns:
        plain values, the same on every rank.
    """
    everyone: list[Any] = mesh.all_gather_object(costs)
    joined = {
        section: {key: mean(one[section][key] for one in everyone) for key in values}
        for section, values in costs.items()
    }
    dep = config.dep.replace(**{name: KINDS[name](**values) for name, values in joined.items()})
    config = config.replace(dep=dep)
    network = network_rates(mesh)
    batches = fetch(config, steps + 1)[1:]
    bench = Bench(config, mesh)
    variant = bench.variant(DEP)
    received = tokens_of_experts(bench)
    runs = [timed(variant, batch, received) for batch in [batches[0], *batches]]
    imbalance = imbalance_of(runs[0]) if config.layout.ep > 1 else 1.0
    traffic = Traffic(network["sum"], network["latency"], imbalance)
    predicted = predict_planned(config, [batch.plan for batch in batches], traffic)
    return {
        "predicted": as_json(predicted), "runs": runs[1:], "network": network, "costs": everyone,
        "expert_imbalance": imbalance,
    }  # fmt: skip


def timed(variant: Variant, batch: StepBatch, received: list[int]) -> list[Any]:
    """Run a step between two barriers; return the measurements of each rank."""
    variant.plan(batch)  # before the timing starts, as in the loader
    mesh = variant.step.mesh
    received.clear()
    mesh.barrier()
    ready, begun = ready_seconds(), time.perf_counter()
    report = variant.run(batch)
    mesh.barrier()
    mine = {
        "seconds": time.perf_counter() - begun,
        "no_core": ready_seconds() - ready,
        "phases": seconds_of_phases(report.spans),
        "busy": dict(variant.clock.busy),
        "expert_tokens": received.copy(),
    }
    return mesh.all_gather_object(mine)


def imbalance_of(run: Sequence[Mapping[str, Any]]) -> float:
    """Return the expert tokens of the busier rank over the mean, averaged over all layers."""
    tokens = np.array([rank["expert_tokens"] for rank in run], np.float64)
    return float((tokens.max(axis=0) / tokens.mean(axis=0)).mean())


def tokens_of_experts(bench: Bench) -> list[int]:
    """Return a list to which each forward appends the tokens that reach this rank's experts."""
    found: list[int] = []
    for chunk in bench.model.backbone.chunks:
        for module in chunk.modules():
            if isinstance(module, GroupedExperts):
                module.register_forward_pre_hook(
                    lambda module, inputs: found.append(int(inputs[1].sum()))
                )
    return found


def network_rates(mesh: Mesh) -> dict[str, float]:
    """Return the bytes per second that each process sends, by communication pattern.

    `exchange` is an all-to-all, as for tokens and embeddings. `sum` sends gradients to the rank
    that updates them and weights back, where each rank owns half. `stages` is a message to the
    other rank and back. `latency` is not a rate but the seconds of an all-to-all of a few bytes.
    """
    rank, other = mesh.rank, 1 - mesh.rank
    mine, theirs = (torch.ones(NETWORK_BYTES // 4) for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(theirs, mine)

    def few() -> None:
        dist.all_to_all_single(theirs[:2], mine[:2])

    def summed() -> None:
        for way in (dist.reduce, dist.broadcast):
            work = [way(one, owner, async_op=True) for owner, one in enumerate((mine, theirs))]
            for one in work:
                one.wait()

    def stages() -> None:
        for sender in range(2):
            dist.send(mine, other) if rank == sender else dist.recv(theirs, other)

    def rate(work: Callable[[], None], sent: float) -> float:
        seconds = []
        for _ in range(1 + NETWORK_REPEATS):
            mesh.barrier()
            begun = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begun)
        (slowest,) = mesh.max([median(seconds[1:])])
        return sent / slowest

    return {
        "exchange": rate(exchange, NETWORK_BYTES / 2),
        "sum": rate(summed, 2 * NETWORK_BYTES),
        "stages": rate(stages, 2 * NETWORK_BYTES),
        "latency": 1 / rate(few, 1.0),
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
