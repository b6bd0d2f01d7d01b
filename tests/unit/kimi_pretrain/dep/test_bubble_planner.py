"""Tests the bubbles made from a step's plan: scopes, memory, costs and refusals."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.sim import corpus
from kimi_pretrain.config import GIB, ConfigError, load_config
from kimi_pretrain.dep import bubble_planner
from kimi_pretrain.dep.bubble_check import WaitsInACircle, check
from kimi_pretrain.dep.bubble_plan import assign_units, gaps_of, least_waits
from kimi_pretrain.dep.bubble_times import Learned
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.memory_limit import TooMuchMemory
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.timeline import gathered, timeline
from kimi_pretrain.verify.dep_faults import FAULTS
from moonvit3d.memory import activation_bytes

LAYOUT = (
    "layout.pp=4", "layout.vpp=1", "layout.dp=2", "layout.ep=1", "layout.overlap_experts=false",
    "layout.stages=Et*14|t*16|t*16|t*15L", "data.rows_per_step=64", "data.seed=3",
    "train.rows_per_microbatch=1", "data.vision_token_ratio=0.3", "dep.memory_limit_gib=null",
    "dep.offload_outputs=false", "dep.max_split=1",
)  # fmt: skip


def config_of(*settings):
    return load_config("kimi_k25_1t", [*LAYOUT, "dep.bubbles=all", *settings])


@pytest.fixture(scope="module")
def step():
    """Return the plan of a step; sources and packing are real, but no data is read."""
    return next(corpus.steps(config_of().data, 1, corpus.read_mix()))


def test_every_item_is_encoded_once_where_the_plan_of_bubbles_has_it(step):
    vision = VisionPlanner(config_of()).plan(step)
    bubbles, plan = vision.bubbles, vision.bubbles.plan
    items = [bubbles.items(unit) for unit in range(len(bubbles.units))]
    assert sorted(item for mine in items for item in mine) == list(range(len(step.items)))
    assert max(map(len, items)) > 1
    begins = bubbles.begins(vision.tokens)
    for mine in items:
        assert begins[mine].tolist() == [0, *np.cumsum(vision.tokens[mine])[:-1]]
    assert np.array_equal(vision.rank, plan.rank[bubbles.unit])
    assert np.array_equal(vision.shares.rank, vision.rank)
    sent = {int(i): int(s) for i, s in zip(vision.spans.item, vision.spans.source)}
    assert sent == dict(enumerate(vision.rank.tolist()))
    microbatch = {int(i): int(m) for i, m in zip(vision.spans.item, vision.spans.microbatch)}
    assert microbatch == dict(enumerate(plan.microbatch[bubbles.unit].tolist()))
    home = step.items.row.astype(int) // 32
    assert np.array_equal(bubbles.units.home[bubbles.unit], home)
    patches = step.items.patches.astype(int)
    most = min(4096, patches.sum() // (8 * 8))
    sizes = np.bincount(bubbles.unit, patches)
    assert all(size <= most for size, mine in zip(sizes, items) if len(mine) > 1)
    grids = np.stack([step.items.frames, step.items.grid_h, step.items.grid_w], axis=1)
    blocks = [config_of().model.vision.replace(depth=depth) for depth in (27, 28)]
    less, more = (activation_bytes(grids, vision, 2) for vision in blocks)
    each = 27 * (more - less - 2 * 1152 * patches)  # a block without its input
    assert np.array_equal(bubbles.units.kept_bytes, np.bincount(bubbles.unit, each))
    forward = np.bincount(bubbles.unit, vision.costs) / FORWARDS_PER_STEP
    assert bubbles.units.forward == pytest.approx(forward)
    assert VisionPlanner(config_of()).plan(step).rank.tolist() == vision.rank.tolist()
    inside = [s for mine in plan.forward for s in mine if 0 < s.slot < plan.schedule.num_passes]
    assert inside


def test_short_waits_come_together_unless_work_is_at_the_edges_alone(step, monkeypatch):
    cost = "dep.cost={per_patch: 0, per_patch_squared: 1.0e-8, per_item: 0}"
    interleaved = ("layout.vpp=2", "layout.stages=Et*6|(t*8|)*6t*7L", cost)
    asked = []
    monkeypatch.setattr(
        bubble_planner, "gathered",
        lambda schedule, line, least: asked.append(least) or gathered(schedule, line, least),
    )  # fmt: skip
    planner = VisionPlanner(config_of(*interleaved))
    bubbles = planner.plan(step).bubbles
    (least,) = {*asked}
    assert least > bubbles.units.backward.max() / bubbles.plan.pieces
    schedule, costs = bubbles.plan.schedule, planner.bubbles.configured
    line = timeline(schedule, costs.forward, costs.backward)
    before = [
        gap.end - gap.begin
        for stage in range(4)
        for gap in gaps_of(stage, line, planner.bubbles.filling)[1:-1]
    ]
    after = [seconds for room in bubbles.room for seconds in room.values()]
    assert sum(seconds < 0.9 * least for seconds in after) < sum(s < 0.9 * least for s in before)
    asked.clear()
    VisionPlanner(config_of(*interleaved, "dep.bubbles=edges")).plan(step)
    assert asked == []


@pytest.mark.parametrize(("square", "which"), [("2.0e-8", 0), ("0.9e-8", 1), ("0.8e-8", 2)])
def test_of_several_lengths_of_waits_the_shortest_step_is_taken(step, monkeypatch, square, which):
    """Activations are kept, so pieces have two sizes."""
    cost = f"dep.cost={{per_patch: 0, per_patch_squared: {square}, per_item: 0}}"
    keep = "dep.keep_activations=auto", "dep.memory_limit_gib=400"
    config = config_of("layout.vpp=2", "layout.stages=Et*6|(t*8|)*6t*7L", cost, *keep)
    vision = VisionPlanner(config).plan(step)
    found, planner = vision.bubbles, VisionPlanner(config).bubbles
    waits = least_waits(found.units, planner.filling)
    large = {name: getattr(found.units, name).max() / 27 for name in ("again", "backward")}
    work = np.array([large["again"], 2 * large["backward"], 2 * large["again"]])
    assert waits == pytest.approx(0.001 + work / config.dep.bubble_fill)
    longer, plans, found_first = [], [], []

    def assigned(*given):
        choice = assign_units(*given)
        found_first.append(choice.longer)
        return choice

    monkeypatch.setattr(bubble_planner, "assign_units", assigned)
    for least in waits:
        monkeypatch.setattr(bubble_planner, "least_waits", lambda *_, least=least: [least])
        found_first.clear()
        plans.append(VisionPlanner(config).plan(step).bubbles.plan)
        longer.append(found_first[0])
    assert len({*longer}) == 3
    assert int(np.argmin(longer)) == which
    best = plans[which]
    assert np.array_equal(found.plan.rank, best.rank)
    assert np.array_equal(found.plan.kept, best.kept)
    assert (found.plan.forward, found.plan.backward) == (best.forward, best.backward)


@pytest.mark.parametrize("limit", [6.3585, 6.4085, 6.5])
def test_of_several_lengths_of_waits_one_is_taken_that_fits_the_memory(limit):
    cost = "dep.cost={per_patch: 0, per_patch_squared: 1.0e-8, per_item: 0}"
    keep = "dep.keep_activations=auto", f"dep.memory_limit_gib={limit}", "data.seed=4"
    config = config_of("layout.vpp=2", "layout.stages=Et*6|(t*8|)*6t*7L", cost, *keep)
    step = next(corpus.steps(config.data, 1, corpus.read_mix()))
    vision = VisionPlanner(config).plan(step)  # other gap lengths would need more memory
    assert vision.bubbles.needed.max() <= limit * GIB


def test_a_unit_of_several_items_is_no_larger_than_a_chunk(step):
    found = VisionPlanner(config_of("dep.max_patches_per_chunk=1100")).plan(step).bubbles
    sizes = np.bincount(found.unit, step.items.patches)
    several = np.bincount(found.unit) > 1
    assert several.sum() > 0
    assert sizes[several].max() <= 1100


def test_steps_without_a_backward_pass_have_no_bubbles(step):
    assert VisionPlanner(config_of(), training=False).plan(step).bubbles is None
    assert VisionPlanner(config_of("dep.bubbles=none")).plan(step).bubbles is None


def test_each_scope_encodes_its_own(step):
    planner = VisionPlanner(config_of("dep.scope=replica"))
    vision = planner.plan(step)
    home = step.items.row.astype(int) // 32
    assert np.array_equal(planner.ranks.replica[vision.rank], home)
    check(vision.bubbles.plan)


def test_shared_items_stay_outside(step):
    # With quadratic costs the largest items dominate.
    cost = "dep.cost={per_patch: 0, per_patch_squared: 1.0e-9, per_item: 0}"
    more = "layout.pp=16", "layout.dp=4", "layout.stages=Ettt|(tttt|)*13ttt|tttL"
    config = config_of("dep.max_split=4", "dep.split_efficiency=1.0", cost, *more)
    vision = VisionPlanner(config).plan(step)
    shared = np.flatnonzero(vision.parts > 1)
    assert len(shared)
    assert not set(shared.tolist()) & set(np.flatnonzero(vision.bubbles.unit >= 0).tolist())
    apart = vision.together()
    assert set(apart.spans.item.tolist()) == set(apart.shares.item.tolist()) == set(shared.tolist())


def test_what_is_kept_fits_the_limit_all_at_once(step):
    kept = []
    for limit in (20, 40, 400):
        config = config_of("dep.keep_activations=auto", f"dep.memory_limit_gib={limit}")
        vision = VisionPlanner(config).plan(step)
        plan, sizes = vision.bubbles.plan, vision.bubbles.units.kept_bytes
        patches = step.items.patches.astype(int)
        grids = np.stack([step.items.frames, step.items.grid_h, step.items.grid_w], axis=1)
        of = vision.bubbles.unit
        one = config.model.vision.replace(depth=1)
        work = np.bincount(of, activation_bytes(grids, one, 2))  # of one block
        for rank in range(8):
            mine = plan.rank == rank
            need = (sizes * plan.kept / 27)[mine].sum() + work[mine].max(initial=0)
            need += 27 * 1152 * 2 * patches[plan.rank[of] == rank].sum()  # inputs
            need += int(vision.tokens_held()[rank]) * config.model.vision.out_width * 2
            assert need <= limit * GIB
        kept.append(int(plan.kept.sum()))
    assert 0 < kept[0] < kept[1] < kept[2] == 27 * len(vision.bubbles.units)


def test_media_in_bubbles_take_a_block_at_a_time(step):
    """Compares with a sum by hand and with a limit that whole chunks of the items would exceed."""
    config = config_of()
    vision = VisionPlanner(config).plan(step)
    patches, of, plan = step.items.patches.astype(int), vision.bubbles.unit, vision.bubbles.plan
    grids = np.stack([step.items.frames, step.items.grid_h, step.items.grid_w], axis=1)
    block = activation_bytes(grids, config.model.vision.replace(depth=1), 2)
    work = np.bincount(of, block)
    need = np.bincount(vision.rank, 27 * 1152 * 2 * patches, 8) + [
        work[plan.rank == rank].max(initial=0) for rank in range(8)
    ]
    tokens = np.bincount(vision.rank, vision.tokens, 8)
    tokens[:2] += np.bincount(step.items.row.astype(int) // 32, vision.tokens, 2).astype(int)
    found = VisionPlanner(config).memory(step, vision)
    assert found.tolist() == (need + 2 * 7168 * 2 * tokens).tolist()  # twice during the exchange
    limit = float(found.max()) / GIB
    VisionPlanner(config_of(f"dep.memory_limit_gib={limit!r}")).plan(step)
    with pytest.raises(TooMuchMemory, match="would take"):
        VisionPlanner(config_of(f"dep.memory_limit_gib={limit - 1e-3!r}")).plan(step)
    with pytest.raises(TooMuchMemory):
        VisionPlanner(config_of("dep.bubbles=none", f"dep.memory_limit_gib={limit!r}")).plan(step)


def test_a_step_whose_plan_would_not_end_uses_first_and_last_slots(step, monkeypatch, caplog):
    checked = []

    def once(plan):
        checked.append(plan)
        if len(checked) == 1:
            raise WaitsInACircle("stage 0 before the end")
        check(plan)

    monkeypatch.setattr(bubble_planner, "check", once)
    plan = VisionPlanner(config_of()).plan(step).bubbles.plan
    last = plan.schedule.num_passes
    assert plan is checked[1]
    assert {s.slot for mine in plan.forward for s in mine} == {0}
    assert {s.slot for mine in plan.backward for s in mine} == {last}
    assert "first and last slots alone: stage 0 before the end" in caplog.text


def test_faults_of_the_media_are_planted_in_bubbles_too(step):
    config = config_of()
    run = SimpleNamespace(config=config, encoder=SimpleNamespace(trainable=True))
    vision = VisionPlanner(config).plan(step)
    assert vision.bubbles is not None
    for name in ("doubled-gradient", "lost-item", "lost-gradient", "swapped-items"):
        assert FAULTS[name].obstacle(run, vision) is None
        assert FAULTS[name].obstacle(run, replace(vision, bubbles=None)) is None


@pytest.mark.parametrize(
    ("frozen", "later"), [([], 3.0), (["vision_tower"], 0.0), (["projector"], 3.0)]
)
def test_what_is_frozen_costs_nothing_later(step, frozen, later):
    vision = VisionPlanner(config_of(f"train.frozen={frozen}")).plan(step)
    units = vision.bubbles.units
    ratio = units.again / units.forward
    assert ratio == pytest.approx(np.full(len(units), later), abs=1e-3)


REFUSED = {
    "fill of nothing": (["dep.bubble_fill=0"], "dep.bubble_fill"),
    "fill beyond all": (["dep.bubble_fill=1.2"], "dep.bubble_fill"),
    "a word": (["dep.bubbles=some"], "dep.bubbles"),
    "colocated": (["dep.placement=colocated"], "dep.bubbles=all with dep.placement=colocated"),
    "another assignment": (["dep.assign=owner"], "dep.bubbles=all with dep.assign=owner"),
    "overlapped experts": (
        ["layout.overlap_experts=true", "layout.vpp=2", "layout.ep=2",
         "layout.stages=Et*6|(t*8|)*6t*7L"],
        "dep.bubbles=all with layout.overlap_experts=true",
    ),
    "offloaded outputs": (["dep.offload_outputs=true"], "dep.bubbles=all with dep.offload_outputs"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_with_bubbles_is_refused(settings, named):
    with pytest.raises(ConfigError, match=named) as error:
        config_of(*settings)
    assert len(str(error.value).splitlines()) == 1


def test_slots_follow_learned_costs_and_who_encodes_what_does_not(step):
    """Passes three times as fast have bubbles a third as long, and pieces cost twice as much."""
    planner = VisionPlanner(config_of())
    before = planner.plan(step).bubbles
    costs = planner.bubbles.configured
    learned = Learned(costs.forward / 3, costs.backward / 3, (2.0, 2.0, 2.0))
    planner = VisionPlanner(config_of())
    planner.learning.of = lambda number: learned
    vision = planner.plan(step)
    after = vision.bubbles
    assert np.array_equal(after.plan.rank, before.plan.rank)
    assert np.array_equal(after.plan.kept, before.plan.kept)
    for name, column in vars(before.units).items():
        assert np.array_equal(getattr(after.units, name), column)
    assert after.factors == (2.0, 2.0, 2.0)
    assert after.seconds(0, 0) == 2 * before.seconds(0, 0)
    check(after.plan)
    between = [
        sum(s.end - s.begin for mine in one.plan.backward for s in mine if 0 < s.slot < 64)
        for one in (before, after)
    ]
    assert 0 < between[1] < between[0] / 3
    shorter = [sum(room.values()) for room in after.room]
    for short, room in zip(shorter, before.room, strict=True):
        assert short == pytest.approx(sum(room.values()) / 3, rel=0.1) or not room


def test_pieces_that_take_longer_fill_fewer_slots(step):
    """Passes are as configured; only the cost of pieces differs."""
    inside = []
    for factor in (1.0, 4.0):
        planner = VisionPlanner(config_of())
        costs = planner.bubbles.configured
        learned = replace(costs, factors=(factor, factor, factor))
        planner.learning.of = lambda number, learned=learned: learned
        plan = planner.plan(step).bubbles.plan
        inside.append(sum(s.end - s.begin for mine in plan.backward for s in mine if s.slot < 64))
    assert 0 < inside[1] < inside[0] / 2
