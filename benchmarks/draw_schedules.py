"""Draws the published learning-rate recipes as the trainer computes them, step by step.

Every rate comes from `learning_rate` at the batch size of the shipped configuration, so an error in
a recipe is visible. Also draws the schedule of any configuration:

    python benchmarks/draw_schedules.py                              # docs/pictures/schedules.png
    python benchmarks/draw_schedules.py --config my.yaml --out my.png
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kimi_pretrain.config import load_config  # noqa: E402
from kimi_pretrain.optim.config import OptimConfig  # noqa: E402
from kimi_pretrain.optim.schedule import learning_rate, stretches, total_steps  # noqa: E402
from kimi_pretrain.tools.figures import new_figure, save_figure  # noqa: E402

SHIPPED = {"Kimi K2": "kimi_k25_1t", "Moonlight": "moonlight_16b_a3b"}
RATE, BORDER, TEXT = "#1f4e9c", "#9aa5b1", "#4b5563"
POINTS = 4000
# Steps drawn past the end, as a fraction of the schedule; the rate is constant there.
AFTER = 0.03


def sampled(config: OptimConfig, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and rates, with extra points around every border."""
    borders = [stretch.end // batch for stretch in stretches(config, batch)]
    last = int(total_steps(config, batch) * (1 + AFTER)) + 1
    chosen = set(np.linspace(0, last, POINTS, dtype=int).tolist())
    chosen |= {step for border in borders for step in range(max(0, border - 2), border + 150)}
    steps = np.array(sorted(chosen))
    rates = [learning_rate(step, config, batch) for step in steps.tolist()]
    return (steps + 1) * float(batch), np.array(rates)


def draw(axes: Axes, title: str, config: OptimConfig, batch: int) -> None:
    tokens, rates = sampled(config, batch)
    placed = stretches(config, batch)
    for stretch, after in zip(placed, [*placed[1:], None]):
        end, rate = stretch.end / 1e12, stretch.segment.lr
        axes.axvline(end, color=BORDER, linewidth=0.8, linestyle=":")
        if stretch.segment.shape == "constant":
            continue
        # Place labels away from the curve: below a valley, otherwise above the point.
        valley = after is not None and after.segment.lr > rate
        offset, side = ((-4, -11), "right") if valley else ((4, 5), "left")
        how = {"textcoords": "offset points", "fontsize": 8, "color": TEXT, "ha": side}
        axes.annotate(f"{rate:g}", (end, rate), offset, **how)
    axes.plot(tokens / 1e12, rates, color=RATE, linewidth=1.8)
    axes.set_title(f"{title}: {batch:,} tokens a step, {total_steps(config, batch):,} steps")
    axes.set_xlabel("tokens (10¹²)")
    axes.set_ylabel("learning rate")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylim(0, rates.max() * 1.12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="*", help="configurations; default: the shipped recipes")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "schedules.png")
    arguments = parser.parse_args()
    wanted = {Path(name).stem: name for name in arguments.config or ()} or SHIPPED
    figure, every = new_figure((5.5 * len(wanted), 3.6), 1, len(wanted), grid=False)
    for axes, (title, name) in zip(every, wanted.items()):
        config = load_config(name)
        draw(axes, title, config.optim, config.tokens_per_step())
    save_figure(figure, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
