"""Toy context extension: the benefit of YaRN, and the jump of the logits where YaRN starts.

A small language model is trained in one process on rows of 256 tokens of real text (the Python
sources of the standard library). Two experiments continue from it:

1. extension: rows of 2,048 tokens, eight times as long, with YaRN's factor 8 and without YaRN.
   Reports the held-out loss by position, before the first longer step and after the last.
2. border: rows of 256 with K2.5's factor, 64. Reports the largest logit of each head, step by step.
   YaRN multiplies the softmax scale by its squared factor, 2.0047, from one step to the next;
   QK-Clip's threshold is just above the largest logit before.

Both use three seeds of weights and data. The border figures come from the first seed.

    python -m benchmarks.bench_extension             # 20 minutes; extension_cpu.*, two pictures
    python -m benchmarks.bench_extension --quick     # under a minute; figures not to quote

Finished seeds stay in the --work folder, and a restarted benchmark reuses them.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import device as where
from benchmarks.result import RESULTS, table, verdicts, write
from kimi_pretrain.config import load_config

if TYPE_CHECKING:
    from kimi_pretrain.run import Run

ROOT = RESULTS.parent.parent
SHORT, LONG, FACTOR = 256, 2048, 64.0
SEEDS = (0, 1, 2)
MODEL = (
    "model.language.num_layers=3", "model.language.num_experts=4", "model.vision.depth=1",
    "model.vision.width=64", "model.vision.mlp_width=128",
)  # fmt: skip
COMMON = (
    *MODEL, "layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1", "data.sources={train: 1}",
    "data.heldout={heldout: 1}", "data.tokenizer=tokenizer/tokenizer.tiktoken",
    "data.vision_token_ratio=null", "data.schedule=[]", "data.max_epochs={}", "data.augment={}",
    "data.cache=null", "data.requests_per_second=null", "train.trace_step=null",
    "train.pictures=false", "train.efficiency_pairs=0", "train.threads=1", "dep.max_split=1",
)  # fmt: skip
LR = "0.003"

Found = Mapping[str, Any]


def main() -> None:
    arguments = where.parser(__doc__, "extension")
    arguments.add_argument("--pictures", type=Path, help="a folder; default docs/pictures")
    arguments.add_argument("--work", type=Path, help="for the corpus and finished seeds")
    arguments = arguments.parse_args()
    device = where.device_of(arguments)
    about = where.about(arguments, device, "megatron-core")
    folder = arguments.pictures or (
        arguments.out.parent if arguments.quick else ROOT / "docs" / "pictures"
    )
    name = "bench_extension_quick" if arguments.quick else "bench_extension"
    work = (arguments.work or ROOT / "runs" / name).resolve()
    seeds = SEEDS[: 1 if arguments.quick else None]
    found = results(about, [of_seed(work, seed, quick=arguments.quick) for seed in seeds])
    write(found, arguments.out, page(found))
    draw_border(found["border"], folder / "yarn_border.png")
    draw_extension(found["extension"], folder / "yarn_extension.png")


# Training -----------------------------------------------------------------------------------------


def of_seed(work: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    """Return the results of a seed, from an earlier try if there is one, otherwise from `run`."""
    kept = work / "done" / f"seed_{seed}.json"
    if not kept.exists():
        if not (work / "corpus_built").exists():  # written last, so it marks a complete corpus
            for name in ("texts", "corpus"):
                shutil.rmtree(work / name, ignore_errors=True)
            make_corpus(work, quick=quick)
            (work / "corpus_built").touch()
        shutil.rmtree(work / f"seed_{seed}", ignore_errors=True)
        begin = time.process_time()
        found = run(work, seed, quick=quick)
        found["processor_seconds"] = round(time.process_time() - begin)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".part").write_text(json.dumps(found))
        kept.with_suffix(".part").rename(kept)
    return json.loads(kept.read_text())


def run(work: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    """Train everything of a seed; return losses by position and the maxima of the heads."""
    first, longer, few = (6, 2, 3) if quick else (400, 60, 20)
    seeds = (f"data.seed={seed}", f"train.seed={seed}")
    place = Path(f"seed_{seed}")
    base = trained(work, place / "base", first, SHORT, 8, (f"optim.lr={LR}", *seeds))
    start = (f"train.start_from={work / place / 'base'}", "optim.lr=0.001", *seeds)
    yarn = f"model.language.yarn={{factor: {LONG / SHORT}, original_max_position: {SHORT}}}"
    arms = {
        name: trained(work, place / name, longer, LONG, 2, (*start, *setting))
        for name, setting in {"YaRN": (yarn,), "plain": ()}.items()
    }
    # Above the largest logit of every head but less than twice that value, so that some heads
    # exceed it after the border.
    threshold = 1.1 * float(max(max(map(max, step)) for step in base["maxima"][-few:]))
    yarn = f"model.language.yarn={{factor: {FACTOR}, original_max_position: {SHORT}}}"
    clip = f"optim.qk_clip_threshold={threshold:.4f}"
    border = trained(work, place / "border", few, SHORT, 8, (*start, yarn, clip))
    return {
        "settings": {"steps": [first, longer, few], "rows": [[8, SHORT], [2, LONG], [8, SHORT]]},
        "extension": {
            f"{name}, {when}": arm["heldout"][number]
            for name, arm in arms.items()
            for number, when in ((0, "untrained"), (-1, "trained"))
        },
        "border": {
            "factor": FACTOR,
            "squared": (0.1 * float(torch.tensor(FACTOR, dtype=torch.float64).log()) + 1) ** 2,
            "threshold": threshold,
            "before": base["maxima"][-few:],
            "after": border["maxima"],
            "clipped_heads": border["clipped"],
        },
    }


def make_corpus(work: Path, *, quick: bool) -> None:
    """Ingest the larger files of the standard library and hold out every eighth file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    large = [file for file in files if file.stat().st_size > 10_000][: 24 if quick else None]
    for number, file in enumerate(large):
        place = work / "texts" / ("heldout" if number % 8 == 0 else "train") / f"{file.stem}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    vocabulary = ("--vocab-size", "1024")
    _data("tokenizer", str(work / "texts" / "train"), "--to", str(work / "corpus"), *vocabulary)
    for name in ("train", "heldout"):
        _data(
            "ingest", str(work / "texts" / name), "--to", str(work / "corpus"), "--name", name,
            "--category", "text", "--tokenizer", "tokenizer/tokenizer.tiktoken",
        )  # fmt: skip


def _data(*arguments: str) -> None:
    command = [sys.executable, "-m", "launch.cli", "data", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")


def trained(
    work: Path, name: Path, steps: int, seq_len: int, rows: int, overrides: tuple[str, ...]
) -> dict[str, Any]:
    """Train a run in the folder `name` and return its logits, clipped heads and held-out losses.

    Returns:
        the largest logits [layers][heads] and the number of clipped heads of each step, and the
        held-out losses by position of each validation.
    """
    from kimi_pretrain.train import train

    maxima: list[list[list[float]]] = []

    def watch(run: "Run") -> None:
        take = run.backbone.take_max_logits

        def taken() -> dict[int, torch.Tensor]:
            found = take()
            maxima.append([found[layer].tolist() for layer in sorted(found)])
            return found

        run.backbone.take_max_logits = taken  # type: ignore[method-assign]

    settings = (
        f"data.root={work / 'corpus'}", f"data.seq_len={seq_len}", f"data.rows_per_step={rows}",
        f"train.rows_per_microbatch={rows}", f"train.steps={steps}", f"checkpoint.every={steps}",
        f"train.validate_every={steps}", f"data.heldout_tokens={1 << 16}",
        "optim.min_lr=0.0003", f"optim.warmup_steps={max(1, steps // 20)}",
        f"optim.stable_steps={steps // 2}", f"optim.decay_steps={steps // 2}",
    )  # fmt: skip
    train(load_config("tiny_cpu", [*COMMON, *settings, *overrides]), work / name, prepare=watch)
    lines = _lines(work / name / "metrics.jsonl")
    heldout = _lines(work / name / "heldout.jsonl")
    return {
        "maxima": maxima,
        "clipped": [line["clipped_heads"] for line in lines],
        "heldout": [line["loss_by_position"] for line in heldout],
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# Results ------------------------------------------------------------------------------------------


def results(about: Found, seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all results for JSON: losses of all seeds, the border of the first."""
    first = seeds[0]
    arms = {
        name: {place: [seed["extension"][name][place] for seed in seeds] for place in losses}
        for name, losses in first["extension"].items()
    }
    found = {
        "about": about, "settings": first["settings"], "extension": arms,
        "border": first["border"], "ratios": [_ratio(seed["border"]) for seed in seeds],
        "processor_seconds": sum(seed["processor_seconds"] for seed in seeds),
    }  # fmt: skip
    return found | {"targets": targets(found)}


def targets(found: Found) -> list[dict[str, Any]]:
    """Return the targets with the measured values of each seed."""
    arms, border = found["extension"], found["border"]
    last = list(arms["YaRN, untrained"])[-1]
    far = {name: losses[last] for name, losses in arms.items()}
    gains = _apart(far["plain, untrained"], far["YaRN, untrained"])
    others = [min(of) for of in zip(*(far[name] for name in far if name != "YaRN, trained"))]
    best = _apart(others, far["YaRN, trained"])
    ratios = found["ratios"]
    rows = [
        (f"tokens {last}, untrained: no YaRN is worse, for each seed", _signed(gains),
         min(gains) > 0),
        (f"tokens {last}: YaRN, trained, is best, for each seed; ahead of the next by",
         _signed(best), min(best) > 0),
        (f"border: logits grow {border['squared']:.4f}-fold, median of heads",
         ", ".join(f"{ratio:.3f}" for ratio in ratios),
         all(abs(ratio / border["squared"] - 1) < 0.25 for ratio in ratios)),
        ("border: the first step clips heads that were under the threshold",
         str(border["clipped_heads"][0]), border["clipped_heads"][0] > 0),
    ]  # fmt: skip
    return [{"target": a, "found": b, "met": c} for a, b, c in rows]


def _apart(more: list[float], less: list[float]) -> list[float]:
    return [a - b for a, b in zip(more, less, strict=True)]


def _signed(values: list[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


def _told(values: list[float]) -> str:
    """Return the mean over all seeds, with the range if there are several."""
    spread = f" ({min(values):.3f} - {max(values):.3f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def _heads(steps: list[list[list[float]]]) -> torch.Tensor:
    """Return the maxima as float64 [steps, layers * heads]."""
    return torch.tensor(steps, dtype=torch.float64).flatten(1)


def _ratio(border: Found) -> float:
    """Return the growth of the median head's logits: first step after over median before."""
    before = _heads(border["before"]).median(0).values
    return float((_heads(border["after"])[0] / before).median())


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    arms, border, steps = found["extension"], found["border"], found["settings"]["steps"]
    bins = list(arms["YaRN, untrained"])
    rows = [[name, *(_told(losses[place]) for place in bins)] for name, losses in arms.items()]
    maxima = [f"{float(_heads(border[key]).max()):.2f}" for key in ("before", "after")]
    lines = [
        *where.heading("A longer context in toy form", found),
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"{steps[0]} steps of 8 rows of {SHORT} tokens, then {steps[1]} of 2 rows of {LONG:,}; "
        "Python sources of the standard library, every eighth file held out. Held-out loss, nats "
        "a token, by the number of tokens of the document before it; mean, least and most of "
        f"{len(found['ratios'])} seeds:",
        "",
        *table(["", *bins], rows),
        "",
        "![loss by position](../../docs/pictures/yarn_extension.png)",
        "",
        f"Border: factor {border['factor']:g}, rows of {SHORT} as before, threshold "
        f"{border['threshold']:.2f}. Largest logit {maxima[0]} in the last {steps[2]} steps before "
        f"it, {maxima[1]} in the first {steps[2]} after; heads clipped in these: "
        f"{', '.join(map(str, border['clipped_heads']))}.",
        "",
        "![largest logits](../../docs/pictures/yarn_border.png)",
        "",
        f"{found['processor_seconds']:,} s of one core.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def draw_border(border: Found, path: Path) -> None:
    """Write a PNG of the largest logit of each head, step by step, across the border."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=140, layout="constrained")
    axes = figure.subplots()
    before, after = _heads(border["before"]), _heads(border["after"])
    steps = list(range(-len(before) + 1, len(after) + 1))
    axes.plot(steps, torch.cat([before, after]).numpy(), color="#1f4e9c", linewidth=1, alpha=0.7)
    axes.axvline(0.5, color="#6b7280", linewidth=1)
    label = f"threshold of QK-Clip, {border['threshold']:.3g}"
    axes.axhline(border["threshold"], color="#b8562f", linestyle="--", linewidth=1, label=label)
    axes.set_title(
        f"largest logit of each head; YaRN's factor {border['factor']:g} from step 1 on, "
        f"x {border['squared']:.4f}",
        fontsize=10,
    )
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, axes, path)


def draw_extension(arms: Found, path: Path) -> None:
    """Write a PNG of the held-out loss by position of the four arms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=140, layout="constrained")
    axes = figure.subplots()
    for name, losses in arms.items():
        color = "#1f4e9c" if name.startswith("YaRN") else "#b8562f"
        style = "--" if name.endswith("untrained") else "-"
        means = [mean(of) for of in losses.values()]
        axes.plot(list(losses), means, style, color=color, marker="o", label=name)
        lows, highs = ([f(of) for of in losses.values()] for f in (min, max))
        axes.fill_between(list(losses), lows, highs, color=color, alpha=0.15, linewidth=0)
    axes.set_title(f"held-out loss by position; trained on {SHORT} tokens before", fontsize=10)
    axes.set_xlabel("tokens of the document before")
    axes.set_ylabel("nats a token")
    axes.legend(frameon=False, fontsize=9)
    _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
