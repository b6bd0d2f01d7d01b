"""Tests that plots are written, have a sensible size, and show the numbers they are given."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from kimi_pretrain.tools.plots import (
    EXPOSED,
    PHASES,
    dep_balance_plot,
    loss_plot,
    losses_plot,
    muonclip_plot,
    running_mean,
    timeline_plot,
)


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
            | {"predicted_seconds_per_rank": {k: [1e-4 * n for n in v] for k, v in loads.items()}}
        )
    return made


def by_source(steps: int, first: int = 1, **extra) -> list[dict]:
    """Return steps with two sources, the second from step 3 on; losses are `step + number`."""
    return [
        {
            "step": step,
            "loss_by_source": {"a": 1.0 + step, "b": 2.0 + step if step > 2 else None},
            "loss_tokens_by_source": {"a": 10 * step, "b": 5 if step > 2 else 0},
            "loss_by_position": {"0-255": 1.5 + step},
            "loss_tokens_by_position": {"0-255": 15 * step},
        }
        | extra
        for step in range(first, steps + 1)
    ]


def trace(ranks: int) -> dict:
    events = [
        {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": 1e6 * start, "dur": 9e5}
        for rank in range(ranks)
        for start, name in enumerate(("1 wait", "2 vision", "4 backbone"))
    ]
    return {"traceEvents": [*events, {"name": "note", "ph": "M", "pid": 0}]}


def whole_step(
    ranks: int = 4, *, memory: bool = True, exposed: bool = True, backbone: float = 4e6
) -> dict:
    """Return a step as `write_trace` writes it; the backbone of rank 0 is interrupted once."""
    lengths = {
        "1 wait for data": 1e4, "prepare": 2e5, "2 vision forward": 9e5, "3 hand-over": 2e5,
        "4 backbone": backbone, "5 hand-back": 2e5, "6 vision backward": 1.8e6,
        "6 gradient sum": 3e5, "7 update": 5e5,
    }  # fmt: skip
    events = []
    for rank in range(ranks):
        ts = 0.0
        for number, (name, dur) in enumerate(lengths.items()):
            event = {"name": name, "cat": "phase", "ph": "X", "pid": rank, "tid": 0}
            if memory and number:
                event["args"] = {"peak GiB": 10.0 + number + rank, "first stage": rank < 2}
            events.append(event | {"ts": ts, "dur": dur})
            ts += dur
    if exposed:
        start = sum(list(lengths.values())[:2])
        over = {"name": "exposed encoder, forward", "ts": start, "dur": 1.1e6}
        back = {"name": "exposed encoder, backward", "ts": start + 1.1e6 + backbone, "dur": 2.3e6}
        events += [e | {"cat": "exposed", "ph": "X", "pid": ranks, "tid": 0} for e in (over, back)]
    return {"traceEvents": events}


def picture(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("steps", [1, 60])
def test_pictures_are_written(tmp_path, steps):
    loss_plot(lines(steps), tmp_path / "new" / "loss.png")
    dep_balance_plot(lines(steps), tmp_path / "dep.png")
    timeline_plot(trace(4), tmp_path / "time.png")
    muonclip_plot(optimizer_lines(steps), tmp_path / "optimizer.png", threshold=100.0)
    for name in ("new/loss.png", "dep.png", "time.png", "optimizer.png"):
        pixels = picture(tmp_path / name)
        assert min(pixels.shape[:2]) > 300
        # Blank paper and axes alone have only a few greys.
        assert len(np.unique(pixels[::5, ::5].reshape(-1, 3), axis=0)) > 20


def test_the_same_numbers_give_the_same_picture_and_others_another(tmp_path):
    loss_plot(lines(30), tmp_path / "a.png")
    loss_plot(lines(30), tmp_path / "b.png")
    loss_plot(lines(31), tmp_path / "c.png")
    assert np.array_equal(picture(tmp_path / "a.png"), picture(tmp_path / "b.png"))
    assert not np.array_equal(picture(tmp_path / "a.png"), picture(tmp_path / "c.png"))


def near(pixels: np.ndarray, colour: str) -> int:
    """Count the pixels close to a colour, "#rrggbb", within 6 per channel."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((np.abs(pixels.astype(int) - wanted).max(axis=2) <= 6).sum())


def test_the_timeline_marks_what_is_exposed_and_the_memory(tmp_path):
    def drawn(name: str, trace: dict) -> np.ndarray:
        timeline_plot(trace, tmp_path / f"{name}.png")
        return picture(tmp_path / f"{name}.png")

    whole = drawn("whole", whole_step())
    assert near(whole, EXPOSED) > 200
    drawn_there = [colour for name, colour in PHASES.items() if name != "4 wait"]
    assert all(near(whole, colour) > 200 for colour in drawn_there)
    assert not near(drawn("hidden", whole_step(exposed=False)), EXPOSED)
    plain = drawn("plain", whole_step(memory=False))
    assert plain.shape[1] < whole.shape[1]  # no second panel
    # Twice the memory of the first stage gives another picture.
    more = whole_step()
    for event in more["traceEvents"]:
        if event.get("args", {}).get("first stage"):
            event["args"]["peak GiB"] *= 2
    assert not np.array_equal(drawn("more", more), whole)


def test_work_in_bubbles_is_drawn_inside_the_backbone(tmp_path, monkeypatch):
    plain, bars, labels = whole_step(exposed=False), list[tuple](), list[str]()
    names = ("2 vision forward", "4 wait", "6 vision backward")
    kept = [e for e in plain["traceEvents"] if e["name"] not in names]
    for event in kept:
        if event["name"] == "4 backbone":
            start, rank = event["ts"], event["pid"]
            seconds = {"filled": 1.25, "wasted": 0.5, "overrun": 0.0}
            event["args"] = event.get("args", {}) | (seconds if rank != 1 else {})
            if rank != 1:
                pieces = [(names[0], 0.0), (names[0], 0.1e6), (names[1], 1e6), (names[2], 2e6)]
                kept = kept + [
                    {"name": n, "cat": "bubble", "ph": "X", "pid": rank, "tid": 0}
                    | {"ts": start + at, "dur": 0.1e6}
                    for n, at in pieces
                ]
    barh, ticks = Axes.barh, Axes.set_yticks

    def spy(self, row, length, **style):
        bars.append((row, style.get("height"), length))
        return barh(self, row, length, **style)

    def spy_ticks(self, places, names, **style):
        labels.extend(names)
        return ticks(self, places, names, **style)

    monkeypatch.setattr(Axes, "barh", spy)
    monkeypatch.setattr(Axes, "set_yticks", spy_ticks)
    timeline_plot({"traceEvents": kept}, tmp_path / "time.png")
    inside = [(row, length) for row, height, length in bars if height == 0.42]
    each = [200.0, 100.0, 100.0]  # the two adjacent ones are merged
    assert inside == [(row, pytest.approx(length)) for row in (0, 2, 3) for length in each]
    assert "rank 0\nfilled 1.25 s\nwasted 0.50 s\noverrun 0.00 s" in labels
    assert labels.count("rank 1") == 2  # its labels show no seconds
    pixels = picture(tmp_path / "time.png")
    assert all(near(pixels, PHASES[name]) > 200 for name in ("4 backbone", *names))


def optimizer_lines(steps: int, **changes) -> list[dict]:
    """Return steps of three layers; QK-Clip holds the second one's growing logits at 100."""
    made = []
    for step in range(1, steps + 1):
        grown = min(100.0, 3.0 * step)
        line = {
            "step": step, "max_logits": [5.0, grown, None if step == 3 else 8.0],
            "clipped_heads": int(grown == 100.0), "skipped_steps": int(step > 2),
            "update_rms": {} if step == 3 else {"attention": 0.17, "embedding": 0.3},
        }  # fmt: skip
        made.append(line | changes)
    return made


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="no step"):
        loss_plot([], tmp_path / "x.png")
    with pytest.raises(ValueError, match="no step"):
        muonclip_plot([], tmp_path / "x.png")
    with pytest.raises(ValueError, match="no step of this run has vision patches"):
        dep_balance_plot(lines(3, media=False), tmp_path / "x.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline_plot({"traceEvents": []}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_running_mean_against_the_definition():
    values = np.random.default_rng(1).random(50)
    wanted = [values[max(0, i - 6) : i + 1].mean() for i in range(50)]
    assert np.allclose(running_mean(values, 7), wanted)


def test_curves_of_sources_are_means_weighed_by_tokens(tmp_path, monkeypatch):
    drawn = {}
    plot = Axes.plot

    def spy(self, steps, values, **style):
        drawn[style["label"]] = (list(steps), list(values))
        return plot(self, steps, values, **style)

    monkeypatch.setattr(Axes, "plot", spy)
    heldout = by_source(4, first=4)
    losses_plot([{"step": 0}, *by_source(4)], tmp_path / "losses.png", heldout)
    assert picture(tmp_path / "losses.png").std() > 5
    steps, values = drawn["a"]
    weighed = [sum(n * (1 + n) for n in range(1, k + 1)) / sum(range(1, k + 1)) for k in steps]
    assert steps == [1, 2, 3, 4]
    assert values == pytest.approx(weighed)
    assert drawn["b"] == ([3, 4], [5.0, 5.5])
    assert drawn["held out: a"] == ([4], [5.0])
    assert "0-255" in drawn


def test_a_run_without_losses_by_source_has_no_such_picture(tmp_path):
    with pytest.raises(KeyError, match="loss_by_source"):
        losses_plot(lines(3), tmp_path / "losses.png")
    nothing = {"loss_by_source": {"a": None}, "loss_tokens_by_source": {"a": 0}}
    with pytest.raises(ValueError, match="no token"):
        losses_plot([by_source(1)[0] | nothing], tmp_path / "losses.png")
