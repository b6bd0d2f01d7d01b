"""Phase 8: what a run writes down of each step, from the one gather in which all ranks tell of it.

Rank 0 writes; the others only send. metrics.jsonl has a line for every step, anomalies.jsonl one
for each step that the guard objected to, quarantine.jsonl the samples that could not be used.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_pipeline.index.columns import SourceIndex
from data_pipeline.loader import StepBatch
from kimi_pretrain.checkpoint.saver import Progress
from kimi_pretrain.config import Config
from kimi_pretrain.guard import Verdict, anomaly, write_down
from kimi_pretrain.run_folder import MetricsWriter, write_trace
from kimi_pretrain.status import Status, write_status
from kimi_pretrain.telemetry.line import RankRecord, Telemetry

if TYPE_CHECKING:  # these bring the engine along
    from kimi_pretrain.engine.mesh import Mesh
    from kimi_pretrain.step import StepReport

log = logging.getLogger("kimi_pretrain.notes")


@dataclass(frozen=True)
class Told:
    """What one rank tells of a step, small, for the one gather.

    Attributes:
        record: what it measured.
        verdict: of its guard.
        stop: why it was asked to stop; None if it was not.
        save: how far its part of a save is.
        unusable: samples of the plan that it could not use: (sample, item, reason).
    """

    record: RankRecord
    verdict: Verdict
    stop: str | None = None
    save: Progress | None = None
    unusable: tuple[tuple[int, int | None, str], ...] = ()


def check_alike(step: int, everyone: Sequence[Told]) -> None:
    """Make sure that all ranks came to the same verdict: some would have updated, others not.

    Raises:
        RuntimeError: they did not; names the ranks.
    """
    odd = [rank for rank, told in enumerate(everyone) if told.verdict != everyone[0].verdict]
    if odd:
        raise RuntimeError(
            f"step {step}: rank 0 came to {everyone[0].verdict}, rank {odd[0]} to "
            f"{everyone[odd[0]].verdict}: the sums of loss or gradient are not the same on all"
        )


def stop_asked(everyone: Iterable[Any]) -> str | None:
    """Return why the run is to stop, of what each rank was asked; None if none was asked to."""
    asked = ((rank, reason) for rank, reason in enumerate(everyone) if reason is not None)
    return next((f"{reason} at rank {rank}" for rank, reason in asked), None)


class Notes:
    """Writes the files of a run, on rank 0; on the others it does nothing.

    Args:
        config: of the run.
        run_dir: its folder.
        mesh: where this rank stands.
        first_step: steps that were done before; later ones of an earlier attempt are forgotten.
        indices: of the sources, in the planner's order.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        mesh: "Mesh",
        first_step: int,
        indices: Sequence[SourceIndex],
    ):
        self.config, self.run_dir, self.indices = config, run_dir, indices
        self.writes = mesh.rank == 0
        if self.writes:
            self.telemetry = Telemetry.on(config, mesh.device)
            self.metrics = MetricsWriter(run_dir, first_step, config.train.steps)

    def step(
        self,
        step: int,
        batch: StepBatch,
        report: "StepReport",
        everyone: Sequence[Told],
        state: dict[str, Any],
    ) -> None:
        """Write down a step.

        Args:
            step: counted from 1.
            batch: of the step.
            report: of this rank.
            everyone: what all ranks told.
            state: of the loader before the step.
        """
        if not self.writes:
            return
        records = [told.record for told in everyone]
        self.metrics.write(self.telemetry.line(step, batch.plan, report, records))
        if step == self.config.train.trace_step:
            write_trace(self.run_dir / "trace.json", records, self.telemetry.scopes)
        verdict, loss, norm = report.update.verdict, report.loss, report.update.grad_norm
        if verdict.kind is not None:
            log.warning(
                "step %d: %s (loss %g, gradient norm %g): %s",
                step, verdict.kind, loss, norm, verdict.action,
            )  # fmt: skip
            line = anomaly(step, verdict, loss, norm, batch.plan, self.indices, state)
            write_down(self.run_dir / "anomalies.jsonl", line)
        self._quarantine(step, batch, everyone)

    def _quarantine(self, step: int, batch: StepBatch, everyone: Sequence[Told]) -> None:
        # Two stages that read the same row find the same fault.
        found = {entry for told in everyone for entry in told.unusable}
        if not found:
            return
        with (self.run_dir / "quarantine.jsonl").open("a") as lines:
            for sample, item, reason in sorted(found, key=str):
                index = self.indices[batch.plan.samples.source[sample]]
                key = index.key_of(int(batch.plan.samples.index[sample]))
                line = {"step": step, "source": index.name, "key": key, "item": item}
                lines.write(json.dumps(line | {"reason": reason}) + "\n")

    def status(
        self,
        state: Literal["running", "stopped", "finished"],
        step: int,
        checkpoint: str | None,
        reason: str | None = None,
    ) -> None:
        """Write status.json."""
        if self.writes:
            steps = self.config.train.steps
            write_status(self.run_dir, Status(state, step, steps, reason, checkpoint))

    def close(self) -> None:
        """Flush and close everything."""
        if self.writes:
            self.metrics.close()
