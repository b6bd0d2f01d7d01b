"""Draws the plots of a run folder, for `kimi-pretrain plot` and at the end of a run."""

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

# Steps in a plot: more than its pixels can show, but few enough to load within a second.
MOST_STEPS = 4000


def draw(run: Path, out: Path) -> dict[str, Any]:
    """Draw every plot for which the run folder has the numbers.

    Args:
        run: folder of the run.
        out: folder to write into; created if missing.

    Returns:
        "steps": first and last step; "drawn": files; "left_out": name -> reason.

    Raises:
        ValueError: there is no metrics.jsonl, or it has no step.
    """
    # Imported late, because matplotlib would slow down the help of every command.
    from kimi_pretrain.tools import plots

    metrics = read_steps(run / "metrics.jsonl")
    validations = run / "heldout.jsonl"
    try:
        heldout = read_steps(validations)
    except ValueError:  # there was no validation
        heldout = []
    threshold = _threshold(run / "config.yaml")
    losses = [m for m in metrics if m["loss"] is not None]
    pictures: dict[str, Callable[[Path], None]] = {
        "loss.png": lambda file: plots.loss_plot(losses, file),
        "losses.png": lambda file: plots.losses_plot(metrics, file, heldout),
        "dep_balance.png": lambda file: plots.dep_balance_plot(metrics, file),
        "muonclip.png": lambda file: plots.muonclip_plot(metrics, file, threshold),
    }
    drawn, left_out = list[str](), dict[str, str]()
    if (trace := run / "trace.json").is_file():
        step = json.loads(trace.read_text())
        pictures["timeline.png"] = lambda file: plots.timeline_plot(step, file)
    else:
        left_out["timeline.png"] = f"no {trace} (train.trace_step says which step is traced)"
    for name, picture in pictures.items():
        try:
            picture(out / name)
            drawn.append(str(out / name))
        except KeyError as error:
            left_out[name] = f"the run did not write {error}"
        except ValueError as error:
            left_out[name] = str(error)
    steps = (metrics[0]["step"], metrics[-1]["step"])
    return {"steps": steps, "drawn": drawn, "left_out": left_out}


def read_steps(file: Path, most: int = MOST_STEPS) -> list[dict[str, Any]]:
    """Read at most `most` lines, evenly spaced, of a metrics.jsonl that may still be growing.

    Raises:
        ValueError: the file does not exist or has no complete line.
    """
    try:
        with file.open("rb") as lines:
            number = sum(line.endswith(b"\n") for line in lines)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file}: no such file; give the folder of a run") from None
    if not number:
        raise ValueError(f"{file}: the run has not finished a step yet")
    # Lines are counted from the last, so that the last step is always drawn.
    every = -(-number // most)
    with file.open("rb") as lines:
        whole = enumerate(islice(lines, number))
        return [json.loads(line) for at, line in whole if not (number - 1 - at) % every]


def _threshold(file: Path) -> float | None:
    from kimi_pretrain.config import load_config

    # The config of an older run may have unknown keys; the threshold line is not worth an error.
    try:
        return load_config(str(file)).optim.qk_clip_threshold
    except (ValueError, OSError):
        return None


def draw_at_the_end(run: Path) -> None:
    """Draw the plots of a finished run; print an error instead of raising it."""
    try:
        names = [Path(file).name for file in draw(run, run)["drawn"]]
        print(f"drew {', '.join(names)} in {run}", flush=True)
    except Exception as error:
        print(f"no pictures ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
