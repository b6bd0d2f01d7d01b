"""Measures the loaders: speed, resume, other numbers of ranks, and requests to the server.

Every pass runs in a separate process (`child.py`). The loaders take turns within a round, and each
round starts with a different loader, so that load spikes affect all of them alike.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.loaders import ours
from benchmarks.loaders.counting import CountingProxy
from benchmarks.loaders.environment import BUCKET, REPOSITORY, Bucket
from benchmarks.loaders.job import Job

BATCH = 25
GLOBAL_BATCH = 80
# Module and settings of each loader, by its name in the results. Ours has several settings.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {}),
    "ours, unchecked": ("ours", {"check": False}),
    "ours, window of 20 shards": ("ours", {"shard_window": 20}),
    "ours, blended": ("ours", {"blend": True}),
    "litdata": ("lit", {}),
    "webdataset": ("web", {}),
    "mosaicml-streaming": ("mosaic", {}),
    "megatron-energon": ("energon", {}),
}


@dataclass(frozen=True)
class Bench:
    """Data, environments and versions of a run.

    Attributes:
        root: folder of the data.
        count: number of samples.
        peers: the peers' environment, or None.
        bucket: the S3 server, or None.
        versions: versions of the loaders that ran, by their names.
    """

    root: Path
    count: int
    peers: Path | None
    bucket: Bucket | None
    versions: dict[str, str] = field(default_factory=dict)

    def job(self, **fields: Any) -> Job:
        """Return a pass over all samples, with changed fields."""
        return Job(**{"root": str(self.root), "limit": self.count, "batch": BATCH, **fields})

    def run(self, name: str, jobs: Sequence[Job], endpoint: str = "") -> dict[str, Any]:
        """Run the jobs of one loader, one after the other; return {"version", "answers"}."""
        return self.run_ranks(name, [jobs], endpoint)[0]

    def run_ranks(
        self, name: str, ranks: Sequence[Sequence[Job]], endpoint: str = ""
    ) -> list[dict[str, Any]]:
        """Run jobs on several ranks and return one report for each rank.

        The ranks of peers run at the same time, because some wait for each other. Our ranks are
        independent, so they run one after the other from one import.

        Raises:
            RuntimeError: a loader does not start; the message is the end of its output.
        """
        module, extra = SIDES[name]
        if module == "ours" and len(ranks) > 1:
            report = self.run(name, [job for jobs in ranks for job in jobs], endpoint)
            answers = iter(report["answers"])
            return [report | {"answers": [next(answers) for _ in jobs]} for jobs in ranks]
        python = sys.executable if module == "ours" else str(self.peers / "bin" / "python")  # type: ignore
        variables = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        if self.bucket is not None:
            variables |= self.bucket.variables(endpoint or self.bucket.endpoint)
        found = []
        with tempfile.TemporaryDirectory(dir=self.root) as folder, _killed() as running:
            for rank, jobs in enumerate(ranks):
                given = [asdict(replace(job, extra=extra | job.extra)) for job in jobs]
                asked, answers = (Path(folder, f"{what}-{rank}") for what in ("jobs", "answers"))
                asked.write_text(json.dumps(given))
                command = [python, "-m", "benchmarks.loaders.child", module, asked, answers]
                with Path(folder, f"log-{rank}").open("w") as log:
                    running.append(
                        subprocess.Popen(
                            command, cwd=REPOSITORY, env=variables, stdout=log, stderr=log
                        )
                    )
            for rank, process in enumerate(running):
                if process.wait():
                    said = Path(folder, f"log-{rank}").read_text().strip()[-800:]
                    raise RuntimeError(f"{name} did not start: {said}")
                found.append(json.loads(Path(folder, f"answers-{rank}").read_text()))
        self.versions[name] = found[0]["version"]
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _killed() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield a list of processes that are killed at the end of the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


# Speed --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One figure in the table of speeds."""

    place: str
    mode: str
    workers: int

    @property
    def name(self) -> str:
        return f"{self.place} {self.mode} w{self.workers}"


def speed_round(bench: Bench, name: str, cells: Sequence[Cell], pixels: int) -> dict[str, Any]:
    """Run every cell once; return samples_per_s, first_s, seconds, cpu_s and error by cell name."""
    jobs, caches = [], []
    for cell in cells:
        limit = pixels if cell.mode == "pixels" else bench.count
        if name == "megatron-energon" and cell.place == "s3":
            limit = min(limit, bench.count // 5)  # it would take longer than all others together
        where: dict[str, Any] = {}
        if cell.place == "s3":
            assert bench.bucket is not None
            caches.append(tempfile.mkdtemp(dir=bench.root))  # empty, for a cold start
            where = {
                "cache": caches[-1], "bucket": BUCKET,
                "urls": bench.bucket.urls(bench.bucket.endpoint) if name == "webdataset" else (),
            }  # fmt: skip
        jobs.append(
            bench.job(
                place=cell.place,
                mode=cell.mode,
                workers=cell.workers,
                limit=limit,
                timed=True,
                **where,
            )
        )
    report = bench.run(name, jobs)
    for cache in caches:
        shutil.rmtree(cache, ignore_errors=True)
    figures: dict[str, Any] = {}
    for cell, job, answer in zip(cells, jobs, report["answers"]):
        error = answer["error"]
        if not error and (answer["count"] < job.limit or len(set(answer["ids"])) < answer["count"]):
            error = f"{len(set(answer['ids']))} different samples of {job.limit}"
        figures[cell.name] = {
            "samples_per_s": answer["count"] / answer["end_s"] if answer["end_s"] else None,
            "first_s": answer["first_s"], "seconds": answer["end_s"], "cpu_s": answer["cpu_s"],
            "error": error,
        }  # fmt: skip
    return figures


# Resume -------------------------------------------------------------------------------------------


def resume(bench: Bench, name: str, workers: int, repeats: int, timed_place: str = "disk") -> Any:
    """Stop at three quarters and resume in a new process; compare samples and start-up time."""
    at = bench.count * 3 // 4 // BATCH * BATCH
    with tempfile.TemporaryDirectory(dir=bench.root) as folder:
        kept = str(Path(folder, "state"))
        whole = bench.job(mode="sums", workers=workers, save_at=at, state_out=kept)
        rest = bench.job(mode="sums", workers=workers, limit=bench.count - at, state_in=kept)
        first = bench.job(workers=workers, limit=BATCH)
        again = replace(first, state_in=kept)
        report = bench.run(name, [whole, rest, *[first, again] * repeats])
    one, two, *timed = report["answers"]
    fresh = sorted(a["first_s"] or float("inf") for a in timed[::2])
    resumed = sorted(a["first_s"] or float("inf") for a in timed[1::2])
    middle = len(fresh) // 2
    return {
        "workers": workers,
        "same_samples": one["ids"][at:] == two["ids"] and bool(two["ids"]),
        "same_bytes": one["sums"][at:] == two["sums"] and bool(two["sums"]),
        "fresh_first_batch_s": fresh[middle],
        "resumed_first_batch_s": resumed[middle],
        "later_by_ms": 1e3 * (resumed[middle] - fresh[middle]),
        "state_bytes": one["state_bytes"],
        "error": one["error"] or two["error"],
    }


# Another number of ranks --------------------------------------------------------------------------

# (batch of a rank, workers) with two and with four ranks; by default each rank gets an equal share.
_ELASTIC = {"megatron-energon": {2: (20, 2), 4: (20, 1)}}  # the only combination that redistributes


def elastic(bench: Bench, name: str) -> Any:
    """Compare the global steps of two ranks with four, and with four that resume from two."""
    steps = bench.count // GLOBAL_BATCH
    stop = steps // 2
    with tempfile.TemporaryDirectory(dir=bench.root) as folder:

        def world(size: int, **fields: Any) -> list[Job]:
            batch, workers = _ELASTIC.get(name, {}).get(size, (GLOBAL_BATCH // size, 0))
            common = {"mode": "sums", "batch": batch, "workers": workers, "world": size, **fields}
            limit = common.pop("steps") * GLOBAL_BATCH // size
            return [bench.job(rank=rank, limit=limit, **common) for rank in range(size)]

        two = [
            replace(job, save_at=stop * GLOBAL_BATCH // 2, state_out=f"{folder}/state-{rank}")
            for rank, job in enumerate(world(2, steps=steps))
        ]
        before = _global_steps(bench.run_ranks(name, [[job] for job in two]))
        other = _global_steps(bench.run_ranks(name, [[job] for job in world(4, steps=steps)]))
        after: list[Any] = []
        error = ""
        try:
            saved = [job.state_out for job in two]
            later = world(4, steps=steps - stop)
            states = _redistributed(bench, name, saved, later[0])
            jobs = [[replace(job, state_in=state)] for job, state in zip(later, states)]
            answers = bench.run_ranks(name, jobs)
            error = answers[0]["answers"][0]["error"]
            after = _global_steps(answers)
        except (RuntimeError, OSError) as failure:
            error = str(failure)[-300:]
    return {
        "steps": steps,
        "other_world_ordered": _equal(before, other),
        "other_world_as_sets": _equal(_sets(before), _sets(other)),
        "resumed_steps": steps - stop,
        "resumed_ordered": _equal(before[stop:], after),
        "resumed_as_sets": _equal(_sets(before[stop:]), _sets(after)),
        "error": error,
    }


def _redistributed(bench: Bench, name: str, saved: list[str], job: Job) -> list[str]:
    """Return states for four ranks from those of two, converted in the loader's environment."""
    module, _ = SIDES[name]
    if module == "ours":
        return ours.redistribute(saved, job)
    python = str(bench.peers / "bin" / "python")  # type: ignore[operator]
    program = (
        "import json, sys; from benchmarks.loaders.job import Job\n"
        f"from benchmarks.loaders import {module} as side\n"
        "states, job = map(json.loads, sys.argv[1:])\n"
        "print(json.dumps(side.redistribute(states, Job(**job))))"
    )
    command = [python, "-c", program, json.dumps(saved), json.dumps(asdict(job))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _global_steps(ranks: Sequence[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """Return (number, checksum) of the samples of each global step, in rank order."""
    answers = [rank["answers"][0] for rank in ranks]
    share = GLOBAL_BATCH // len(answers)
    pairs = [list(zip(answer["ids"], answer["sums"])) for answer in answers]
    steps = min(len(found) for found in pairs) // share
    return [
        [entry for found in pairs for entry in found[step * share : (step + 1) * share]]
        for step in range(steps)
    ]


def _sets(steps: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    return [sorted(step) for step in steps]


def _equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(a == b for a, b in zip(one, other))


# Requests -----------------------------------------------------------------------------------------


_SHARDS = (".tar", ".mds", ".bin")


def requests(bench: Bench, name: str) -> Any:
    """Return the requests of one cold pass, and of a cold pass followed by a second one."""
    assert bench.bucket is not None
    counts = {}
    with CountingProxy(bench.bucket.endpoint) as proxy:
        for epochs in (1, 2):
            proxy.clear()
            urls = bench.bucket.urls(proxy.endpoint) if name == "webdataset" else ()
            proxy.clear()
            with tempfile.TemporaryDirectory(dir=bench.root) as cache:
                job = bench.job(
                    place="s3", bucket=BUCKET, cache=cache, urls=urls, epochs=epochs,
                    limit=epochs * bench.count,
                )  # fmt: skip
                answer = bench.run(name, [job], proxy.endpoint)["answers"][0]
            counts[f"epochs_{epochs}"] = {
                **proxy.counts(_SHARDS), "MiB": round(proxy.bytes / 2**20, 1),
                "samples": answer["count"], "error": answer["error"],
            }  # fmt: skip
    return counts
