"""Time from the command to the first step of a resumed run, after few and many steps."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from data_pipeline.store.open import FolderStore
from launch.demo.corpus import CorpusSize, build_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = CorpusSize(
    digits=40, digits_heldout=2, where=12, charts=2, per_photo=1, per_clip=1, pages=2,
    prose_bytes=20_000, code_bytes=20_000,
)  # fmt: skip
MODEL = (
    *("layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1", "train.threads=1"),
    *("model.language.num_layers=2", "model.vision.depth=1", "data.rows_per_step=2"),
    *("train.rows_per_microbatch=2", "data.schedule=[]", "data.cache=null", "data.max_epochs={}"),
    *("data.requests_per_second=null", "train.trace_step=null", "train.efficiency_pairs=0"),
)


def measure(folder: Path, steps: list[int], repeats: int) -> dict[str, list[float]]:
    """Train a run for each number of steps, then resume the runs in turns, in new processes.

    Returns:
        seconds of each resume, by number of steps.
    """
    corpus = folder / "corpus"
    corpus.mkdir()
    build_corpus(FolderStore(corpus), size=CORPUS)
    for count in steps:
        _train(folder, count, f"train.steps={count}", f"checkpoint.every={count}")
    found: dict[str, list[float]] = {str(count): [] for count in steps}
    for _ in range(repeats):
        for count in steps:
            found[str(count)].append(_resume(folder, count))
    return found


def _resume(folder: Path, count: int) -> float:
    start = time.time()
    _train(folder, count, f"train.steps={count + 1}", "checkpoint.every=null", resume=True)
    *_, last = (_run(folder, count) / "metrics.jsonl").read_text().splitlines()
    line = json.loads(last)
    assert line["step"] == count + 1, line["step"]
    return (_run(folder, count) / "metrics.jsonl").stat().st_mtime - start


def _train(folder: Path, count: int, *overrides: str, resume: bool = False) -> None:
    command = [
        *(sys.executable, "-m", "launch.cli", "train", "--config", "tiny_cpu"),
        *("--run-dir", str(_run(folder, count)), *MODEL, f"data.root={folder / 'corpus'}"),
        *(*overrides, *(("--resume", "latest") if resume else ())),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=1800,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"training stopped:\n{(done.stdout + done.stderr)[-3000:]}")


def _run(folder: Path, count: int) -> Path:
    return folder / f"run_{count}"
