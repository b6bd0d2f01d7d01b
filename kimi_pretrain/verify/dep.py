"""Runs the steps of one rank of `kimi-pretrain verify dep` and writes the gradients to files.

The job with DEP records the experts that its tokens chose; the reference follows it where a token
is at a tie (`routes`). Updates run only between steps. After the last step the weights are kept, so
that the same step can be run again with a planted fault.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.dep.vision_plan import VisionPlan
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.run import Run
from kimi_pretrain.step import StepReport
from kimi_pretrain.update import UpdateReport
from kimi_pretrain.verify.dep_compare import StepFacts, StepRoutes
from kimi_pretrain.verify.dep_faults import FAULTS
from kimi_pretrain.verify.dep_files import CLEAN, FACTS, read_facts, write_gradients
from kimi_pretrain.verify.fault import Replaced
from kimi_pretrain.verify.routes import RouteWatch, read_routes


def run_steps(
    config: Config, folder: Path, steps: int, faults: Sequence[str], follow: str | None, ties: float
) -> None:
    """Run one rank of a job from process start to process end; see `take_steps`."""
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    run = Run(config, mesh)
    take_steps(run, folder, steps, faults, None if follow is None else Path(follow), ties)
    run.close()
    mesh.barrier()
    engine_mesh.stop()


def take_steps(
    run: Run, folder: Path, steps: int, faults: Sequence[str], follow: Path | None, ties: float
) -> None:
    """Run the steps and write the files of the comparison.

    Args:
        run: run with a config from `configs.decoupled` or `configs.reference`.
        folder: folder shared by the job's ranks, for `clean/` and one folder per fault.
        steps: number of steps; the gradients are those of the last step.
        faults: names in `FAULTS`; the last step is repeated with each fault. A job that follows
            another job plants no fault: it repeats the step along the routes of each fault.
        follow: folder of the job whose routes are followed at ties; None records the routes.
        ties: the largest margin of a tie.
    """
    job = _Job(run, folder, follow, ties)
    losses = [job.step_with_update(number) for number in range(1, steps)]
    batch = next(run.loader)
    job.last_step(batch, losses, CLEAN)
    vision = run.planner.plan(batch.plan)
    for name in faults:
        if follow is not None:
            if not isinstance(read_facts(follow / name), str):
                job.last_step(batch, losses, name)
        elif obstacle := FAULTS[name].obstacle(run, vision):
            _write_facts(run, folder / name, {"obstacle": obstacle})
        else:
            job.last_step(batch, losses, name, vision)


class _Job:
    """The steps of one rank of a job; for the arguments see `take_steps`."""

    def __init__(self, run: Run, folder: Path, follow: Path | None, ties: float):
        self._run, self._folder, self._follow, self._ties = run, folder, follow, ties
        self._routes: dict[int, StepRoutes] = {}  # from the latest run of each step

    def step_with_update(self, number: int) -> float:
        """Train one step and return its loss."""
        batch = next(self._run.loader)
        report = self._step(batch, number, CLEAN)
        if report.skipped.size:
            self._run.loader.quarantine(batch.plan, report.skipped.tolist())
        return report.loss

    def last_step(
        self, batch: StepBatch, losses: Sequence[float], name: str, vision: VisionPlan | None = None
    ) -> None:
        """Run the last step without its update, and write the results.

        With a `vision` plan, the fault `name` is planted first.
        """
        with Replaced() as replaced:
            if vision is not None:
                FAULTS[name].plant(replaced, self._run, vision)
            replaced.put(self._run.update, "run", self._norm_only)
            report = self._step(batch, len(losses) + 1, name)
        self._write(report, losses, name)

    def _norm_only(self, loss_tokens: int, loss: float) -> UpdateReport:
        """Replace the update: compute the norm and leave weights and gradients unchanged."""
        run = self._run
        (squares,) = run.mesh.sum([float(run.update.optimizer.grad_square_sum())])
        run.backbone.undo_routing_biases()
        run.backbone.take_max_logits()
        return UpdateReport(0.0, math.sqrt(squares) / max(1, loss_tokens), applied=False)

    def _step(self, batch: StepBatch, number: int, name: str) -> StepReport:
        followed, tokens = None, batch.plan.num_rows * batch.plan.seq_len
        if self._follow is not None:
            followed = read_routes(self._follow / name, number, tokens)
        watch = RouteWatch(self._run, followed, self._ties)
        with Replaced() as replaced:
            watch.attach(replaced)
            report = self._run.train_step.run(batch)
        if followed is None:
            watch.write(self._folder / name, number)
        else:
            self._routes[number] = watch.report(number)
        return report

    def _write(self, report: StepReport, losses: Sequence[float], name: str) -> None:
        """Write the gradients of this rank's own tensors; rank 0 also writes the facts."""
        run, vision, folder = self._run, report.vision, self._folder / name
        divisor = max(1, report.loss_tokens)
        mine = (
            (tensor.name, tensor.grad() / divisor)
            for tensor in run.update.named
            if run.update.optimizer.leads(tensor.name)
        )
        write_gradients(folder, run.mesh.rank, mine)
        facts = StepFacts(
            losses=[*losses, report.loss],
            grad_norm=report.update.grad_norm,
            loss_tokens=report.loss_tokens,
            vision_tokens=report.vision_tokens,
            items=report.items,
            skipped_samples=len(report.skipped),
            differing=differing_copies(run),
            routes=tuple(self._routes.values()),
        )
        bubbles = vision.bubbles
        plan = {
            "items": len(vision.rank),
            "patches": int(vision.patches.sum()),
            "encoding_ranks": len(set(vision.shares.rank.tolist())),
            "moved_items": int((vision.rank != vision.home).sum()),
            "shared_items": int((vision.parts > 1).sum()),
            "items_in_bubbles": 0 if bubbles is None else int((bubbles.unit >= 0).sum()),
        }
        _write_facts(run, folder, {"step": asdict(facts), "plan": plan})


def differing_copies(run: Run) -> list[str]:
    """Return the tensors whose weights differ between ranks that hold a copy.

    Summed gradients are compared, too, if every rank has them (`optim.shard_state` is off).
    """
    found = run.update.differing(lambda tensor: tensor.data)
    if not run.config.optim.shard_state:
        found += run.update.differing(lambda tensor: tensor.grad())
    everyone: list[Any] = run.mesh.all_gather_object(found)
    return sorted({name for part in everyone for name in part})


def _write_facts(run: Run, folder: Path, content: dict[str, Any]) -> None:
    if run.mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FACTS).write_text(json.dumps(content) + "\n")
