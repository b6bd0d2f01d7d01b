"""The demo: runs the whole system on real data on this machine and leaves no process running.

1. Start an S3 server on the loopback address, with credentials made for this run.
2. Build a corpus of images, video and text from installed packages, ingest it into the server,
   verify it against its indices, and render HTML pages of its contents and of rows as the model
   gets them.
3. Train from S3, with torchrun.
4. Train again from the middle checkpoint, in new processes, and compare the runs bit by bit.
5. Read held-out pages of digits, with the right and with swapped images.
6. Verify the gradients of DEP against one process, with planted faults.
7. Register corpus and run in a catalogue, and print the command that shows them in a browser.
8. Write summary.json and pictures.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from data_pipeline.store.open import open_store
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import Config, describe, load_config
from kimi_pretrain.tools.run_plots import draw, read_steps
from kimi_pretrain.verify.dep_faults import FAULTS
from launch.demo.corpus import TOKENIZER_KEY, build_corpus
from launch.demo.result import show
from launch.demo.summary import (
    compare_runs,
    read_json,
    summarise,
    verified_gradients,
)
from launch.local import supervise, torchrun
from launch.local.job import Job
from launch.local.s3_server import S3Server
from launch.verify.dep import VerifyDep
from launch.verify.jobs import JobStopped
from launch.verify.verification import verify

BUCKET = "kimi-demo"
HELD_OUT = "digits_heldout"
# File that marks a demo's folder, which a later demo may empty.
MARKER = ".kimi-pretrain-demo"


class DemoError(ValueError):
    """A part of the demo failed; the message names the part and its log."""


def run_demo(config_path: str, run_dir: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the demo; return the content of summary.json.

    Args:
        config_path: YAML file or name of a preset.
        run_dir: emptied if it belongs to an earlier demo; refused if it has any other content.
        overrides: `section.key=value`, for example fewer steps.

    Raises:
        DemoError: a part failed; all started processes have been stopped.
    """
    console = Console()
    overrides = (
        *gpu_overrides(torch.cuda.device_count(), load_config(config_path, overrides)),
        *overrides,
        f"data.root=s3://{BUCKET}",
        f"data.tokenizer={TOKENIZER_KEY}",
    )
    if load_config(config_path, overrides).data.cache is not None:
        overrides = (*overrides, f"data.cache.folder={(run_dir / 'cache').resolve()}")
    config = load_config(config_path, overrides)
    check_lengths(config)
    prepare_folder(run_dir)
    console.print(describe(config), highlight=False)
    seconds: dict[str, float] = {}
    # The folder layout of `kimi-pretrain s3 start`, so that this command can serve the corpus
    # later.
    with s3_server(run_dir / "s3" / "data") as server, environment(server.exported()):
        console.print(f"S3 server at {server.endpoint}: a wrong secret was refused")
        with timed(seconds, "setup_data"):
            corpus = make_corpus(console)
        (run_dir / "corpus.json").write_text(json.dumps(corpus, indent=1) + "\n")
        with timed(seconds, "inspect_data"), step(console, "verifying and showing the corpus"):
            inspect_data(config_path, overrides, run_dir)
        job = Job(config_path, str(run_dir), overrides)
        with timed(seconds, "train"), step(console, "training"):
            train(job, config)
        middle = middle_checkpoint(run_dir, config.train.steps)
        # Only the first run measures the pairs of timed steps at the end of a run.
        again = Job(
            config_path,
            str(run_dir / "resume"),
            (*overrides, "train.efficiency_pairs=0"),
            str(middle),
        )
        with timed(seconds, "resume"), step(console, f"resuming from {middle.name}"):
            train(again, config)
        with timed(seconds, "eval"), step(console, "reading held-out digits"):
            evaluation = evaluate(run_dir, config.train.steps)
        with timed(seconds, "verify_dep"), step(console, "comparing gradients with one process"):
            verified = verify_gradients(config_path, overrides, run_dir)
        with timed(seconds, "register"), step(console, "registering the corpus and the run"):
            page = register(run_dir, server.endpoint)
    summary = write_results(run_dir, config, evaluation, verified, seconds)
    show(console, run_dir, summary, page)
    return summary


def gpu_overrides(num_gpus: int, config: Config) -> tuple[str, ...]:
    """Return the overrides for a machine with GPUs; empty without GPUs.

    GPUs use bfloat16. NCCL needs one GPU per process. With fewer GPUs than processes in the layout,
    the data-parallel replicas are kept, if they fit, and the pipeline is dropped.
    """
    if num_gpus == 0:
        return ()
    bf16 = ("train.dtype=bfloat16",)  # the grouped expert product on CUDA needs it
    if num_gpus >= config.layout.world_size():
        return bf16
    replicas = 1 if num_gpus < config.layout.dp else config.layout.dp
    return (
        *bf16,
        "layout.pp=1",
        "layout.vpp=1",
        f"layout.dp={replicas}",
        f"layout.ep={min(replicas, config.layout.ep)}",
        "layout.stages=null",
    )


def check_lengths(config: Config) -> None:
    """Refuse a run that has no checkpoint in its middle to resume from.

    Raises:
        ValueError: names both numbers.
    """
    steps, every = config.train.steps, config.checkpoint.every
    if not every or every >= steps:
        raise ValueError(
            f"checkpoint.every={every} with train.steps={steps}: the demo resumes from a "
            f"checkpoint in the middle; use for example checkpoint.every={max(1, steps // 2)}"
        )


def prepare_folder(run_dir: Path) -> None:
    """Create an empty run folder; remove the content of an earlier demo.

    Raises:
        ValueError: the folder has other content.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        if not (run_dir / MARKER).is_file():
            raise ValueError(
                f"{run_dir} exists and is not the folder of an earlier demo; nothing was touched: "
                "choose another --run-dir"
            )
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / MARKER).touch()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run an S3 server that refuses a wrong secret; it is always stopped at the end.

    Raises:
        DemoError: the server did not start.
    """
    with ExitStack() as stack:
        try:
            server = stack.enter_context(S3Server(folder, BUCKET))
        except RuntimeError as error:
            raise DemoError(str(error)) from error
        yield server


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time spent inside to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """Print the start of a part of the demo, and its duration at the end."""
    start = time.perf_counter()
    console.print(f"[bold]{what}[/bold] ...")
    yield
    console.print(f"  done in {time.perf_counter() - start:.0f} s", highlight=False)


def make_corpus(console: Console) -> dict[str, dict]:
    """Build the corpus in the running S3 server and print its contents."""
    with console.status("building the corpus") as status:
        report = build_corpus(
            open_store(f"s3://{BUCKET}"), progress=lambda stage, *_: status.update(stage)
        )
    columns = ("samples", "items", "patches", "text_tokens", "shards", "seconds")
    table = Table("source", *columns, title="corpus", title_justify="left", box=None)
    for name, numbers in report.items():
        table.add_row(name, *(f"{numbers[column]:,}" for column in columns))
    console.print(table)
    return report


def inspect_data(config_path: str, overrides: tuple[str, ...], run_dir: Path) -> None:
    """Check every entry of the corpus, and write stats.html and rows.html into the run folder.

    Raises:
        DemoError: a source does not match its index.
    """
    uri, config = f"s3://{BUCKET}", ("--config", config_path)
    command("data", "verify", uri, what="verification")
    stats, rows = str(run_dir / "stats.html"), str(run_dir / "rows.html")
    command("data", "stats", uri, *config, "--out", stats, what="statistics")
    command("data", "show", *config, *overrides, "--out", rows, what="showing rows")


def register(run_dir: Path, endpoint: str) -> str:
    """Register corpus and run in a catalogue in the run folder; return the command to view them.

    Raises:
        DemoError: a source could not be registered.
    """
    if find_spec("sqlalchemy") is None or find_spec("starlette") is None:
        return "pip install 'kimi-pretrain[platform]' (docs/PLATFORM.md)"
    catalog = run_dir / "catalog.sqlite"
    for words in (("rebuild", f"s3://{BUCKET}"), ("scan", str(run_dir))):
        line = ("data", "catalog", *words, "--catalog", str(catalog))
        command(*line, what="the catalogue")
    folder, file = shlex.quote(str(run_dir)), shlex.quote(str(catalog))
    port = endpoint.rpartition(":")[2]  # the catalogue stores the endpoint of the sources
    return (
        f"kimi-pretrain s3 start --folder {folder}/s3 --bucket {BUCKET} --port {port} && "
        f"source {folder}/s3/credentials.env && "
        f"kimi-pretrain data serve s3://{BUCKET} --run {folder} --catalog {file}"
    )


def command(*arguments: str, what: str) -> str:
    """Run a `kimi-pretrain` command in its own process; return its output.

    Raises:
        DemoError: the command failed; the message has the last line of its output.
    """
    line = [sys.executable, "-m", "launch.cli", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        # The last line names the cause, also in a traceback.
        printed = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise DemoError(f"{what} stopped: {printed.splitlines()[-1].removeprefix('error: ')}")
    return done.stdout


def train(job: Job, config: Config) -> None:
    """Run one training job to its end.

    Raises:
        DemoError: the job failed.
    """
    nodes = torchrun.Nodes(config.layout.world_size())
    with torchrun.prepared(job, nodes) as (line, env):
        code, message = supervise.run(line, env, Path(job.run_dir))
    if code or message:
        reason = message or f"exit code {code}"
        raise DemoError(f"training stopped: {reason} (logs in {Path(job.run_dir) / 'logs'})")


def middle_checkpoint(run_dir: Path, steps: int) -> Path:
    """Return the complete checkpoint nearest to the middle of a run, never that of the last step.

    Raises:
        DemoError: there is no such checkpoint.
    """
    place = open_place(run_dir / "checkpoints")
    earlier = [step for step in place.steps() if step < steps]
    if not earlier:
        raise DemoError(f"no complete checkpoint before step {steps} in {place.uri}")
    middle = min(earlier, key=lambda step: (abs(step - steps / 2), step))
    return Path(place.checkpoint(middle).uri)


def evaluate(run_dir: Path, steps: int) -> dict[str, Any]:
    """Read the held-out pages with the finished model, in a separate process.

    Raises:
        DemoError: the evaluation failed.
    """
    checkpoint = run_dir / "checkpoints" / f"step_{steps:08d}"
    config = str(run_dir / "config.yaml")
    printed = command(
        *("eval", "--json", "--config", config, "--checkpoint", str(checkpoint)),
        *("--source", HELD_OUT),
        what="evaluation",
    )
    return json.loads(printed.splitlines()[-1])


def verify_gradients(config_path: str, overrides: tuple[str, ...], run_dir: Path) -> dict[str, Any]:
    """Run `verify dep` with its self-test: the step unchanged, and with each planted fault.

    Raises:
        DemoError: the comparison could not run.
    """
    try:
        result = verify(VerifyDep(), config_path, overrides, faults=tuple(FAULTS)).as_dict()
    except (JobStopped, ValueError) as error:
        raise DemoError(f"verification of gradients stopped: {error}") from error
    (run_dir / "verify_dep.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def write_results(
    run_dir: Path,
    config: Config,
    evaluation: dict[str, Any],
    verified: dict[str, Any],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Compare the two runs, write summary.json and the pictures; return the summary."""
    metrics = read_steps(run_dir / "metrics.jsonl", config.train.steps)
    efficiency = run_dir / "efficiency.json"
    summary = summarise(
        config,
        metrics,
        read_json(efficiency) if efficiency.is_file() else None,
        compare_runs(run_dir, run_dir / "resume"),
        evaluation,
        seconds,
    )
    summary["verify_dep"] = verified_gradients(verified)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(run_dir, run_dir)
    return summary
