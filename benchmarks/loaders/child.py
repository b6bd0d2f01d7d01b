"""Runs the jobs of one loader, each in a forked process.

    python -m benchmarks.loaders.child SIDE JOBS.json ANSWERS.json

The loader is imported once, and every job is then forked. A job therefore does not pay for imports
or inherit caches. A job that hangs at its end (some do, joining workers after an early stop) is
killed with its workers and loses only its own answer.
"""

import dataclasses
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.loaders.job import Answer, Job, Side

PATIENCE_S = 120.0
# A pass shorter than `SHORT_S` is repeated, up to `AGAIN` passes, and the median counts.
SHORT_S, AGAIN = 0.5, 5


def main() -> None:
    name, jobs_file, answers_file = sys.argv[1:4]
    side: Any = importlib.import_module(f"benchmarks.loaders.{name}")
    jobs = [Job(**fields) for fields in json.loads(Path(jobs_file).read_text())]
    side.load(sorted({job.mode for job in jobs}))
    _warm_up(side, jobs, f"{answers_file}.warm")
    answers = [_answer(side, job, f"{answers_file}.{number}") for number, job in enumerate(jobs)]
    found = version(side.PACKAGE) if side.PACKAGE else "this checkout"
    report = {"version": found, "answers": answers}
    Path(answers_file).write_text(json.dumps(report))


def _warm_up(side: Side, jobs: list[Job], path: str) -> None:
    """Run one pass that does not count, so that the files are in the page cache."""
    warm = [job for job in jobs if job.timed and job.place == "disk" and job.mode == "raw"]
    if warm:
        _forked(side, warm[0], path)


def _answer(side: Side, job: Job, path: str) -> dict[str, Any]:
    answers = [_forked(side, job, path)]
    # Only from disk: a second pass from a server would no longer be cold.
    while job.timed and job.place == "disk" and len(answers) < AGAIN:
        if answers[-1]["error"] or min(answer["end_s"] for answer in answers) > SHORT_S:
            break
        answers.append(_forked(side, job, path))
    return sorted(answers, key=lambda answer: answer["end_s"] or 0.0)[len(answers) // 2]


def _forked(side: Side, job: Job, path: str) -> dict[str, Any]:
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)  # a process group with its workers, which are killed together
        try:
            answer = run(side, job)
        except BaseException as error:
            traceback.print_exc()
            answer = Answer(error=f"{type(error).__name__}: {error}"[:400])
        Path(f"{path}.part").write_text(json.dumps(dataclasses.asdict(answer)))
        os.rename(f"{path}.part", path)
        os._exit(0)
    _wait(process)
    try:
        return json.loads(Path(path).read_text())
    except OSError:
        return dataclasses.asdict(Answer(error=f"no answer within {PATIENCE_S:.0f} s"))


def _wait(process: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and os.waitpid(process, os.WNOHANG)[0] == 0:
        time.sleep(0.005)
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(process, 0)
    except ChildProcessError:
        return


def run(side: Side, job: Job) -> Answer:
    """Run the pass, timed from before the loader is built to its last batch."""
    os.environ.update(
        RANK=str(job.rank), WORLD_SIZE=str(job.world), LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.world), GLOBAL_RANK=str(job.rank), NNODES="1",
    )  # fmt: skip
    answer, skip = Answer(), 0
    begin, cpu = time.perf_counter(), time.process_time()
    loader = side.build(job)
    answer.build_s = time.perf_counter() - begin
    if job.state_in:
        kept = Path(job.state_in).read_bytes()
        if side.HAS_STATE:
            side.restore(loader, pickle.loads(kept))
        else:
            skip = json.loads(kept)["skip"]
    every = (batch for _ in range(job.epochs) for batch in side.batches(loader))
    for batch in every:
        if skip > 0:
            skip -= len(batch["ids"])
            continue
        if answer.first_s is None:
            answer.first_s = time.perf_counter() - begin
        answer.ids += batch["ids"]
        answer.count += len(batch["ids"])
        if job.mode == "sums":
            answer.sums += batch["x"]
        if job.save_at and answer.count == job.save_at:
            _save(side, loader, job, answer)
            if job.stop:
                break
        if job.limit and answer.count >= job.limit:
            break
    answer.end_s = time.perf_counter() - begin
    answer.cpu_s = time.process_time() - cpu
    return answer


def _save(side: Side, loader: Any, job: Job, answer: Answer) -> None:
    if side.HAS_STATE:
        kept = pickle.dumps(side.state(loader))
        answer.state_bytes = len(kept)
    else:
        kept = json.dumps({"skip": answer.count}).encode()
    Path(job.state_out).write_bytes(kept)


if __name__ == "__main__":
    main()
