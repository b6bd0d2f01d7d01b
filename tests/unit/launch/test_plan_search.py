"""Tests of `plan --step --search` against trying every layout and every setting by hand."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from data_pipeline.index.manifest import read_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.memory.plan import plan_memory, stages_of
from kimi_pretrain.memory.search import Layout
from kimi_pretrain.memory.states import Sizes
from kimi_pretrain.tools import search_layouts
from kimi_pretrain.tools.predict_step import PlannedSteps, plan_steps, predict_planned
from kimi_pretrain.tools.text_passes import Traffic
from tests.unit.launch.plan_command import RANKS, SMALL, cost, found_by, run

TRAFFIC = Traffic(1e7, node=2e7, memory=1e9, host=2e7)
TOLD = ("--network=1e7", "--node-network=2e7", "--device-memory=1e9", "--host=2e7")
SEARCH = ("--step", "--search", "--steps", "2", *TOLD)
# Media chunks already have the smallest size, so that there are few settings to try.
SLOW = ("data.rows_per_step=16", "data.seq_len=1024", "dep.flops_per_second=1e9",
        "dep.max_patches_per_chunk=448", "data.requests_per_second=null",
        "train.offload_min_mib=0", "dep.exchange_budget_mib=1")  # fmt: skip
NEUTRAL = {
    "train.recompute": "[norms,swiglu,mla_up]", "train.offload": "true",
    "dep.offload_outputs": "true", "dep.keep_activations": "none",
}  # fmt: skip
FREE = {"train.recompute": "[]", "train.offload": "false", "dep.offload_outputs": "false"}


def every_layout():
    """Yield all layouts of four ranks by loops over powers of two; some of them cannot run."""
    powers = (1, 2, 4)
    for pp, vpp, cp, tp, ep in product(powers, (1, 2, 4, 8), powers, powers, powers):
        if pp * cp * tp <= RANKS and (pp > 1 or vpp == 1) and ep <= RANKS // pp:
            yield {"pp": pp, "vpp": vpp, "dp": RANKS // (pp * cp * tp), "cp": cp, "tp": tp,
                   "ep": ep}  # fmt: skip


def tried_by_hand(root, limit: float, own: tuple[str, ...], switches: tuple[str, ...]) -> dict:
    """Return layout kind -> least seconds over its expert layouts and settings that fit."""
    given = (*SMALL, *own, f"data.root={root}")
    config, store = load_config("tiny_cpu", given), FolderStore(root)
    indices = [read_index(store, name) for name in config.data.source_names]
    planner = Planner(indices, config.data)
    state, plans = planner.state_dict(), []
    for _ in range(2):
        plan, state = planner.plan(state)
        plans.append(plan)
    best: dict[tuple[int, ...], float] = {}

    def tried(layout: dict, settings: dict) -> float | None:
        try:
            one = config.replace(
                layout=config.layout.replace(**layout),
                train=config.train.replace(**settings.get("train", {})),
                dep=config.dep.replace(**settings.get("dep", {})),
            )
            if plan_memory(one).fullest.peak <= limit * 2**30:
                return predict_planned(one, plans, TRAFFIC).mean.total
        except ValueError:
            pass
        return None

    for layout in every_layout():
        if config.layout.overlap_experts:
            layout["overlap_experts"] = layout["vpp"] > 1 and layout["ep"] > 1
        for coded in (False, True):  # FP8 storage only if nothing else fits
            found = []
            for taken in product((False, True), repeat=len(switches)):
                settings: dict[str, dict] = {"train": {"fp8_storage": coded}}
                for key, on in zip(switches, taken, strict=True):
                    value, (section, name) = (NEUTRAL if on else FREE).get(key), key.split(".")
                    if value is not None:
                        settings.setdefault(section, {})[name] = yaml.safe_load(value)
                found.append(tried(layout, settings))
            if any(found):
                break
        kind = layout["pp"], layout["vpp"], layout["cp"], layout["tp"]
        best[kind] = min([*filter(None, found), best.get(kind, float("inf"))])
    return {kind: seconds for kind, seconds in best.items() if seconds < float("inf")}


def peaks(*overrides: str) -> float:
    """Return the peak memory of the fullest rank in GiB."""
    return plan_memory(load_config("tiny_cpu", [*SMALL, *overrides])).fullest.peak / 2**30


def check_found(root, found: dict, own: tuple[str, ...], limit: float) -> None:
    """Check that `--step` and the memory plan confirm each listed layout with its settings."""
    for one in found["best"]:
        again = found_by(root, "--step", "--steps", "2", *TOLD, *own, *one["settings"])
        assert again["mean"]["total"] == pytest.approx(one["seconds"], rel=1e-12)
        assert again["tokens_per_day"] == pytest.approx(one["tokens_per_day"], rel=1e-12)
        config = load_config("tiny_cpu", [*SMALL, *own, f"data.root={root}", *one["settings"]])
        assert plan_memory(config).fullest.peak == one["bytes"] <= limit * 2**30


def test_the_search_finds_what_trying_every_layout_by_hand_finds(root):
    own = (*SLOW, "layout.stages=null", "layout.overlap_experts=true")
    found = found_by(root, *SEARCH, *own, "train.memory_limit_gib=1")
    by_hand = tried_by_hand(root, 1.0, own, ())
    seconds = [one["seconds"] for one in found["best"]]
    assert seconds == pytest.approx(sorted(by_hand.values())[:10], rel=1e-12)
    assert len(by_hand) > 10  # only the ten best are listed
    check_found(root, found, own, 1.0)
    assert found["own_seconds"] >= seconds[0]
    # Some layouts use tensor or context parallelism, and both have a cost.
    settings = [set(one["settings"]) for one in found["best"]]
    assert any("layout.tp=2" in one for one in settings)
    assert any("layout.cp=2" in one for one in settings)
    # Expert communication overlaps wherever the layout allows it.
    without = ["layout.overlap_experts=false" in one for one in settings]
    alone = [bool(one & {"layout.vpp=1", "layout.ep=1"}) for one in settings]
    assert without == alone
    assert set(alone) == {True, False}


@pytest.mark.parametrize(
    ("own", "switches"),
    [pytest.param(("train.recompute=[norms,swiglu,mla_up]", "train.offload=true"),
                  ("train.recompute", "train.offload"), marks=pytest.mark.slow),
     (("dep.keep_activations=auto", "dep.memory_limit_gib=0.2"),
      ("train.recompute", "dep.keep_activations", "train.offload"))],
    ids=["recompute and offload, both the run's", "kept activations"],
)  # fmt: skip
def test_a_layout_takes_the_settings_with_which_it_is_fastest(root, own, switches):
    """Under a tight memory limit, the search agrees with trying all combinations of settings."""
    given = (*SLOW, "layout.stages=null", *own)
    plain = peaks(*given, *(f"{key}={FREE[key]}" for key in switches if key in FREE))
    least = peaks(*given, *(f"{key}={NEUTRAL[key]}" for key in switches))
    limit = (plain + 3 * least) / 4
    assert limit < plain
    found = found_by(root, *SEARCH, *given, f"train.memory_limit_gib={limit!r}")
    by_hand = tried_by_hand(root, limit, given, switches)
    seconds = [one["seconds"] for one in found["best"]]
    wanted = sorted(by_hand.values())[:10]
    assert seconds == pytest.approx(wanted, rel=1e-12)
    used = {setting.partition("=")[0] for one in found["best"] for setting in one["settings"]}
    assert used & set(switches)
    check_found(root, found, given, limit)


def test_settings_that_change_results_are_taken_only_where_no_others_do(root):
    given = (*SLOW, "layout.stages=null", "train.dtype=bfloat16", "train.rows_per_microbatch=1")
    neutral = [f"{key}={value}" for key, value in NEUTRAL.items() if "keep" not in key]
    own = (*given, *neutral)
    limit = (peaks(*own) + peaks(*own, "train.fp8_storage=true")) / 2
    found = found_by(root, *SEARCH, *own, f"train.memory_limit_gib={limit!r}")
    coded = [one for one in found["best"] if "train.fp8_storage=true" in one["settings"]]
    for one in coded:
        without = [setting for setting in one["settings"] if "fp8" not in setting]
        assert peaks(*own, *without) > limit
    enough = found_by(root, *SEARCH, *own, "train.memory_limit_gib=1")["best"]
    assert not any("fp8" in setting for one in enough for setting in one["settings"])
    # With enough memory nothing is recomputed, whatever the run's own setting is.
    assert all("train.recompute=[]" in one["settings"] for one in enough)


def test_measured_passes_of_unknown_rows_are_not_told_for_single_rows(root):
    """One row per microbatch would fit, but passes were measured with four rows."""
    measured = (
        "dep.pass_cost={embedding_forward: 1.0e-3, embedding_backward: 2.0e-3, "
        "dense_forward: 3.0e-3, dense_backward: 5.0e-3, expert_forward: 7.0e-3, "
        "expert_backward: 11.0e-3, head_forward: 13.0e-3, head_backward: 17.0e-3}"
    )
    given = (*SLOW, "layout.stages=null", "train.rows_per_microbatch=4", measured)
    most = [*(f"{key}={value}" for key, value in NEUTRAL.items()), "train.fp8_storage=true"]
    sizes = ("layout.pp=1", "layout.vpp=1", "layout.dp=4", "layout.ep=4")
    before = peaks(*given, *most, *sizes)
    limit = (before + peaks(*given, *most, *sizes, "train.rows_per_microbatch=1")) / 2
    own = (*SEARCH, *given, f"train.memory_limit_gib={limit!r}")
    known = found_by(root, *own, "dep.pass_cost.rows=4")["best"]
    assert any("train.rows_per_microbatch=1" in one["settings"] for one in known)
    unknown = found_by(root, *own)["best"]
    assert not any("train.rows_per_microbatch=1" in one["settings"] for one in unknown)
    assert len(unknown) < len(known)


def test_the_search_finds_what_fits_where_the_run_itself_does_not(root):
    arguments = ("--step", "--search", "--steps", "1", "data.rows_per_step=16")
    own = peaks("data.rows_per_step=16") * 2**30
    limit = (own - 1) / 2**30
    best = found_by(root, *arguments, f"train.memory_limit_gib={limit!r}")["best"]
    assert best
    assert all(0 < one["bytes"] < own for one in best)
    assert all(one["settings"] for one in best)  # the run's own settings are not listed


def test_the_search_counts_what_it_leaves_out_and_says_why(root):
    """The counts match trying each layout by hand; two rows per step are too few for 4 replicas."""
    own = ("layout.vpp=1", "layout.stages=null", "data.rows_per_step=2")
    arguments = ("--step", "--search", "--steps", "1", *own, "train.memory_limit_gib=1")
    *lines, last = run(root, *arguments, "--json").output.splitlines()
    found = json.loads(last)["left_out"]
    told = [line for line in lines if " such as pp " in line]
    for line, one in zip(told, found, strict=True):
        assert line == f"{one['count']:4d} such as {one['layout']}: {one['reason']}"
    cannot, can = 5, 0  # four layers are too few for 8 or more chunks
    for layout in every_layout():
        if layout["pp"] * layout["vpp"] > 4:
            continue
        try:
            sizes = [f"layout.{key}={value}" for key, value in layout.items()]
            load_config("tiny_cpu", [*SMALL, *own, *sizes])
            can += 1
        except ValueError:
            cannot += 1
    assert json.loads(last)["priced"] == can
    assert f"left out: {cannot} layouts" in lines
    assert sum(one["count"] for one in found) == cannot > 5
    reasons = " ".join(one["reason"] for one in found)
    assert "do not divide over 8 chunks" in reasons
    assert "data.rows_per_step=2 is not a multiple of layout.dp=4" in reasons


def planned_steps(root, *overrides: str) -> tuple[Config, PlannedSteps]:
    config = load_config("tiny_cpu", [*SMALL, *SLOW, *overrides, f"data.root={root}"])
    return config, plan_steps(config, 1, lambda share, what: None)


@pytest.mark.parametrize(
    "own",
    [("train.offload=true",),
     pytest.param(("train.rows_per_microbatch=4", "dep.keep_activations=auto",
                   "dep.memory_limit_gib=1"), marks=pytest.mark.slow),
     ("dep.bubbles=all",),
     pytest.param(("train.frozen=[vision_tower]", "layout.overlap_experts=true"),
                  marks=pytest.mark.slow)],
    ids=["offload", "rows and kept activations", "bubbles", "frozen and overlap"],
)  # fmt: skip
def test_no_settings_make_a_layout_faster_than_its_bound(root, own):
    config, planned = planned_steps(root, "layout.stages=null", *own)
    slow = replace(TRAFFIC, host=2e5)  # a slow host, so that fewer transfers shorten passes
    search = search_layouts._Search(config, planned, slow, 1 << 40, search_layouts.LeftOut())
    tried = 0
    for layout in list(every_layout())[::2]:
        try:
            one = config.replace(layout=config.layout.replace(**layout))
        except ValueError:
            continue
        bound, switches = search.bound(one), Layout.of(one)
        forward = sum(cost(int(size)) for size in planned.plans[0].items.patches) / 4
        passes = 1 if one.train.frozen else 3 if one.dep.keep_activations == "auto" else 4
        inside = one.dep.bubbles == "all" and layout["pp"] > 1
        media = 0.0 if inside else passes * forward / RANKS
        assert search.least_media(one) == pytest.approx(media)
        sizes = Sizes.of(one)
        lasting = [stage.lasting for stage in stages_of(one, None, sizes)]
        assert list(search_layouts._lasting(one, sizes)) == lasting
        for taken in list(switches.combinations())[::5]:
            try:
                settled = switches.with_levels(taken)
            except ValueError:
                continue
            total = search.price(settled).mean.total
            assert bound <= total * (1 + 1e-9), (layout, taken)
            assert search._tried(switches, taken).bound <= total * (1 + 1e-9), (layout, taken)
            tried += 1
    assert tried > 20


def fake(seconds: float) -> SimpleNamespace:
    mean = SimpleNamespace(total=seconds)
    return SimpleNamespace(predicted=SimpleNamespace(mean=mean))


@pytest.mark.parametrize("seed", [0, 1, 2, 92, 104])
def test_layouts_that_are_not_looked_at_are_not_among_the_best(root, seed, monkeypatch):
    """Seconds are random values above random bounds, and some layouts do not fit."""
    config, _ = planned_steps(root, "layout.stages=null", "train.memory_limit_gib=1")
    random, drawn, looked = np.random.default_rng(seed), {}, []

    def of(one: Config) -> tuple[float, float]:
        layout = one.layout
        key = layout.pp, layout.vpp, layout.cp, layout.tp, layout.ep
        if key not in drawn:
            bound = random.uniform(0.5, 3.0)
            drawn[key] = bound, bound * random.uniform(1.0, 1.3)
        return drawn[key]

    def fastest(search, one: Config, changes) -> SimpleNamespace | None:
        looked.append(one)
        return None if of(one)[1] > 2.8 else fake(of(one)[1])

    monkeypatch.setattr(search_layouts._Search, "bound", lambda search, one: of(one)[0])
    monkeypatch.setattr(search_layouts._Search, "fastest", fastest)
    found = search_layouts.search_layouts(config, 1, TRAFFIC)
    least: dict[tuple[int, ...], float] = {}
    for (*kind, _), (_, seconds) in drawn.items():
        if seconds <= 2.8:
            least[tuple(kind)] = min(seconds, least.get(tuple(kind), seconds))
    assert len(least) > 10
    assert [one.predicted.mean.total for one in found.best] == sorted(least.values())[:10]
    assert len(looked) < len(drawn) == found.priced


@pytest.mark.parametrize("seed", [0, 1, 2, 92, 104])
def test_settings_that_are_not_priced_are_not_the_fastest(root, seed, monkeypatch):
    """More switches may shorten the pipeline; if they do not, they make the step slower."""
    config, planned = planned_steps(root, "train.memory_limit_gib=1")
    search = search_layouts._Search(config, planned, TRAFFIC, 1 << 40, search_layouts.LeftOut())
    layout, random, priced = Layout.of(config), np.random.default_rng(seed), []
    every = [taken for taken in layout.combinations()]
    pipelines = {taken[:2]: random.choice([1.0, 1.1, 1.2]) for taken in every}
    extra = {taken: random.uniform(0.0, 0.2) for taken in every}
    for taken in every:  # for equal pipelines, more switches are slower
        for part in every:
            inside = part != taken and all(a <= b for a, b in zip(part, taken, strict=True))
            if inside and pipelines[part[:2]] == pipelines[taken[:2]]:
                extra[taken] = max(extra[taken], extra[part] + 1e-3)
    total = {taken: float(pipelines[taken[:2]] + extra[taken]) for taken in every}
    share = {taken: random.uniform(0.6, 1.0) for taken in every}
    fits = {taken for taken in every if random.uniform() < 0.5}

    def tried(search, layout, taken):
        bound = total[taken] * share[taken]
        return search_layouts._Tried(taken, taken, float(pipelines[taken[:2]]), bound)

    def price(search, taken, division):
        priced.append(taken)
        if taken == refused:
            raise ValueError("does not go")
        return fake(total[taken]).predicted

    monkeypatch.setattr(search_layouts._Search, "_tried", tried)
    monkeypatch.setattr(search_layouts._Search, "price", price)
    monkeypatch.setattr(
        search_layouts._Search, "_fitting",
        lambda search, layout, taken, division, sizes: taken in fits or None,
    )  # fmt: skip
    refused = min(fits, key=lambda taken: total[taken])
    found = search._fastest_of(layout, every, Sizes.of(config))
    assert found.predicted.mean.total == min(total[taken] for taken in fits - {refused})
    assert len(priced) < len(fits)
    priced.clear()
    fits &= {refused}
    with pytest.raises(ValueError, match="does not go"):
        search._fastest_of(layout, every, Sizes.of(config))
