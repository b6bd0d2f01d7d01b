"""Prints a demo's results: the figures, the files and further commands."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def measured(summary: dict[str, Any]) -> dict[str, str]:
    """Return {name: value} of load, time, memory and speed; omit figures not measured."""
    lines: dict[str, str] = {}
    balance, times = summary["balance_max_over_mean"], summary["step_seconds_median"]
    encoder, memory, speed = (summary[name] for name in ("encoder", "peak_gib", "speed"))
    if balance:
        lines["vision patches, max / mean"] = (
            f"{balance['naive']:.2f} on the rows' owners, {balance['dep']:.2f} balanced"
        )
    if seconds := summary["predicted_seconds_max_over_mean"]:
        lines["their seconds, predicted"] = (
            f"{seconds['naive']:.2f} on the rows' owners, {seconds['dep']:.2f} balanced"
        )
    if encoder:
        took = {name: encoder["imbalance"][name] for name in ("predicted", "measured")}
        lines["encoder seconds, max / mean"] = ", ".join(
            f"{value:.2f} {name}" for name, value in took.items() if value is not None
        )
        if encoder["exposed_encoder_seconds"] is not None:
            lines["exposed encoder time"] = (
                f"{1e3 * encoder['exposed_encoder_seconds']:.0f} ms, "
                f"{encoder['exposed_encoder_share']:.1%} of a step"
            )
        if inside := encoder["bubble_seconds"]:
            lines["in the pipeline's bubbles"] = ", ".join(
                f"{seconds:.2f} s {kind}" for kind, seconds in inside.items()
            )
        over, back = (encoder["exchange_bytes"][way]["sum"] / 1e6 for way in ("over", "back"))
        lines["exchanged a step"] = f"{over:.3g} MB of embeddings, {back:.3g} MB of their gradients"
    if times:
        lines["step with media / as text"] = (
            f"{times['multimodal']:.2f} s / {times['text_only']:.2f} s"
        )
    if memory:
        lines["peak memory"] = (
            f"{memory['worst_rank']:.2f} GiB on rank {memory['rank']}, "
            f"{memory['first_stage']:.2f} GiB on the first stage"
        )
    lines["model FLOPs utilisation"] = (
        f"{speed['mfu']:.1%} of {speed['peak_tflops_per_gpu']:.3g} TFLOP/s a process "
        f"({speed['peak_source']})"
    )
    return lines


def show(console: Console, run_dir: Path, summary: dict[str, Any], look: str) -> None:
    """Print the figures, the files and further commands.

    Args:
        console: output console.
        run_dir: run folder of the demo.
        summary: content of summary.json.
        look: command that shows corpus and run in a browser.
    """
    lines = {
        "loss": f"{summary['loss_first']:.2f} -> {summary['loss_last']:.2f} "
        f"in {summary['steps']} steps",
        "held-out digits read": f"{summary['heldout_digit_accuracy']:.1%} "
        f"(with swapped images {summary['heldout_digit_accuracy_swapped']:.1%})",
        "resumed run is the same": f"{'yes, bit for bit' if summary['resumed_bitwise'] else 'NO'} "
        f"({summary['resumed_steps']} steps, all parameters and states)",
        "DEP's gradients": "those of one process to {error:.0e}".format(**summary["verify_dep"])
        if summary["verify_dep"]["passed"]
        else "NOT those of one process (verify_dep.json)",
        "planted faults found": "{found} of {planted}".format(**summary["verify_dep"]),
        **measured(summary),
    }
    table = Table(show_header=False, box=None, title="result", title_justify="left")
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table)
    for line in summary["resumed_differences"]:
        console.print(f"  {line}", style="red", highlight=False)
    pictures = [f"{name}.png" for name in ("loss", "losses", "muonclip", "dep_balance", "timeline")]
    pages = ["stats.html", "rows.html"]
    files = [
        "summary.json",
        "verify_dep.json",
        "metrics.jsonl",
        *pages,
        *(p for p in pictures if (run_dir / p).is_file()),
    ]
    console.print(f"in {run_dir}: {', '.join(files)}", highlight=False)
    console.print(
        f"look at corpus and run in a browser:\n  {look}\n"
        f"try next:\n"
        f"  kimi-pretrain demo --run-dir runs/other optim.lr=1e-3\n"
        f"  tensorboard --logdir {run_dir}\n"
        f"  kimi-pretrain train --config configs/kimi_k25_1t.yaml --dry-run",
        highlight=False,
        soft_wrap=True,  # keep commands on one line, so that they can be copied
    )
