"""Early, mid and late fusion of media in toy form, after Table 1 and Figure 9 of the K2.5 report.

A small model is trained on the same numbers of media and text tokens in three schedules: media are
a tenth of all tokens from the first step on (early), a fifth from the middle on (mid), or half of
the last fifth (late). Each schedule runs with a constant learning rate and with one that falls over
the whole run, and with several seeds of weights and data. Reports the held-out loss of text and of
media along the run, with 95% intervals of the mean over seeds, and differences within a seed.

    python -m benchmarks.bench_fusion             # fusion_cpu.*, a picture; states the minutes
    python -m benchmarks.bench_fusion --quick     # a minute; figures not to quote

Finished runs stay in the --work folder, and a restarted benchmark reuses them.
"""

import multiprocessing
from pathlib import Path
from typing import Any

import torch

from benchmarks import device as where
from benchmarks.fusion import report
from benchmarks.fusion.training import QUICK, Job, Size, finished, jobs_of, train_one
from benchmarks.result import RESULTS, write
from launch.local.quiet import quiet_libraries

ROOT = RESULTS.parent.parent


def main() -> None:
    arguments = where.parser(__doc__, "fusion")
    arguments.add_argument("--seeds", type=int, default=5, help="how many; default 5")
    arguments.add_argument("--processes", type=int, default=1, help="runs at once; default 1")
    arguments.add_argument("--work", type=Path, help="for the corpus and finished runs")
    arguments.add_argument("--pictures", type=Path, help="a folder; default docs/pictures")
    arguments = arguments.parse_args()
    about = where.about(arguments, where.device_of(arguments), "megatron-core")
    if arguments.device != "cpu":
        raise SystemExit("error: --device: each run is a fork on the CPU")
    name = "bench_fusion_quick" if arguments.quick else "bench_fusion"
    work = (arguments.work or ROOT / "runs" / name).resolve()
    size = QUICK if arguments.quick else Size()
    jobs = jobs_of(work, size, range(1 if arguments.quick else arguments.seeds))
    train_all(jobs, arguments.processes)
    runs: list[dict[str, Any]] = [run for job in jobs if (run := finished(job)) is not None]
    found = report.results(about, size, runs)
    write(found, arguments.out, report.page(found))
    pictures = ROOT / "docs" / "pictures"
    folder = arguments.pictures or (arguments.out.parent if arguments.quick else pictures)
    report.draw(found, folder / "fusion.png")


def train_all(jobs: list[Job], processes: int) -> None:
    """Train the unfinished runs in forks, because gloo's threads end only with their process."""
    left = [job for job in jobs if finished(job) is None]
    if not left:
        return
    quiet_libraries()
    import kimi_pretrain.train  # noqa: F401 # slow import, done once before the forks

    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for name in pool.imap(train_one, left):
            print(name, flush=True)


if __name__ == "__main__":
    main()
