"""Starts real processes on small configurations and returns their results."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import fork_server

WORKER = Path(__file__).parent / "worker.py"

# A tiny Kimi that takes seconds, with every mechanism, four layers and rows of 128 tokens.
SMALL = (
    "model.vision.width=32", "model.vision.depth=2", "model.vision.heads=2",
    "model.vision.mlp_width=64", "model.vision.pos_grid=8", "model.vision.out_width=64",
    "model.language.hidden_size=64", "model.language.dense_ffn_size=96",
    "model.language.expert_ffn_size=32", "model.language.q_lora_rank=24",
    "model.language.kv_lora_rank=16", "model.language.qk_nope_dim=12",
    "model.language.qk_rope_dim=4", "model.language.v_dim=12", "model.language.vocab_size=768",
    "data.sources={pictures: 1.0, words: 1.0}", "data.tokenizer=tokenizer.tiktoken",
    "data.vision_token_ratio=0.2", "data.seq_len=128", "data.rows_per_step=4",
    "data.pack_window=64", "data.prefetch_steps=1",
    "data.schedule=[]", "data.max_epochs={}", "data.augment={}", "data.cache=null",
    "data.limits={image: 256, frame: 64}", "optim.warmup_steps=2", "train.rows_per_microbatch=1",
    "dep={max_patches_per_chunk: 4096}",
    "train.efficiency_pairs=0", "train.trace_step=null", "train.pictures=false",
    "checkpoint.every=null",
)  # fmt: skip


def layout(pp: int = 1, vpp: int = 1, dp: int = 1, ep: int = 1) -> tuple[str, ...]:
    """Return the overrides of a layout."""
    return (f"layout.pp={pp}", f"layout.vpp={vpp}", f"layout.dp={dp}", f"layout.ep={ep}")


Job = tuple[str, Sequence[str]]  # an action of worker.py, and overrides


def run_job(action: str, out: Path, processes: int, *overrides: str, timeout: float = 200.0):
    """Run one action of worker.py in `processes` processes; return the result of rank 0.

    Raises:
        AssertionError: the job failed; shows the end of its output.
    """
    return run_jobs({action: (action, overrides)}, out, processes, timeout)[action]


def run_jobs(
    jobs: Mapping[str, Job], out: Path, processes: int, timeout: float = 200.0
) -> dict[str, Any]:
    """Run several actions in the same processes; return name -> result of rank 0.

    All actions use the same number of processes. Jobs are grouped by layout in order of first use,
    so that each layout's mesh is built once.

    Raises:
        AssertionError: a job failed; shows the end of the output.
    """
    done = start_jobs(jobs, out, processes, timeout)
    assert done.returncode == 0, f"{', '.join(jobs)} failed:\n{(done.stdout + done.stderr)[-6000:]}"
    return torch.load(out / "result.pt", weights_only=False)


def start_jobs(
    jobs: Mapping[str, Job], out: Path, processes: int, timeout: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run the processes of `run_jobs` and return the result, whatever the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    plain = [(name, action, [*SMALL, *overrides]) for name, (action, overrides) in jobs.items()]
    layouts = [[one for one in job[2] if one.startswith("layout.")] for job in plain]
    plain = [job for _, job in sorted(zip(layouts, plain), key=lambda one: layouts.index(one[0]))]
    (out / "jobs.json").write_text(json.dumps(plain))
    script = [str(WORKER), str(out)]
    if processes == 1:
        return fork_server.run(script, timeout)
    return fork_server.run_ranks([script] * processes, timeout)


def run_ranks(script: str | Path, world: int, folder: Path, timeout: float = 200.0) -> list[Any]:
    """Run `script RANK WORLD FOLDER` once for each rank; see `join_ranks`.

    Returns:
        contents of each rank's FOLDER/rankN.pt.
    """
    commands = [[str(script), str(rank), str(world), str(folder)] for rank in range(world)]
    done = fork_server.run_ranks(commands, timeout)
    assert done.returncode == 0, done.stdout[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def join_ranks(rank: int, world: int, folder: Path) -> None:
    """Join the processes of `run_ranks` with one thread and a rendezvous in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=90),
    )


def read_metrics(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(
    run_dir: Path, *overrides: str, resume: Path | None = None, timeout: float = 150.0
) -> subprocess.CompletedProcess[str]:
    """Run `kimi-pretrain train` on the small configuration; return it, whatever its exit code."""
    arguments = ["--config", "tiny_cpu", "--run-dir", str(run_dir), *SMALL, *overrides]
    arguments += ["--resume", str(resume)] if resume is not None else []
    return fork_server.run(["-m", "launch.cli", "train", *arguments], timeout)
