"""The pictures: written, of a sensible size, and drawn from the numbers they are given."""

import numpy as np
import pytest
from PIL import Image

from kimi_pretrain.plots import dep_balance_plot, loss_plot, running_mean, timeline_plot


def lines(steps: int, media: bool = True) -> list[dict]:
    rng = np.random.default_rng(0)
    made = []
    for step in range(1, steps + 1):
        naive = [3000.0 * rng.random(), 0.0, 2000.0, 0.0]
        loads = {"naive": naive, "dep": [sum(naive) / 4] * 4, "round_robin": naive[::-1]}
        if not media:
            loads = {name: [0.0] * 4 for name in loads}
        balance = {k: max(v) / np.mean(v) if sum(v) else 1.0 for k, v in loads.items()}
        loss = 7 / step**0.5
        made.append(
            {"step": step, "loss": loss, "lr": 1e-3, "patches_per_rank": loads, "balance": balance}
        )
    return made


def trace(ranks: int) -> dict:
    events = [
        {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": 1e6 * start, "dur": 9e5}
        for rank in range(ranks)
        for start, name in enumerate(("1 wait", "2 vision", "4 backbone"))
    ]
    return {"traceEvents": [*events, {"name": "note", "ph": "M", "pid": 0}]}


def picture(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("steps", [1, 60])
def test_pictures_are_written(tmp_path, steps):
    loss_plot(lines(steps), tmp_path / "new" / "loss.png")
    dep_balance_plot(lines(steps), tmp_path / "dep.png")
    timeline_plot(trace(4), tmp_path / "time.png")
    for name in ("new/loss.png", "dep.png", "time.png"):
        pixels = picture(tmp_path / name)
        assert min(pixels.shape[:2]) > 300
        # Blank paper and axes alone have a handful of greys.
        assert len(np.unique(pixels[::5, ::5].reshape(-1, 3), axis=0)) > 20


def test_the_same_numbers_give_the_same_picture_and_others_another(tmp_path):
    loss_plot(lines(30), tmp_path / "a.png")
    loss_plot(lines(30), tmp_path / "b.png")
    loss_plot(lines(31), tmp_path / "c.png")
    assert np.array_equal(picture(tmp_path / "a.png"), picture(tmp_path / "b.png"))
    assert not np.array_equal(picture(tmp_path / "a.png"), picture(tmp_path / "c.png"))


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="no step"):
        loss_plot([], tmp_path / "x.png")
    with pytest.raises(ValueError, match="no step of this run has vision patches"):
        dep_balance_plot(lines(3, media=False), tmp_path / "x.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline_plot({"traceEvents": []}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_running_mean_against_the_definition():
    values = np.random.default_rng(1).random(50)
    wanted = [values[max(0, i - 6) : i + 1].mean() for i in range(50)]
    assert np.allclose(running_mean(values, 7), wanted)
