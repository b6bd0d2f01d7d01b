"""Measures the benefit of the projector stage: the first loss of joint training with and without
it.

Runs the first four stages of `configs/stages/tiny.yaml` (`make stages`) in one process, with a
quarter of their rows and several seeds of weights and data. The stages train a narrow decoder, the
encoder on captions through this decoder, a wide decoder, and the projector between the two. Then
runs the first step of the joint stage twice, on the same batch with the same encoder and decoder:
with the trained projector, and with a randomly initialized one.

    python -m benchmarks.bench_projector             # projector_cpu.*, which states the minutes
    python -m benchmarks.bench_projector --quick     # a minute; figures not to quote

Finished stages stay in the --work folder, and a restarted benchmark reuses them.
"""

import json
import multiprocessing
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import device as where
from benchmarks.result import RESULTS, table, verdicts, write
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import Config
from launch.chain.stages_file import PlannedStage, read_stages
from launch.demo.corpus import TOKENIZER_KEY, CorpusSize, build_corpus
from launch.local.quiet import quiet_libraries

CHAIN, BEFORE, JOINT = "tiny", ("decoder_small", "captions", "decoder", "projector"), "joint"
SEEDS = (0, 1, 2)
SIZE = CorpusSize(digits=4000, digits_heldout=16, prose_bytes=500_000, code_bytes=500_000)
SMALL = CorpusSize(400, 16, 40, 12, 1, 2, 12, 150_000, 150_000)
ONE_PROCESS = (
    "layout={}", "data.cache=null", "data.requests_per_second=null", "train.threads=1",
    f"data.tokenizer={TOKENIZER_KEY}", "data.rows_per_step=4",
)  # fmt: skip

Found = Mapping[str, Any]


def main() -> None:
    arguments = where.parser(__doc__, "projector")
    arguments.add_argument("--work", type=Path, help="for the corpus and finished stages")
    arguments = arguments.parse_args()
    about = where.about(arguments, where.device_of(arguments), "megatron-core")
    if arguments.device != "cpu":
        raise SystemExit("error: --device: each stage is a fork on the CPU")
    name = "bench_projector_quick" if arguments.quick else "bench_projector"
    work = (arguments.work or RESULTS.parent.parent / "runs" / name).resolve()
    corpus = corpus_in(work, quick=arguments.quick)
    quiet_libraries()
    import kimi_pretrain.train  # noqa: F401 # slow import, done once before the forks

    torch.set_num_threads(1)
    seeds = SEEDS[: 1 if arguments.quick else None]
    runs = [of_seed(work, corpus, seed, quick=arguments.quick) for seed in seeds]
    found = {"about": about, "seeds": runs, "targets": targets(runs)}
    write(found, arguments.out, page(found))


def corpus_in(work: Path, *, quick: bool) -> Path:
    """Return the demo's corpus, which is built unless an earlier try has built it."""
    corpus, built = work / "corpus", work / "corpus_built"
    if not built.exists():
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        build_corpus(FolderStore(corpus), size=SMALL if quick else SIZE)
        built.touch()
    return corpus


def of_seed(work: Path, corpus: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    """Train the stages of a seed; return the first losses of the joint stage, and the seconds."""
    settings = [*ONE_PROCESS, f"data.root={corpus}", f"data.seed={seed}", f"train.seed={seed}"]
    if quick:
        settings.append("train.steps=2")
    stages = read_stages(CHAIN, settings, work / f"seed_{seed}")
    by_name = {stage.name: stage for stage in stages}
    seconds = sum(done(by_name[name]) for name in BEFORE)
    joint = by_name[JOINT]
    firsts = {"with": joint.config, "without": without(joint.config, by_name)}
    found: dict[str, Any] = {"seed": seed}
    for form, config in firsts.items():
        once = config.replace(
            train=config.train.replace(steps=1, validate_every=None),
            checkpoint=config.checkpoint.replace(every=None),
        )
        folder = joint.folder.with_name(f"first_{form}")
        seconds += in_a_fork(once, folder)
        (line,) = (json.loads(text) for text in (folder / "metrics.jsonl").open())
        found[form] = {"loss": line["loss"], "by_source": line["loss_by_source"]}
    return found | {"processor_seconds": seconds}


def without(config: Config, stages: Mapping[str, PlannedStage]) -> Config:
    """Return the joint stage's config, changed to start from the projector stage's inputs."""
    taken = stages["projector"].config.train
    keys = ("start_from", "vision_weights", "vision_part")
    return config.replace(train=config.train.replace(**{k: getattr(taken, k) for k in keys}))


def done(stage: PlannedStage) -> float:
    """Train a stage unless an earlier try has finished it; return its CPU seconds."""
    told = stage.folder / "processor_seconds.json"
    if not told.exists():  # written last, so it marks a finished stage
        told.write_text(json.dumps(in_a_fork(stage.config, stage.folder)))
    return json.loads(told.read_text())


def in_a_fork(config: Config, folder: Path) -> float:
    """Train a run from scratch in a fork, because gloo's threads end only with their process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_trained, (config, folder))


def _trained(config: Config, folder: Path) -> float:
    from kimi_pretrain.train import train

    begin = time.process_time()
    train(config, folder)
    return time.process_time() - begin


# Results ------------------------------------------------------------------------------------------


def targets(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets with the measured values."""
    apart = [run["with"]["loss"] - run["without"]["loss"] for run in runs]
    return [
        {
            "target": "the first joint loss is lower with the projector's stage, for each seed",
            "found": ", ".join(f"{one:+.3f}" for one in apart),
            "met": all(one < 0 for one in apart),
        }
    ]


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    names = list(found["seeds"][0]["with"]["by_source"])
    rows = [
        [run["seed"], form, f"{run[form]['loss']:.3f}", *(_told(run[form], n) for n in names)]
        for run in found["seeds"]
        for form in ("with", "without")
    ]
    seconds = round(sum(run["processor_seconds"] for run in found["seeds"]))
    lines = [
        *where.heading("The projector's stage", found),
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"`configs/stages/{CHAIN}.yaml` in one process, 4 rows a step instead of 16; loss of the "
        "first joint batch before any update, nats a token, and by source.",
        "",
        *table(["seed", "projector's stage", "loss", *names], rows),
        "",
        f"{seconds:,} s of one core.",
    ]
    return "\n".join(lines) + "\n"


def _told(one: Found, name: str) -> str:
    loss = one["by_source"][name]
    return "-" if loss is None else f"{loss:.3f}"


if __name__ == "__main__":
    main()
