"""Runs of the fusion benchmark: when media start, and their share of the tokens from then on.

All runs of a seed have the same numbers of media tokens and of text tokens, within one per cent.
This requires full text rows, and a total number of sample windows whose half and four fifths are
integers, because a stage begins at the border of a window. A run ends with a whole step, and a
text-only step is a hundredth of all tokens. Each arm therefore ends at the nearby step at which the
arms match best. If they do not match well enough, the total becomes slightly smaller or larger for
all arms of the seed. All of this is planned before training.
"""

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from benchmarks.fusion.corpus import MEDIA, TEXT, build
from data_pipeline.access import open_data
from data_pipeline.index.manifest import read_index
from data_pipeline.plan.blend import UNITS
from data_pipeline.plan.planner import Planner
from kimi_pretrain.config import Config, load_config

# Arm -> start of media as a share of the tokens, and media share from then on (Table 1 of K2.5).
ARMS = {"early": (0.0, 0.1), "mid": (0.5, 0.2), "late": (0.8, 0.5)}
VISION = 0.1
RATES = ("constant", "decaying")
SEQ_LEN, ROWS, WINDOWS = 256, 4, 40
# Largest relative difference between the arms' tokens, and the scales of the total that are tried
# to reach it.
APART = 0.006
SCALES = sorted((i / 200 for i in range(190, 211)), key=lambda scale: abs(scale - 1))
LR, MIN_LR = 3e-3, 3e-4
MODEL = (
    "model.language.num_layers=2", "model.language.num_experts=4", "model.vision.depth=1",
    "model.vision.width=64", "model.vision.mlp_width=128", "model.language.hidden_size=96",
    "model.vision.out_width=96",
)  # fmt: skip
COMMON = (
    *MODEL, "layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1", f"data.seq_len={SEQ_LEN}",
    f"data.rows_per_step={ROWS}", f"train.rows_per_microbatch={ROWS}", "data.shard_window=8",
    "data.limits={image: 144, frame: 144}", "data.max_epochs={}", "data.augment={}",
    "data.cache=null", "data.requests_per_second=null", "train.trace_step=null",
    "train.pictures=false", "train.efficiency_pairs=0", "train.threads=1", "dep.max_split=1",
    "checkpoint.every=null", "optim.measure_orthogonality=false", "data.heldout_tokens=1000000",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Scope of the training.

    Attributes:
        window: samples packed together; a text-only run has WINDOWS such windows.
        every: steps between validations.
        walls, cuts, text_bytes: sizes of the corpus.
    """

    window: int = 9
    every: int = 8
    walls: int = 1500
    cuts: int = 24
    text_bytes: int = 1_000_000


QUICK = Size(window=1, every=4, walls=60, cuts=2, text_bytes=150_000)


@dataclass(frozen=True)
class Job:
    """A run to train.

    Attributes:
        name: name of its files.
        config: configuration with token budget and learning rate.
        work: folder of all runs.
    """

    name: str
    arm: str
    rate: str
    seed: int
    config: Config
    work: Path


@dataclass(frozen=True)
class End:
    """Possible end of a run: a step, and the tokens trained on by then."""

    step: int
    text: int
    vision: int


def corpus_in(work: Path, size: Size) -> Path:
    """Return the folder of the corpus, which is built unless an earlier try has built it."""
    corpus, built = work / "corpus", work / "corpus_built"
    if not built.exists():
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        build(corpus, walls=size.walls, cuts=size.cuts, text_bytes=size.text_bytes)
        built.touch()
    return corpus


def jobs_of(work: Path, size: Size, seeds: Iterable[int]) -> list[Job]:
    """Return all runs, ordered by seed."""
    corpus = corpus_in(work, size)
    jobs = []
    for seed in seeds:
        shared = (
            *COMMON, f"data.root={corpus}", f"data.pack_window={size.window}",
            f"data.seed={seed}", f"train.seed={seed}", f"train.validate_every={size.every}",
            "data.heldout={" + ", ".join(f"{name}_heldout: 1" for name in (*MEDIA, *TEXT)) + "}",
        )  # fmt: skip
        whole = _budget(load_config("tiny_cpu", [*shared, *_only_text()]))
        blends, ends = _equal(shared, whole)
        for (arm, settings), end in zip(blends.items(), ends, strict=True):
            for rate in RATES:
                budget = f"data.budget={{text: {end.text}, vision: {end.vision}}}"
                changed = [*settings, *_rate(rate, end.step), budget]
                name, config = f"{rate}_{arm}_seed_{seed}", load_config("tiny_cpu", changed)
                jobs.append(Job(name, arm, rate, seed, config, work))
    return jobs


def _equal(shared: Sequence[str], whole: int) -> tuple[dict[str, list[str]], tuple[End, ...]]:
    """Return settings and ends of all arms with nearly equal tokens, about `whole` in total."""
    found = []
    for scale in SCALES:
        blends = {arm: [*shared, *_blend(arm, scale * whole)] for arm in ARMS}
        configs = [load_config("tiny_cpu", settings) for settings in blends.values()]
        ends = nearest([_ends(config, VISION * scale * whole) for config in configs])
        found.append((blends, ends))
        if apart(ends) <= 1 + APART:
            break
    return min(found, key=lambda one: apart(one[1]))


def _only_text() -> list[str]:
    shares = ", ".join(f"{name}: 1" for name in TEXT)
    return [f"data.sources={{{shares}}}", "data.vision_token_ratio=null", "data.schedule=[]"]


def _blend(arm: str, whole: float) -> list[str]:
    """Return the data settings of an arm, with `whole` tokens in total."""
    start, share = ARMS[arm]
    shares = "{" + ", ".join(f"{name}: 1" for name in (*MEDIA, *TEXT)) + "}"
    if not start:
        return [f"data.sources={shares}", f"data.vision_token_ratio={share}", "data.schedule=[]"]
    stage = f"after_tokens: {int(start * whole)}, vision_token_ratio: {share}, sources: {shares}"
    return [*_only_text()[:2], f"data.schedule=[{{{stage}}}]"]


def _rate(rate: str, steps: int) -> list[str]:
    """Return the learning-rate settings of a run with this number of steps."""
    constant, warmup = rate == "constant", steps // 30
    decay = 0 if constant else steps - warmup
    return [
        f"optim.lr={LR}", f"optim.min_lr={LR if constant else MIN_LR}",
        f"optim.warmup_steps={warmup}", f"optim.stable_steps={steps - warmup - decay}",
        f"optim.decay_steps={decay}", f"train.steps={steps + 10}",  # the budget ends it
    ]  # fmt: skip


def _planner(config: Config) -> Planner:
    store = open_data(config.data)
    return Planner([read_index(store, name) for name in config.data.source_names], config.data)


def _budget(config: Config) -> int:
    """Return the expected tokens of WINDOWS windows of text."""
    planner = _planner(config)
    weights = planner.mixture.segments[0].weights
    means = (total.tokens / total.samples for total in planner.totals)
    mean = sum(weight / UNITS * one for weight, one in zip(weights, means, strict=True))
    return int(WINDOWS * config.data.pack_window * mean)


def _ends(config: Config, vision: float) -> list[End]:
    """Return the steps at which a run may end, with about `vision` media tokens."""
    planner, ends = _planner(config), list[End]()
    state = planner.state_dict()
    while state["tokens"][1] < 1.05 * vision:
        _, state = planner.plan(state)
        ends.append(End(state["step"], *state["tokens"]))
    about = [end for end in ends if end.vision > 0.95 * vision]
    return about if len(about) > 1 else ends[-2:]  # steps of a short run are large


def nearest(ends: Sequence[Sequence[End]]) -> tuple[End, ...]:
    """Return one end of each arm such that the token counts differ least."""
    return min(product(*ends), key=apart)


def apart(chosen: Iterable[End]) -> float:
    """Return the ratio of most to fewest tokens among some ends, for the kind that differs more."""
    texts, visions = zip(*((end.text, end.vision) for end in chosen))
    return max(max(texts) / min(texts), max(visions) / min(visions))


def finished(job: Job) -> dict[str, Any] | None:
    """Return an earlier finished run if its configuration is identical, otherwise None."""
    kept = _kept(job)
    earlier = json.loads(kept.read_text()) if kept.is_file() else {}
    same = earlier.get("config") == job.config.model_dump(mode="json")
    return earlier["run"] if same else None


def _kept(job: Job) -> Path:
    return job.work / "done" / f"{job.name}.json"


def train_one(job: Job) -> str:
    """Train a run in this process, store the results and return the run's name."""
    from kimi_pretrain.train import train

    folder = job.work / "runs" / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin = time.process_time()
    train(job.config, folder)
    found = {
        "arm": job.arm, "rate": job.rate, "seed": job.seed,
        **measured(_lines(folder / "metrics.jsonl"), _lines(folder / "heldout.jsonl")),
        "processor_seconds": time.process_time() - begin,
    }  # fmt: skip
    kept = _kept(job)
    kept.parent.mkdir(exist_ok=True)
    part = kept.with_suffix(".part")
    part.write_text(json.dumps({"config": job.config.model_dump(mode="json"), "run": found}))
    part.rename(kept)
    return job.name


def measured(
    steps: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures of a run from its metrics.jsonl and heldout.jsonl.

    `text` and `vision` are tokens trained on. `start` is the number of steps before the first
    media. `share` is the media share of the tokens after the first step with media. `curve` has one
    entry for each validation: [steps, tokens, {source: loss}].
    """
    text, vision = ([line[f"{kind}_tokens"] for line in steps] for kind in ("text", "vision"))
    start = next(number for number, tokens in enumerate(vision) if tokens)
    # The first step with media may still be half text, because a window can start inside a step.
    later = slice(start + 1, None)
    sums = [0, *accumulate(a + b for a, b in zip(text, vision, strict=True))]
    return {
        "steps": len(steps),
        "text": sum(text),
        "vision": sum(vision),
        "start": start,
        "share": sum(vision[later]) / (sum(vision[later]) + sum(text[later])),
        "curve": [
            [line["step"], sums[line["step"]], line["loss_by_source"]] for line in heldout
        ],
        "loss_tokens": heldout[0]["loss_tokens_by_source"],
    }  # fmt: skip


def _lines(file: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
