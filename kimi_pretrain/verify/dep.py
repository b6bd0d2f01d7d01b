"""What a process of `kimi-pretrain verify dep` does: run steps, and leave the gradients in files.

Updates are run only between steps; after the last one the weights stay, so that the same step can
be run again with a planted fault.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.step import StepReport
from kimi_pretrain.train import Run
from kimi_pretrain.update import UpdateReport
from kimi_pretrain.verify.compare import StepFacts
from kimi_pretrain.verify.faults import FAULTS
from kimi_pretrain.verify.gradients import write_gradients
from kimi_pretrain.verify.jobs import CLEAN, FACTS


def measure(config: Config, folder: Path, steps: int, faults: Sequence[str] = ()) -> None:
    """Run the steps in one process of a job, and write what the comparison reads.

    Args:
        config: from `decoupled` or `reference`.
        folder: shared by the job's processes; `clean/` and a folder for each fault go into it.
        steps: to run; the gradients are of the last.
        faults: names in `FAULTS`; the last step is run once more with each.
    """
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    run = Run(config, mesh)
    losses = [_step_with_update(run) for _ in range(steps - 1)]
    batch = next(run.loader)
    _write(run, _step_alone(run, batch), losses, folder / CLEAN)
    vision = run.planner.plan(batch.plan)
    for name in faults:
        fault = FAULTS[name]
        if obstacle := fault.obstacle(run, vision):
            _write_facts(run, folder / name, {"obstacle": obstacle})
            continue
        with fault.planted(run, vision):
            report = _step_alone(run, batch)
        _write(run, report, losses, folder / name)
    run.close()
    mesh.barrier()
    engine_mesh.stop()


def _step_with_update(run: Run) -> float:
    batch = next(run.loader)
    report = run.train_step.run(batch)
    if report.skipped.size:
        run.loader.quarantine(batch.plan, report.skipped.tolist())
    return report.loss


def _step_alone(run: Run, batch: StepBatch) -> StepReport:
    with _without_update(run):
        return run.train_step.run(batch)


@contextmanager
def _without_update(run: Run) -> Iterator[None]:
    """Leave weights and gradients as they are in phase 7; only the norm is taken."""

    def norm_only(loss_tokens: int, loss: float) -> UpdateReport:
        (squares,) = run.mesh.sum([float(run.update.optimizer.grad_square_sum())])
        run.backbone.undo_routing_biases()
        run.backbone.take_max_logits()
        norm = math.sqrt(squares) / max(1, loss_tokens)
        return UpdateReport(0.0, norm, applied=False)

    run.update.run = norm_only  # of this object alone
    try:
        yield
    finally:
        del run.update.run


def _write(run: Run, report: StepReport, losses: Sequence[float], folder: Path) -> None:
    """Write the gradients of the tensors that this rank owns, and on rank 0 the rest."""
    divisor = max(1, report.loss_tokens)
    mine = (
        (tensor.name, tensor.grad() / divisor)
        for tensor in run.update.named
        if run.update.optimizer.leads(tensor.name)
    )
    write_gradients(folder, run.mesh.rank, mine)
    facts = StepFacts(
        losses=(*losses, report.loss),
        grad_norm=report.update.grad_norm,
        loss_tokens=report.loss_tokens,
        vision_tokens=report.vision_tokens,
        items=report.items,
        skipped_samples=len(report.skipped),
        differing=tuple(_differing(run)),
    )
    vision = report.vision
    plan = {
        "items": len(vision.rank),
        "patches": int(vision.patches.sum()),
        "encoding_ranks": len(set(vision.shares.rank.tolist())),
        "moved_items": int((vision.rank != vision.home).sum()),
        "shared_items": int((vision.parts > 1).sum()),
    }
    _write_facts(run, folder, {"step": asdict(facts), "plan": plan})


def _differing(run: Run) -> list[str]:
    """Return the tensors that are not the same on all ranks that hold a copy: their weights, and
    their summed gradients where every rank has those (`optim.shard_state` is off).
    """
    found = run.update.differing(lambda tensor: tensor.data)
    if not run.config.optim.shard_state:
        found += run.update.differing(lambda tensor: tensor.grad())
    everyone: list[Any] = run.mesh.gather(found)
    return sorted({name for part in everyone for name in part})


def _write_facts(run: Run, folder: Path, content: dict[str, Any]) -> None:
    if run.mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FACTS).write_text(json.dumps(content) + "\n")
