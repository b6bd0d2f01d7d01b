"""Vision work in the pipeline's bubbles (`dep.bubbles`): DEP's gradients in any slots."""

import pytest

from tests.dist.jobs import run_jobs, start_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

# Passes are as slow as the small encoder's pieces, so that bubbles hold some of them.
SLOW_DEVICE = ("dep.flops_per_second=3e6", "data.vision_token_ratio=0.3", "model.vision.depth=3")
ALL, EDGES = ("dep.bubbles=all", *SLOW_DEVICE), ("dep.bubbles=edges", *SLOW_DEVICE)
KEPT = ("dep.keep_activations=auto", "dep.memory_limit_gib=0.006", "dep.check_recompute=true")
# With a quadratic cost the largest item dominates, so it is shared.
SHARED = ("dep.max_split=2", "dep.split_efficiency=1.0", "dep.check_recompute=true",
          "dep.cost={per_patch: 0, per_patch_squared: 1.0e-4, per_item: 0}",
          "data.vision_token_ratio=0.2")  # fmt: skip
FLOAT64 = ("train.dtype=float64",)
VPP, EP = dict(pp=2, vpp=2), dict(dp=2, ep=2)
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}

FAST = {
    "PP2 x VPP2 x EP2": (VPP | EP, ALL),
    "PP2 x VPP2 x EP2, kept, float64": (VPP | EP, (*ALL, *KEPT, *FLOAT64)),
    "PP2 x EP2, some shared": (dict(pp=2) | EP, (*ALL, *SHARED)),
}
SLOW = {
    "PP4": (dict(pp=4), (*ALL, "data.rows_per_step=16")),
    "PP4, float64": (dict(pp=4), (*ALL, *FLOAT64, "data.rows_per_step=16")),
    "PP2 x VPP2 x CP2 x EP2": (VPP | dict(cp=2, ep=2), (*ALL, "data.rows_per_step=4")),
    "PP2 x TP2": (dict(pp=2, tp=2), (*ALL, "data.rows_per_step=4")),
    "PP2 x VPP2 x EP2, first and last slots": (VPP | EP, EDGES),
    "each replica its own": (VPP | EP, (*ALL, "dep.scope=replica")),
    "nothing received ahead": (VPP | EP, (*ALL, "dep.bubble_ahead=0")),
    "bfloat16 on the way": (VPP | EP, (*ALL, "dep.exchange_dtype=bfloat16")),
    "frozen tower": (VPP | EP, (*ALL, "train.frozen=[vision_tower]", *KEPT[2:])),
    "frozen tower, kept": (VPP | EP, (*ALL, "train.frozen=[vision_tower]", *KEPT)),
    "frozen projector": (VPP | EP, (*ALL, "train.frozen=[projector]")),
    "frozen encoder": (VPP | EP, (*ALL, "train.frozen=[vision_tower, projector]")),
    "frozen language model": (VPP | EP, (*ALL, "train.frozen=[language_model]")),
    "an item now and then": (VPP | EP, (*ALL, "data.vision_token_ratio=0.01")),
    "recomputed backbone": (VPP | EP, (*ALL, "train.recompute=[norms, swiglu, mla_up]")),
}


def jobs(cases, data_root):
    for name, (axes, settings) in cases.items():
        sizes = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1} | axes
        overrides = [f"layout.{axis}={size}" for axis, size in sizes.items()]
        yield name, ("bubbles", (f"data.root={data_root}", "train.steps=1", *overrides, *settings))


def check(name, found):
    """Check that every variant gives DEP's gradients on every rank."""
    dtype = "float64" if "float64" in name else "float32"
    few = name in ("an item now and then",)
    assert found["units"] > (0 if few else 8)
    assert few or "shared" in name or found["joined"] > 0
    assert (found["shared"] > 0) == ("shared" in name)
    inside, ways = [], ("forward",) if name == "frozen encoder" else ("forward", "backward")
    for variant, ranks in found.items():
        if not isinstance(ranks, list):
            continue
        for rank in ranks:
            assert rank["encoder"] <= TOLERANCE[dtype], (variant, rank)
            assert rank["backbone"] == 0, (variant, rank)
            assert rank["loss"], variant
            assert rank["bits"], variant
            assert (rank["left"] is None) == ("shared" in name or rank["buckets"] == 0), variant
        inside += [rank for rank in ranks if "moved" in variant]
        assert (sum(rank["kept"] for rank in ranks) > 0) == ("kept" in name), variant
    for rank in found["planned"]:
        pieces = [piece for _, piece in rank["together"]]
        assert pieces == sorted(pieces)
        for piece in {*pieces}:
            units = [unit for unit, number in rank["together"] if number == piece]
            assert units == sorted(units)
    alike = (len({unit for unit, _ in rank["together"]}) for rank in found["planned"])
    assert few or "shared" in name or "frozen encoder" in name or max(alike) > 1
    # A rank without backward work sends all its buckets with the others' at the end.
    early = [rank["left"] == rank["buckets"] > 1 for rank in found["planned"]]
    assert few or "shared" in name or "frozen" in name or any(early)
    assert not any(rank["left"] for rank in found["summed behind"])
    planned = sum(rank["forward inside"] + rank["backward inside"] for rank in inside)
    assert few or planned > 10
    assert few or all(sum(rank[f"{way} mixed"] for rank in inside) for way in ways)
    # This depends on timing: backward work may be deferred, forward work may not.
    assert few or sum(rank["done inside"] for rank in inside) > 0


STEPS = ("train.steps=2", "optim.qk_clip_threshold=0.05", "data.order_rows=light_ends")
WORDS = ("data.sources={words: 1.0}", "data.vision_token_ratio=null")
TRAINED = {
    "with DEP": SLOW_DEVICE, "in bubbles": (*ALL, "train.trace_step=2"),
    "without media": (*ALL, *WORDS), "without media, with DEP": (*SLOW_DEVICE, *WORDS),
}  # fmt: skip
LEARNED = {"learned": "bubble_learning", "as configured": "bubble_training"}


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    given = dict(jobs(FAST, data_root))
    _, (root, *settings) = given["PP2 x VPP2 x EP2"]
    axes = [one for one in settings if one.startswith("layout.")]
    given["rules"] = "bubble_rules", (root, "train.steps=1", *axes, *ALL)
    for name, settings in TRAINED.items():
        given[name] = "bubble_training", (root, *axes, *settings, *STEPS)
    for name, action in LEARNED.items():
        given[name] = action, (root, *axes, *ALL, *STEPS, "train.steps=6")
    return run_jobs(given, tmp_path_factory.mktemp("bubbles"), 4)


@pytest.fixture(scope="module")
def slow(data_root, tmp_path_factory):
    return run_jobs(dict(jobs(SLOW, data_root)), tmp_path_factory.mktemp("slow"), 4, timeout=390.0)


@pytest.mark.parametrize("name", FAST)
def test_gradients_are_those_of_dep(name, found):
    check(name, found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_gradients_are_those_of_dep_elsewhere(name, slow):
    check(name, slow[name])


def test_a_training_is_that_of_dep(found):
    """Other ranks encode and the order of sums differs, so results agree to rounding."""
    for ours, plain in (("in bubbles", "with DEP"), ("without media", "without media, with DEP")):
        same = ours == "without media"
        for step, (line, wanted) in enumerate(zip(found[ours], found[plain], strict=True)):
            line, wanted = dict(line), dict(wanted)
            assert line.pop("timeline")
            assert wanted.pop("timeline")
            assert line.pop("encoded")
            assert not wanted.pop("encoded")
            # Other ranks encode, so other bytes move.
            moved = line.pop("moved"), wanted.pop("moved")
            assert moved == (0, 0) if same else min(moved) > 0
            # The losses of the first step precede any update and use the same embeddings.
            assert line["loss"] == wanted["loss"] or step
            for name, value in wanted.items():
                if same or not isinstance(value, float):
                    assert name == "table" or line[name] == value, (name, step)
                else:
                    assert line[name] == pytest.approx(value, rel=1e-5), (name, step)


def test_slots_follow_measured_costs_and_no_bit_does(found):
    """The first step is not counted, and the loader is two steps ahead."""
    lines = found["learned"]
    for step, (line, wanted) in enumerate(zip(lines, found["as configured"], strict=True)):
        more = {name: wanted[name] for name in ("encoded", "moved", "timeline")}
        assert wanted | line == line | more, step
        (factors,) = set(line["factors"])  # the same on all ranks
        assert (factors == (1.0, 1.0, 1.0)) == (step < 4)
        assert all(0 < factor < 1e6 for factor in factors)
        inside = [s for way in line["slots"] for mine in way for s in mine]
        assert inside


def test_the_traced_step_has_its_work_and_waits_on_a_timeline(found):
    """Its sections lie inside phase 4, do not overlap, and last as long as the measurement."""
    first, second = (line["timeline"] for line in found["in bubbles"])
    assert not any(rank["sections"] for rank in first)
    for rank in second:
        sections = sorted(rank["sections"], key=lambda one: one[1])
        names = {"2 vision forward": "filled", "6 vision backward": "filled", "4 wait": "wasted"}
        lasting = {"filled": 0.0, "wasted": 0.0}
        for (name, start, end), (_, following, _) in zip(sections, [*sections[1:], sections[-1]]):
            assert any(a - 1e-3 <= start <= end <= b + 1e-3 for a, b in rank["spans"].values())
            assert end <= following + 1e-6 or following == start
            lasting[names[name]] += end - start
        for kind, seconds in lasting.items():
            assert rank["seconds"][kind] <= seconds + 1e-3, kind  # a section includes its stopwatch
        assert {name for name, _, _ in sections} == names.keys()


def test_another_order_of_passes_is_an_error(found):
    second, late, early = found["rules"]["disorder"]
    assert "stage 0 begins the backward of microbatch 0, chunk 0, where the plan" in second
    assert "did not wait before the backward of microbatch 0, chunk 0, where" in late
    assert "stage 0 ended before the forward of microbatch 1, chunk 0" in early


def test_without_a_pipeline_dep_does_it_and_says_so(found):
    kind, told = found["rules"]["no pipeline"]
    assert kind == "TrainStep"
    assert "dep.bubbles=all with layout.pp=1" in told


def test_batched_p2p_is_refused(found):
    assert "batched p2p" in found["rules"]["batched"]


FAULTS = {
    "bubble_fault": ("planted", "in the vision backward of item", "on rank 3, in a bubble"),
    "bubble_disorder": (
        "stage 0 begins the forward of microbatch 0, chunk 0",
        "has forward of microbatch 1, chunk 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_all_ranks_and_is_named(fault, data_root, tmp_path):
    _, settings = dict(jobs({"": (VPP | EP, ALL)}, data_root))[""]
    done = start_jobs({fault: (fault, settings)}, tmp_path, 4, timeout=120.0)
    assert done.returncode > 0
    for part in FAULTS[fault]:
        assert part in done.stdout + done.stderr
