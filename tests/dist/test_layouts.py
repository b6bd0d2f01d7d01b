"""Every layout has the same rows, losses and gradients: guards the host backend (I2, I4, I5)."""

import json

import pytest
import torch

from data_pipeline.index.manifest import read_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import load_config
from tests.dist.gather_case import objects
from tests.dist.jobs import SMALL, layout, run_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

# With a threshold this low QK-Clip acts in every step, so that it is compared too.
CLIP = "optim.qk_clip_threshold=0.05"
FOUR = dict(pp=2, dp=2, ep=2)
LAYOUTS = {
    "PP2": dict(pp=2),
    "PP2 with VPP2 x EP2": FOUR | dict(vpp=2),
    "DP4 with EP2, experts in two copies": dict(dp=4, ep=2),
}
# Parts of those layouts; every test run compares gradients of the third.
SLOW = {
    "PP2 with VPP2": dict(pp=2, vpp=2),
    "EP2": dict(dp=2, ep=2),
    "PP2 x EP2": FOUR,
    "DP2, optimizer sharded": dict(dp=2),
}
# Steps without media, and steps with fewer items than ranks (so media in some replicas only).
SPARSE = {
    "no media at all": ("data.sources={words: 1.0}", "data.vision_token_ratio=null"),
    "an item now and then": ("data.vision_token_ratio=0.01",),
}
STEPS = "train.steps=2"
# Enough microbatches for alternating forward and backward passes; with the usual four, all forward
# passes come first.
EIGHT_ROWS = "data.rows_per_step=8"
INTERLEAVED = "PP2 with VPP2 x EP2"
DTYPES = {"float32": 1e-5, "float64": 1e-10}
# One process keeps the drawn row order. Another order of microbatches only changes the order of
# sums.
LIGHT_ENDS = "data.order_rows=light_ends"
NO_BALANCE_LOSS = "model.language.aux_loss_coeff=0.0"


HELDOUT = (
    "data.heldout={pictures_heldout: 1, words_heldout: 1}", "data.heldout_tokens=100000",
    "train.validate_every=1",
)  # fmt: skip
VALIDATED = {
    "validated": (1, {}),
    "validated in four": (4, FOUR | dict(vpp=2)),
}
VALIDATE = ("train.steps=1", EIGHT_ROWS, *HELDOUT, CLIP)


def losses(axes=None, *overrides):
    return "losses", (STEPS, CLIP, *layout(**(axes or {})), *overrides)


def emptied(data_root, folder):
    """Return tombstones that empty the first replica's rows of the second step."""
    keys = [*SMALL, *layout(), f"data.root={data_root}"]
    data = load_config("tiny_cpu", keys).data
    planner = Planner([read_index(FolderStore(data_root), n) for n in data.source_names], data)
    _, state = planner.plan(planner.state_dict())
    samples = planner.plan(state)[0].samples
    here = samples.row < 2
    pairs = zip(samples.source[here].tolist(), samples.index[here].tolist())
    lines = [
        {"source": planner.indices[a].name, "key": planner.indices[a].key_of(b), "from_step": 2}
        for a, b in pairs
    ]
    (folder / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (f"data.tombstones={folder / 'list.jsonl'}",)


def own_lists(folder):
    """Return a job whose two ranks find different lists, as if the file changed meanwhile."""
    for name, number in (("list", 0), ("list_0", 1), ("list_1", 2)):
        lines = [
            {"source": source, "key": f"{key}000{number}", "from_step": 2}
            for source, key in (("words", "w"), ("words_heldout", "h"))
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "own_lists", (*VALIDATE, *layout(pp=2), f"data.tombstones={folder / 'list.jsonl'}")


def run_all(jobs, processes, data_root, tmp_path_factory):
    here = {name: (act, (f"data.root={data_root}", *more)) for name, (act, more) in jobs.items()}
    folder = tmp_path_factory.mktemp(f"processes{processes}")
    return run_jobs(here, folder, processes, timeout=400.0)


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    """Map processes -> results by name; all jobs of one process count run together."""

    single = {
        "losses": losses(),
        INTERLEAVED: losses({}, EIGHT_ROWS),
        "no updates": losses({}, "optim.lr=1e-12", "optim.min_lr=0"),
        "a row": losses({}, NO_BALANCE_LOSS),
        "two rows": losses({}, NO_BALANCE_LOSS, "train.rows_per_microbatch=2"),
        "skipped": ("skipped_mask", ("train.rows_per_microbatch=2", *layout())),
    }
    single |= {name: losses({}, *overrides) for name, overrides in SPARSE.items()}
    double = {name: losses(axes) for name, axes in LAYOUTS.items() if processes_of(axes) == 2}
    double["planted replica"] = "planted_replica", layout(pp=2)
    double["planted bit"] = "planted_bit", layout(dp=2, ep=1)
    double["own lists"] = own_lists(tmp_path_factory.mktemp("lists"))
    quadruple = {name: losses(axes) for name, axes in LAYOUTS.items() if processes_of(axes) == 4}
    quadruple[INTERLEAVED] = losses(FOUR | dict(vpp=2), EIGHT_ROWS)
    quadruple["bfloat16"] = losses(FOUR | dict(vpp=2), "train.dtype=bfloat16")
    quadruple["infinity"] = "planted_infinity", ("train.steps=1", *layout(**FOUR))
    single["gathered"] = "gathered", layout()
    quadruple["gathered"] = "gathered", layout(**FOUR)
    quadruple |= {name: losses(FOUR | dict(vpp=2), *more) for name, more in SPARSE.items()}
    gone = emptied(data_root, tmp_path_factory.mktemp("tombstones"))
    single["emptied"], quadruple["emptied"] = losses({}, *gone), losses(FOUR | dict(vpp=2), *gone)
    for name, (processes, axes) in VALIDATED.items():
        jobs = single if processes == 1 else quadruple
        jobs[name] = "validated", (*VALIDATE, *layout(**axes))
    for dtype in DTYPES:
        step = f"train.dtype={dtype}", "train.steps=1"
        single[dtype] = "colocated_gradients", (*step, *layout())
        light = (LIGHT_ENDS,) if dtype == "float64" else ()
        quadruple[dtype] = "dep_gradients", (*step, *layout(**FOUR), *light)
    return {
        processes: run_all(jobs, processes, data_root, tmp_path_factory)
        for processes, jobs in ((1, single), (2, double), (4, quadruple))
    }


@pytest.fixture(scope="module")
def slow(data_root, tmp_path_factory):
    """Results of the layouts in `SLOW`, and of jobs that `found` covers in part."""
    jobs: dict[int, dict] = {2: {}, 4: {}}
    for name, axes in SLOW.items():
        jobs[processes_of(axes)][name] = losses(axes)
    jobs[2]["planted bit, slices"] = "planted_bit", (*layout(), "layout.tp=2")
    jobs[4]["light ends"] = losses(FOUR | dict(vpp=2), EIGHT_ROWS, LIGHT_ENDS)
    shared = (*VALIDATE, *layout(), "layout.cp=2", "layout.tp=2")
    jobs[4]["validated, rows shared"] = "validated_once", shared
    return {n: run_all(some, n, data_root, tmp_path_factory) for n, some in jobs.items()}


def processes_of(axes) -> int:
    return axes.get("pp", 1) * axes.get("dp", 1)


def assert_same(steps, expected, rel=1e-5):
    for step, wanted in zip(steps, expected, strict=True):
        for count in ("vision_tokens", "loss_tokens", "items"):
            assert step[count] == wanted[count]
        for number in ("loss", "grad_norm", "max_logit"):
            assert step[number] == pytest.approx(wanted[number], rel=rel), number
        assert_same_losses(step, wanted, rel)


def assert_same_losses(step, wanted, rel=1e-5):
    """Check the losses by source and position, and that they sum to the step's loss."""
    for name, values in wanted["table"].items():
        seen = {key: value for key, value in values.items() if value is not None}
        found = {key: value for key, value in step["table"][name].items() if value is not None}
        assert found == pytest.approx(seen, rel=rel), name
    table = step["table"]
    for what in ("source", "position"):
        tokens = table[f"loss_tokens_by_{what}"]
        assert sum(tokens.values()) == step["loss_tokens"]
        total = sum(table[f"loss_by_{what}"][name] * n for name, n in tokens.items() if n)
        assert total / step["loss_tokens"] == pytest.approx(step["loss"], rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_process(name, found):
    one_process = found[1].get(name, found[1]["losses"])
    check_losses(found[processes_of(LAYOUTS[name])][name], one_process)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_losses_of_other_layouts_equal_one_process(name, slow, found):
    check_losses(slow[processes_of(SLOW[name])][name], found[1]["losses"])


def check_losses(steps, one_process):
    assert_same(steps, one_process)
    assert all(step["vision_tokens"] > 0 for step in steps)
    assert [s["clipped_heads"] for s in steps] == [s["clipped_heads"] for s in one_process]
    assert sum(step["clipped_heads"] for step in steps) > 0


@pytest.mark.slow
def test_the_order_of_microbatches_changes_rounding_alone(found, slow):
    """Resumes and the float64 gradients cover this order in every test run."""
    steps, drawn = slow[4]["light ends"], found[4][INTERLEAVED]
    assert_same(steps, found[1][INTERLEAVED])
    assert [step["grad_norm"] for step in steps] != [step["grad_norm"] for step in drawn]


def test_the_weights_move(found):
    """Control of the test above: without updates the later losses differ."""
    frozen, one_process = found[1]["no updates"], found[1]["losses"]
    assert frozen[0]["loss"] == one_process[0]["loss"]
    for step, moved in zip(frozen[1:], one_process[1:], strict=True):
        assert abs(step["loss"] - moved["loss"]) > 1e-3


@pytest.mark.parametrize("name", SPARSE)
def test_steps_with_little_or_no_media(name, found):
    assert min(step["items"] for step in found[1][name]) < 4
    assert_same(found[4][name], found[1][name])


def test_a_replica_whose_rows_tombstones_have_emptied(found):
    first, second = found[1]["emptied"]
    assert first == found[1]["losses"][0]
    assert 0 < second["loss_tokens"] < found[1]["losses"][1]["loss_tokens"]
    assert_same(found[4]["emptied"], [first, second])


def test_all_ranks_have_the_tombstones_that_rank_0_has_read(found):
    """Compares [source, sample, step from 0] of the training and the held-out data."""
    first, second = found[2]["own lists"]
    assert first == second == [[[1, 1, 1]], [[1, 1, 1]]]


def test_rows_of_a_microbatch_do_not_meet(found):
    """One or two rows per microbatch agree, except for the routers' balance loss."""
    assert_same(found[1]["two rows"], found[1]["a row"])


def test_bf16_follows_fp32(found):
    for step, wanted in zip(found[4]["bfloat16"], found[1]["losses"], strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dep_gradients_equal_colocated_encoder(dtype, found):
    """DEP in PP2 x EP2 against one process with the encoder in the graph, every parameter."""
    gradients, wanted = found[4][dtype], found[1][dtype]
    assert sorted(gradients) == sorted(wanted)
    for name, gradient in wanted.items():
        scale = gradient.double().norm()
        difference = (gradients[name].double() - gradient.double()).norm()
        assert difference <= DTYPES[dtype] * scale, (name, float(difference / scale))
        assert torch.isfinite(gradient).all()
    silent = [name for name, gradient in wanted.items() if not gradient.any()]
    assert all(".mlp.experts." in name for name in silent), silent


def test_a_skipped_sample_loses_its_whole_loss_and_no_other(found):
    assert found[1]["skipped"]["equal"]
    assert found[1]["skipped"]["lost"] > 50


def test_copies_that_differ_at_the_start_are_named(found):
    assert found[2]["planted replica"].startswith("vision_tower.patch_embed.")


@pytest.mark.parametrize(
    "job", ["planted bit", pytest.param("planted bit, slices", marks=pytest.mark.slow)]
)
def test_a_wrong_bit_in_one_copy_is_named_when_its_turn_comes(job, request):
    planted = request.getfixturevalue("slow" if "slices" in job else "found")[2][job]
    assert planted["sound"] == ""
    other, told, another = planted["told"]
    assert told.startswith(f"step 2: {planted['name']} is one on rank 0, another on rank 1: ")
    assert (other, another) == ("", "")
    assert planted["equal again"]  # after the update the error is undetectable


@pytest.mark.parametrize("processes", [1, 4])
def test_objects_of_all_sizes_arrive_in_the_order_of_ranks(processes, found):
    sent = zip(*(objects(rank, processes) for rank in range(processes)), strict=True)
    assert repr(found[processes]["gathered"]) == repr([list(values) for values in sent])


def test_a_step_that_is_not_finite_changes_nothing(found):
    expected = {"finite step": True, "infinite step": False, "applied": False}
    assert found[4]["infinity"] == expected


@pytest.mark.parametrize(
    "name", ["validated in four", pytest.param("validated, rows shared", marks=pytest.mark.slow)]
)
def test_held_out_losses_are_those_of_one_process(name, found, request):
    """Numbers agree despite rows without a sample, other steps and an unusable sample."""
    known = found if name in found[4] else request.getfixturevalue("slow")
    several, one = known[4][name], found[1]["validated"]
    for line, wanted in zip(several["lines"], one["lines"]):  # shared rows: only before the steps
        for count in ("step", "kind", "loss_tokens", "loss_tokens_by_source",
                      "loss_tokens_by_position", "text_tokens", "vision_tokens",
                      "skipped_samples"):  # fmt: skip
            assert line[count] == wanted[count], count
        for means in ("loss", "loss_by_source", "loss_by_position"):
            assert line[means] == pytest.approx(wanted[means], rel=1e-4), means
        assert line["skipped_samples"] == 1
    if name == "validated in four":
        assert len(several["lines"]) == 2
        assert several["rows"][-1][-1] < 7, "no microbatch of the last step is empty"
        for held in (several, one):
            assert held["stopped"] == (True, list(range(len(held["rows"]))))
    assert one["lines"][0]["loss"] != one["lines"][1]["loss"]
    assert one["lines"][0]["vision_tokens"] > 100
