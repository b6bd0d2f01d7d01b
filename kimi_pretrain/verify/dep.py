"""What a process of `kimi-pretrain verify dep` does: run steps, and leave the gradients in files.

Updates are run only between steps; after the last one the weights stay, so that the same step can
be run again with a planted fault.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.run import Run
from kimi_pretrain.step import StepReport
from kimi_pretrain.update import UpdateReport
from kimi_pretrain.verify.compare import StepFacts, StepRoutes
from kimi_pretrain.verify.faults import FAULTS
from kimi_pretrain.verify.gradients import write_gradients
from kimi_pretrain.verify.jobs import CLEAN, FACTS, read_facts
from kimi_pretrain.verify.routes import RouteWatch, read_routes


@dataclass(frozen=True)
class Routing:
    """What becomes of the experts that tokens choose.

    Attributes:
        followed: folder of the job whose choices are followed at ties; None: write one's own down.
        bound: the largest margin of a tie.
    """

    followed: Path | None
    bound: float


def measure(
    config: Config, folder: Path, steps: int, faults: Sequence[str], routing: Routing
) -> None:
    """Join a job, run its steps and leave it; see `take_steps`, and `jobs` for `config`."""
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    run = Run(config, mesh)
    take_steps(run, folder, steps, faults, routing)
    run.close()
    mesh.barrier()
    engine_mesh.stop()


def take_steps(run: Run, folder: Path, steps: int, faults: Sequence[str], routing: Routing) -> None:
    """Run the steps in one process of a job, and write what the comparison reads.

    Args:
        run: of a configuration from `decoupled` or `reference`.
        folder: shared by the job's processes; `clean/` and a folder for each fault go into it.
        steps: to run; the gradients are of the last.
        faults: names in `FAULTS`; the last step is run once more with each. A job that follows
            another has none itself: it runs the step once more along the routes of each.
        routing: whose routes.
    """
    job = _Job(run, folder, routing)
    losses = [job.step_with_update(number) for number in range(1, steps)]
    batch = next(run.loader)
    job.write(job.step_alone(batch, steps, CLEAN), losses, CLEAN)
    vision = run.planner.plan(batch.plan)
    for name in faults:
        if routing.followed is not None:
            if not isinstance(read_facts(routing.followed / name), str):
                job.write(job.step_alone(batch, steps, name), losses, name)
            continue
        fault = FAULTS[name]
        if obstacle := fault.obstacle(run, vision):
            _write_facts(run, folder / name, {"obstacle": obstacle})
            continue
        with fault.planted(run, vision):
            report = job.step_alone(batch, steps, name)
        job.write(report, losses, name)


class _Job:
    """Steps of one process of a job.

    Args:
        run: built.
        folder: of the job.
        routing: whose routes.
    """

    def __init__(self, run: Run, folder: Path, routing: Routing):
        self._run, self._folder, self._routing = run, folder, routing
        self._routes: dict[int, StepRoutes] = {}  # of the last time that each step was run

    def step_with_update(self, number: int) -> float:
        """Train for a step; returns its loss."""
        batch = next(self._run.loader)
        report = self._step(batch, number, CLEAN)
        if report.skipped.size:
            self._run.loader.quarantine(batch.plan, report.skipped.tolist())
        return report.loss

    def step_alone(self, batch: StepBatch, number: int, name: str) -> StepReport:
        """Run a step whose weights stay, and leave the routes under a name, or follow those."""
        with _without_update(self._run):
            return self._step(batch, number, name)

    def write(self, report: StepReport, losses: Sequence[float], name: str) -> None:
        """Write what the last step, and those before it, came to."""
        routes = tuple(self._routes.values())
        _write(self._run, report, losses, routes, self._folder / name)

    def _step(self, batch: StepBatch, number: int, name: str) -> StepReport:
        told, tokens = None, batch.plan.num_rows * batch.plan.seq_len
        if self._routing.followed is not None:
            told = read_routes(self._routing.followed / name, number, tokens)
        watch = RouteWatch(self._run, told, self._routing.bound)
        with watch.attached():
            report = self._run.train_step.run(batch)
        if told is None:
            watch.write(self._folder / name, number)
        else:
            self._routes[number] = watch.report(number)
        return report


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


def _write(
    run: Run,
    report: StepReport,
    losses: Sequence[float],
    routes: tuple[StepRoutes, ...],
    folder: Path,
) -> None:
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
        routes=routes,
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
