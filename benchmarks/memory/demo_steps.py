"""Step time of the demo with recompute on over off, in the same processes, batch by batch.

Four processes train the demo's configuration on its corpus. Each batch is trained on twice, once
with `train.recompute` of everything and once without, in turns which first: so a ratio is of the
same rows, and of the same seconds of the machine. It is one of the processes, too:

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
PAIRS, WARM_UP = 40, 3  # batches, each twice, after as many as these
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
        SystemExit: they failed; their output has been seen.
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
    setup["overrides"] = overrides[1:]  # where the corpus lay is nobody's concern
    return {**setup, "processes": nodes.processes, **json.loads(out.read_text())}


def main(setup: Mapping[str, Any], out: Path) -> None:
    """Be one of the processes; rank 0 writes seconds."""
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
    """Return, of each form, the seconds of every step, of its forward and backward passes, and of
    the processor, all ranks together: these last hardly depend on what else runs.
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
                mesh.barrier()  # so the slowest rank counts
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
    """Return, of each batch, the seconds with recompute over those without."""
    return [on / off for on, off in zip(found["on"][what], found["off"][what], strict=True)]


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bound on the step time."""
    ratio = median(ratios(found, "step"))
    return [
        {"target": f"the demo's step with recompute: at most {AT_MOST:.2f} x without",
         "found": f"{ratio:.3f}", "met": ratio <= AT_MOST, "exact": False}
    ]  # fmt: skip


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
