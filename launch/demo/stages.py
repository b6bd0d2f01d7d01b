"""`make stages`: a toy version of K2.5's training stages, from one file, on the demo's corpus.

The corpus gets one more source, `books`, with texts longer than the rows of the first stages.
Unlike the demo, it resumes in the same folder after it was stopped or killed.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer
from kimi_pretrain.tools.run_plots import read_steps
from kimi_pretrain.weights.shapes import PARTS
from launch.chain.run import run_chain
from launch.chain.stages_file import PlannedStage, read_stages
from launch.demo.corpus import SHARD_BYTES, TOKENIZER_KEY
from launch.demo.python_texts import topics
from launch.demo.run import BUCKET, DemoError, environment, make_corpus, s3_server
from launch.demo.summary import read_json

CORPUS = "corpus.json"
SUMMARY = "summary.json"


def run_stages(chain: str, run_dir: Path, overrides: Sequence[str] = ()) -> int:
    """Run the chain; return the exit code of its last stage.

    Args:
        chain: the file, or the name of a shipped chain.
        run_dir: receives the corpus, the stages' runs and summary.json.
        overrides: `section.key=value`, for all stages.

    Raises:
        DemoError: the server did not start, or a frozen tensor has changed.
    """
    console, begun = Console(), time.monotonic()
    settings = (*gpu_overrides(torch.cuda.device_count()), *overrides)
    settings = (*settings, f"data.root=s3://{BUCKET}", f"data.tokenizer={TOKENIZER_KEY}")
    stages = read_stages(chain, settings, run_dir)
    with s3_server(run_dir / "s3") as server, environment(server.exported()):
        if not (run_dir / CORPUS).is_file():
            corpus = make_corpus(console) | {"books": add_books()}
            (run_dir / CORPUS).write_text(json.dumps(corpus, indent=1) + "\n")
        code = run_chain(stages)
    if code == 0 and (summary := summarise(stages)) is not None:
        summary["seconds"] = round(time.monotonic() - begun)
        (run_dir / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
        _show(console, summary)
    return code


def gpu_overrides(num_gpus: int) -> tuple[str, ...]:
    """Return the overrides for a machine with GPUs: a single process if there is one GPU."""
    if num_gpus == 0:
        return ()
    alone = ("layout={}",) if num_gpus == 1 else ()
    return ("train.dtype=bfloat16", *alone)


def add_books() -> dict[str, int]:
    """Write the source `books`, the language reference's unchanged topics; return its sizes."""
    store = open_store(f"s3://{BUCKET}")
    tokenizer = Tokenizer.from_store(store, TOKENIZER_KEY)
    samples = (
        CrudeSample(f"book{number:04d}", [TextSegment(text, True)], {})
        for number, text in enumerate(topics())
        if text.strip()
    )
    index = ingest(samples, store, "books", tokenizer, SHARD_BYTES, category="text")
    return {"samples": int(index.num_samples), "text_tokens": int(index.text_tokens.sum())}


def summarise(stages: Sequence[PlannedStage]) -> dict[str, Any] | None:
    """Return losses and number of unchanged tensors per stage; None if a stage is unfinished.

    Raises:
        DemoError: a frozen tensor has changed.
    """
    found: dict[str, Any] = {"stages": {}}
    for stage in stages:
        if not (stage.folder / "state_hashes.json").is_file():
            return None
        lines = read_steps(stage.folder / "metrics.jsonl", stage.config.train.steps)
        same, changed = frozen(stage, stages)
        if changed:
            raise DemoError(f"{stage}: {changed[0]!r} was frozen, and has changed")
        found["stages"][stage.name] = {
            "steps": len(lines),
            "loss": [lines[0]["loss"], lines[-1]["loss"]],
            "frozen_tensors_as_they_were": same,
        }
    return found


def frozen(stage: PlannedStage, stages: Sequence[PlannedStage]) -> tuple[int, list[str]]:
    """Compare a stage's frozen tensors with those of its source stages, by SHA-256.

    Returns:
        Number of unchanged tensors, and the names of the changed tensors.
    """
    after = _hashes(stage)
    names = tuple(PARTS[part] for part in stage.config.train.frozen)
    sources = dict(_sources(stage, stages))
    same, changed = 0, list[str]()
    for name in after:
        if not name.startswith(names):
            continue
        tower = name.startswith(PARTS["vision_tower"])
        before = sources.get("train.vision_weights" if tower else "train.start_from")
        before = before or sources.get("train.start_from")
        if before is not None and before[name] == after[name]:
            same += 1
        elif before is not None:
            changed.append(name)
    return same, changed


def _sources(
    stage: PlannedStage, stages: Sequence[PlannedStage]
) -> Iterator[tuple[str, dict[str, str]]]:
    for key, name in stage.sources.items():
        yield key, _hashes(next(one for one in stages if one.name == name))


def _hashes(stage: PlannedStage) -> dict[str, str]:
    return read_json(stage.folder / "state_hashes.json")["per_tensor"]


def _show(console: Console, summary: dict[str, Any]) -> None:
    table = Table("stage", "steps", "loss", "frozen tensors, as they were", box=None)
    for name, values in summary["stages"].items():
        first, last = values["loss"]
        kept = str(values["frozen_tensors_as_they_were"] or "-")
        table.add_row(name, str(values["steps"]), f"{first:.3f} -> {last:.3f}", kept)
    console.print(table)
    console.print(f"{summary['seconds']} s", highlight=False)
