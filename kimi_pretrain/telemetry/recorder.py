"""Phase 8: per-rank reports, all-gathered once per step, and the files that rank 0 writes.

metrics.jsonl has one line per step, anomalies.jsonl one line per step with an anomaly, and
quarantine.jsonl the unusable samples. A write error between two saves is logged and does not end
the run.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_pipeline.index.columns import SourceIndex
from data_pipeline.loader import StepBatch
from data_pipeline.plan.budget import BudgetEnd, last_step
from kimi_pretrain.checkpoint.saver import SaveProgress
from kimi_pretrain.config import Config
from kimi_pretrain.reliability.anomaly_guard import Verdict, anomaly
from kimi_pretrain.reliability.replica_check import CopyHash, check_copies
from kimi_pretrain.reliability.run_files import Appended, best_effort
from kimi_pretrain.reliability.status import Status, write_status
from kimi_pretrain.telemetry.console import StepDisplay
from kimi_pretrain.telemetry.jsonl import last_step as last_written
from kimi_pretrain.telemetry.metrics import RankMetrics, Telemetry
from kimi_pretrain.telemetry.run_dir import History, MetricsWriter, write_trace

if TYPE_CHECKING:  # these import the engine
    from kimi_pretrain.engine.mesh import Mesh
    from kimi_pretrain.step import StepReport

log = logging.getLogger("kimi_pretrain.telemetry.recorder")


@dataclass(frozen=True)
class RankReport:
    """Per-rank report, all-gathered once per step: about 2 KB.

    Ranks of the last stage add 24 bytes for each pair of source and position bin with a loss: at
    most 55 KB with 200 sources in rows of 262,144 tokens, and far less for one rank's rows of a
    step.

    Attributes:
        stop: the reason why the rank has to stop; None if it does not.
        save: progress of its part of a save.
        unusable: samples of the plan that it could not use: (sample, item, reason).
        copies: hashes of its copies of some tensors, before the update.
    """

    metrics: RankMetrics
    verdict: Verdict
    stop: str | None = None
    save: SaveProgress | None = None
    unusable: tuple[tuple[int, int | None, str], ...] = ()
    copies: tuple[CopyHash, ...] = ()


def check_agreement(step: int, everyone: Sequence[RankReport]) -> None:
    """Check that all ranks have the same verdict, and that their copies of tensors are equal.

    Raises:
        RuntimeError: verdicts or tensors differ; the message names the ranks.
    """
    odd = [rank for rank, report in enumerate(everyone) if report.verdict != everyone[0].verdict]
    if odd:
        raise RuntimeError(
            f"step {step}: rank 0 came to {everyone[0].verdict}, rank {odd[0]} to "
            f"{everyone[odd[0]].verdict}: the sums of loss or gradient are not the same on all"
        )
    check_copies(step, [report.copies for report in everyone])


def stop_reason(everyone: Iterable[Any]) -> str | None:
    """Return the first reason to stop, given the reason of every rank; None if no rank has one."""
    asked = ((rank, reason) for rank, reason in enumerate(everyone) if reason is not None)
    return next((f"{reason} at rank {rank}" for rank, reason in asked), None)


class Recorder:
    """Writes the files of a run on rank 0; does nothing on other ranks.

    Args:
        first_step: number of steps already done; lines of later steps, from an earlier attempt,
            are moved to another file.
        indices: of the sources, in the planner's order.
        history: see `MetricsWriter`.
        end: the end of the run by a budget; used on rank 0.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        mesh: "Mesh",
        first_step: int,
        indices: Sequence[SourceIndex],
        history: History = "own",
        end: BudgetEnd | None = None,
    ):
        self.config, self.run_dir, self.indices = config, run_dir, indices
        self.writes, self.first_step = mesh.rank == 0, first_step
        # status.json is read by programs, so it never reports an estimate of the steps.
        self._steps = last_step(end if end and end.exact else None, config.train.steps)
        if self.writes:
            self.telemetry = Telemetry.on(config, mesh.device)
            display = StepDisplay(
                first_step,
                last_step(end, config.train.steps),
                config.train.print_every,
                about=end is not None and not end.exact,
            )
            self.metrics = MetricsWriter(run_dir, first_step, display, history)
            self._anomalies = Appended(run_dir / "anomalies.jsonl")
            self._quarantined = Appended(run_dir / "quarantine.jsonl")

    def step(
        self,
        step: int,
        batch: StepBatch,
        report: "StepReport",
        everyone: Sequence[RankReport],
        state: dict[str, Any],
    ) -> None:
        """Write the lines of a step (from 1); `state`: the loader's state before the step."""
        if not self.writes:
            return
        metrics = [rank.metrics for rank in everyone]
        self.metrics.write(self.telemetry.line(step, batch.plan, report, metrics))
        if step == self.config.train.trace_step:
            with best_effort():
                write_trace(self.run_dir / "trace.json", metrics, self.telemetry.scopes)
        verdict, loss, norm = report.update.verdict, report.loss, report.update.grad_norm
        if verdict.kind is not None:
            log.warning(
                "step %d: %s (loss %g, gradient norm %g): %s",
                step, verdict.kind, loss, norm, verdict.action,
            )  # fmt: skip
            line = anomaly(step, verdict, loss, norm, batch.plan, self.indices, state)
            self._anomalies.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._quarantine(step, batch, everyone)

    def to_validate(self, step: int, due: bool) -> bool:
        """Return whether to write a step's line to heldout.jsonl.

        A `due` validation is skipped if an earlier start wrote its line. A validation before the
        first step of a start that is not `due` only runs if there is no line yet, because a stage
        may begin at any step.
        """
        if not self.writes:
            return False
        last = last_written(self.run_dir / "heldout.jsonl")
        return last != step if due else last is None

    def heldout(self, line: dict[str, Any]) -> None:
        """Write the line of a validation."""
        if self.writes:
            self.metrics.write_heldout(line)

    def _quarantine(self, step: int, batch: StepBatch, everyone: Sequence[RankReport]) -> None:
        # A set, because two stages that read the same row find the same fault.
        found = {entry for rank in everyone for entry in rank.unusable}
        for sample, item, reason in sorted(found, key=str):
            index = self.indices[batch.plan.samples.source[sample]]
            key = index.key_of(int(batch.plan.samples.index[sample]))
            line = {"step": step, "source": index.name, "key": key, "item": item, "reason": reason}
            self._quarantined.write(json.dumps(line).encode() + b"\n")

    def status(
        self,
        state: Literal["running", "stopped", "finished"],
        step: int,
        checkpoint: str | None,
        reason: str | None = None,
    ) -> None:
        """Write status.json.

        Raises:
            OSError: it cannot be written, and the run has not trained a step yet or has ended.
        """
        if self.writes:
            steps = step if state == "finished" else self._steps
            status = Status(state, step, steps, reason, checkpoint)
            with best_effort() if state == "running" and step else nullcontext():
                write_status(self.run_dir, status)

    def close(self) -> None:
        """Close all files."""
        if self.writes:
            self.metrics.close()
            self._anomalies.close()
            self._quarantined.close()
