"""Step time of the demo with recompute over without, in the same processes, batch by batch.

Four processes train the demo's configuration on its corpus. Each batch is trained on twice, with
`train.recompute` of everything and without; the order alternates. A ratio therefore compares the
same rows at the same load of the machine. The module is also the entry point of the processes:

    torchrun --module benchmarks.memory.demo_steps SETUP.json OUT.json
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.result import RESULTS
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.memory.switches import EVERYTHING

PRESET = "tiny_cpu"
PAIRS, WARM_UP = 40, 3  # batches that count, and warm-up batches; each runs twice
PATIENCE_S = 3600.0
BACKBONE = "4 backbone"
FORMS: dict[str, list[str]] = {"off": [], "on": EVERYTHING}
AT_MOST = 1.10
LAYERS_ALONE = [f"layout.{axis}=1" for axis in ("pp", "vpp", "dp", "ep")]


def measure(work: Path, quick: bool) -> dict[str, Any]:
    """Make the corpus and run the processes.

    Args:
        work: an empty folder.

    Raises:
        SystemExit: a process failed; its output has already been printed.
    """
    from benchmarks.muonclip.training import make_corpus
    from launch.local import torchrun

    make_corpus(work / "corpus", small=quick)
    overrides = [
        f"data.root={work / 'corpus'}", "data.cache=null", "data.requests_per_second=null",
        "train.trace_step=null", "train.efficiency_pairs=0", "checkpoint.every=null",
        "dep={max_patches_per_chunk: 4096}", "train.rows_per_microbatch=4",
        *(LAYERS_ALONE if quick else ()),
    ]  # fmt: skip
    pairs, warm_up = (2, 1) if quick else (PAIRS, WARM_UP)
    setup = {"overrides": overrides, "pairs": pairs, "warm_up": warm_up}
    given, out = work / "setup.json", work / "found.json"
    given.write_text(json.dumps(setup))
    nodes = torchrun.Nodes(load_config(PRESET, overrides).layout.world_size())
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(RESULTS.parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run",
            f"--nproc-per-node={nodes.processes}", *torchrun.meeting(nodes, Path(folder)),
            "--module", "benchmarks.memory.demo_steps", str(given), str(out),
        ]  # fmt: skip
        variables = torchrun.environment(variables, nodes, 1, Path(folder))
        done = subprocess.run(command, env=variables, check=False, timeout=PATIENCE_S)
    if done.returncode:
        sys.exit(f"error: the demo's steps failed with {done.returncode}; see above")
    setup["overrides"] = overrides[1:]  # without the path of the corpus
    return {**setup, "processes": nodes.processes, **json.loads(out.read_text())}


def main(setup: Mapping[str, Any], out: Path) -> None:
    """Run as one of the processes; rank 0 writes the seconds."""
    config = load_config(PRESET, setup["overrides"])
    torch.set_num_threads(1)
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    found = seconds(config, mesh, setup["warm_up"], setup["pairs"])
    if mesh.rank == 0:
        out.write_text(json.dumps(found) + "\n")
    mesh.barrier()
    engine_mesh.stop()


def seconds(
    config: Config, mesh: engine_mesh.Mesh, warm_up: int, pairs: int
) -> dict[str, dict[str, list[float]]]:
    """Return the step, backbone and processor seconds of every step, for each form.

    Backbone seconds are those of the forward and backward passes. Processor seconds are summed over
    all ranks and hardly depend on other load.
    """
    from kimi_pretrain.run import Run

    run = Run(config, mesh)
    measures = ("step", "backbone", "processor")
    found = {form: {what: list[float]() for what in measures} for form in FORMS}
    try:
        for number in range(warm_up + pairs):
            batch = next(run.loader)
            for form in sorted(FORMS, reverse=bool(number % 2)):
                train = config.train.replace(recompute=FORMS[form])
                run.backbone.config = config.replace(train=train)
                run.backbone.apply_memory_policy()
                mesh.barrier()
                begin, busy = time.perf_counter(), time.process_time()
                report = run.train_step.run(batch)
                mesh.barrier()  # waits for the slowest rank
                taken = time.perf_counter() - begin
                start, end = report.spans[BACKBONE]
                ranks: list[Any] = mesh.all_gather_object(time.process_time() - busy)
                if number >= warm_up:
                    for what, one in zip(measures, (taken, end - start, sum(ranks)), strict=True):
                        found[form][what].append(one)
    finally:
        run.close()
    return found


# Results ------------------------------------------------------------------------------------------


def ratios(found: Mapping[str, Any], what: str) -> list[float]:
    """Return the seconds with recompute over the seconds without, for each batch."""
    return [on / off for on, off in zip(found["on"][what], found["off"][what], strict=True)]


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the target of the step time with the measured value."""
    ratio = median(ratios(found, "step"))
    return [
        {"target": f"the demo's step with recompute: at most {AT_MOST:.2f} x without",
         "found": f"{ratio:.3f}", "met": ratio <= AT_MOST, "exact": False}
    ]  # fmt: skip


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
