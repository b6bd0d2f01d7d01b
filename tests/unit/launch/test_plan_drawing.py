"""Tests of `plan --step --draw`: a step's intervals against the same step written by hand."""

from collections import defaultdict

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.pass_costs import chunk_flops
from tests.unit.launch.plan_command import (
    NO_MEDIA,
    RANKS,
    SMALL,
    STAGES_OF_TWO,
    found_by,
    one_line_error,
    plans_of,
    run,
    seconds_of,
)

SLOW = (*STAGES_OF_TWO, "dep.flops_per_second=1e9")
UPDATE = (
    "dep.update_cost={vocabulary: 0.3, dense_layer: 0.5, expert_layer: 0.7, expert: 0.11, "
    "encoder: 2.9}"
)


def passes_of_two(forward, backward, count: int, send: float):
    """Return (stage, kind, microbatch, begin, end) of each 1F1B pass on two stages."""
    found, free = [], [0.0, 0.0]
    ended: dict[tuple[int, str, int], float] = {}

    def go(stage: int, kind: str, number: int, ready: float) -> None:
        seconds = (forward if kind == "forward" else backward)[stage]
        begin = max(free[stage], ready)
        free[stage] = ended[stage, kind, number] = begin + seconds
        found.append((stage, kind, number, begin, begin + seconds))

    go(0, "forward", 0, 0.0)
    for n in range(count):
        if n + 1 < count:
            go(0, "forward", n + 1, 0.0)
        go(1, "forward", n, ended[0, "forward", n] + send)
        go(1, "backward", n, 0.0)
        go(0, "backward", n, ended[1, "backward", n] + send)
    return found


def of_kind(lane: dict, *kinds: str) -> list[tuple[float, float]]:
    return [(i["begin"], i["end"]) for i in lane["intervals"] if i["kind"] in kinds]


def check_whole(lane: dict, first: float, last: float) -> None:
    """Check that a lane has no gap between first and last, and no overlap anywhere."""
    spans = sorted(of_kind(lane, *{one["kind"] for one in lane["intervals"]}))
    for (_, end), (begin, _) in zip(spans, spans[1:]):
        assert begin >= end - 1e-7
        if end > first and begin < last - 1e-6:
            assert begin == pytest.approx(end, abs=1e-6)


@pytest.mark.parametrize("frozen", ["[]", "[vision_tower]", "[vision_tower, projector]"])
def test_intervals_are_those_of_a_step_written_out(root, frozen):
    network = 1e6
    given = (*SLOW, f"train.frozen={frozen}", UPDATE)
    found = found_by(root, "--step", "--steps", "3", f"--network={network}", *given)
    config = load_config("tiny_cpu", [*SMALL, *given])
    forward = chunk_flops(config) / 1e9
    send = 128 * config.model.language.hidden_size * 4 / network
    passes = passes_of_two(forward, 2 * forward, 8, send)
    slowest = max(found["steps"], key=lambda step: step["total"])
    drawn = found["drawn"]
    assert found["steps"][drawn["step"] - 1] == slowest
    vision = [vision for _, vision in plans_of(root, 3, *given)][drawn["step"] - 1]
    seconds = seconds_of(vision.patches, vision.rank)
    ways = 1 if "projector" in frozen else 2
    over = slowest["exchange"] / ways
    first = max(seconds) / 4 + over
    last = first + max(end for *_, end in passes)
    behind = last + over * (ways - 1)
    later = 0.0 if "tower" in frozen else 3 / 4
    sums = behind + later * max(seconds)
    update = sums + slowest["gradient_sum"]
    busiest = max(range(RANKS), key=lambda rank: seconds[rank])
    assert drawn["replica"] == busiest % 2  # rank 2 * stage + replica
    assert [lane["stage"] for lane in drawn["lanes"]] == [0, 1]
    # The stage with the most weights reduces longest; the encoder's ring includes all ranks.
    for lane in drawn["lanes"]:
        rank, stage = lane["rank"], lane["stage"]
        assert rank == 2 * stage + drawn["replica"]
        assert of_kind(lane, "vision before") == [pytest.approx((0.0, seconds[rank] / 4))]
        assert of_kind(lane, "hand-over") == [pytest.approx((first - over, first))]
        wanted = [one[1:] for one in passes if one[0] == stage]
        mine = [one for one in lane["intervals"] if "microbatch" in one]
        assert [(one["kind"], one["microbatch"]) for one in mine] == [one[:2] for one in wanted]
        assert {one["chunk"] for one in mine} == {0}
        for one, (*_, begin, end) in zip(mine, wanted, strict=True):
            assert (one["begin"], one["end"]) == pytest.approx((first + begin, first + end))
        assert of_kind(lane, "vision in bubbles") == []
        back = [] if ways == 1 else [pytest.approx((last, behind))]
        assert of_kind(lane, "hand-back") == back
        late = [pytest.approx((behind, behind + later * seconds[rank]))] if later else []
        assert of_kind(lane, "vision behind") == late
        assert of_kind(lane, "update") == [
            pytest.approx((update, update + slowest["update"]), rel=1e-9)
        ]
        check_whole(lane, first, last)
        bubbles = sum(end - begin for begin, end in of_kind(lane, "bubble"))
        busy = sum(end - begin for *_, begin, end in wanted)
        assert bubbles == pytest.approx(last - first - busy)
    sums_of = [of_kind(lane, "gradient sum")[0] for lane in drawn["lanes"]]
    assert [begin for begin, _ in sums_of] == pytest.approx([sums, sums])
    assert max(end for _, end in sums_of) == pytest.approx(update)
    assert min(end for _, end in sums_of) < update - 1e-6
    assert update + slowest["update"] == pytest.approx(slowest["total"])


PP4 = ("layout.pp=4", "layout.dp=1", "layout.ep=1", "layout.vpp=1", "layout.stages=null")


@pytest.mark.parametrize("rate", ["4e9", "2e10"])  # at 2e10, passes wait for work
def test_vision_in_bubbles_is_where_the_plan_has_it(root, rate):
    """Passes wait for the work of their slots, and each unit of a rank is drawn exactly once."""
    given = (*PP4, "data.rows_per_step=16", f"dep.flops_per_second={rate}", "dep.bubbles=all")
    found = found_by(root, "--step", "--steps", "2", *given)
    drawn = found["drawn"]
    plans = list(plans_of(root, 2, *given))
    bubbles = plans[drawn["step"] - 1][1].bubbles
    plan, units = bubbles.plan, bubbles.units
    work = [defaultdict(float) for _ in range(RANKS)]  # rank -> slot -> seconds
    for rank in range(RANKS):
        for unit, slot, begin, end in plan.forward[rank]:
            work[rank][slot] += (end - begin) * units.forward[unit] / plan.pieces
        for unit, slot, begin, end in plan.backward[rank]:
            for piece in range(begin, end):
                kept = piece < plan.kept[unit]
                seconds = units.backward[unit] if kept else units.again[unit]
                work[rank][slot] += seconds / plan.pieces
    whole = [
        sum(units.forward[u] + units.again[u]
            for u in range(len(units)) if plan.rank[u] == rank)
        for rank in range(RANKS)
    ]  # fmt: skip
    ends: dict[tuple[int, str, int], float] = {}
    passes = {lane["stage"]: [i for i in lane["intervals"] if "chunk" in i]
              for lane in drawn["lanes"]}  # fmt: skip
    for stage, mine in passes.items():
        for one in mine:
            ends[stage, one["kind"], one["microbatch"]] = one["end"]
    first = plan.upfront
    last = max(one["end"] for mine in passes.values() for one in mine)
    for lane in drawn["lanes"]:
        rank = stage = lane["rank"]
        lies = of_kind(lane, "vision before", "vision in bubbles", "vision behind")
        assert sum(end - begin for begin, end in lies) == pytest.approx(whole[rank], abs=1e-6)
        free = 0.0
        for number, one in enumerate(passes[stage]):
            ready, back = free + work[rank][number], one["kind"] == "backward"
            other = stage + (1 if back else -1)
            if 0 <= other < 4:
                ready = max(ready, ends[other, one["kind"], one["microbatch"]])
            assert one["begin"] == pytest.approx(max(ready, first), abs=1e-5), (stage, number)
            free = one["end"]
        check_whole(lane, first, last)
        inside = of_kind(lane, "vision in bubbles")
        assert all(first - 1e-9 <= begin < end <= last + 1e-9 for begin, end in inside)
        assert all(begin >= last - 1e-9 for begin, _ in of_kind(lane, "vision behind"))
    assert sum(len(of_kind(lane, "vision in bubbles")) for lane in drawn["lanes"]) > 4
    # Bubbles in the middle of the pipeline are filled, not only those at its ends.
    middle = [
        begin
        for lane in drawn["lanes"]
        for begin, _ in of_kind(lane, "vision in bubbles")
        if passes[lane["stage"]][0]["begin"] < begin < passes[lane["stage"]][-1]["begin"]
    ]
    assert middle


def test_a_step_without_media_has_passes_and_bubbles_alone(root):
    drawn = found_by(root, "--step", "--steps", "1", *SLOW, *NO_MEDIA)["drawn"]
    kinds = {one["kind"] for lane in drawn["lanes"] for one in lane["intervals"]}
    assert kinds == {"forward", "backward", "bubble", "gradient sum"}


def test_the_picture_has_the_intervals_and_what_binds(root, tmp_path, monkeypatch):
    bars, titles, draw, title = [], [], Axes.broken_barh, Axes.set_title

    def spy(axes, spans, at, **how):
        bars.extend((round(at[0] + 0.35), begin, begin + length) for begin, length in spans)
        return draw(axes, spans, at, **how)

    monkeypatch.setattr(Axes, "broken_barh", spy)
    monkeypatch.setattr(
        Axes, "set_title", lambda axes, text, **how: titles.append(text) or title(axes, text, **how)
    )
    file = tmp_path / "step.png"
    given = ("--step", "--steps", "2", "--draw", str(file), *SLOW, UPDATE)
    found = found_by(root, *given)
    lanes = found["drawn"]["lanes"]
    wanted = [
        (row, one["begin"], one["end"]) for row, lane in enumerate(lanes)
        for one in lane["intervals"]
    ]  # fmt: skip
    assert np.array(sorted(bars)) == pytest.approx(np.array(sorted(wanted)))
    (text,) = titles
    step = found["steps"][found["drawn"]["step"] - 1]
    assert text.startswith(f"Step {found['drawn']['step']}, predicted: {step['total']:.4g} s; ")
    assert f"update {step['update'] / step['total']:.0%}" in text
    with Image.open(file) as picture:
        assert picture.width > 1500
        assert picture.height > 400
    vector = tmp_path / "step.svg"
    assert f"wrote {vector}" in run(root, "--step", "--steps", "1", "--draw", str(vector)).output
    assert "<svg" in vector.read_text()[:1000]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draw", "step.png"), "--draw step.png without --step"),
        (("--step", "--search", "--draw", "step.png"), "--draw step.png with --search"),
        (("--step", "--draw", "step.gif"), "expected a name that ends in .png or .svg"),
        (("--step", "--draw", "nowhere/step.png"), "there is no folder nowhere"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(root, arguments, words):
    assert words in one_line_error(run(root, *arguments, code=2))
