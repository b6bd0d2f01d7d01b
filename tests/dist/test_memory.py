"""Saved tensors made again, in FP8 or in host memory: a step in several layouts, bit for bit."""

from collections import Counter
from functools import cache

import pytest

from tests.dist.jobs import run_jobs
from tests.dist.memory_case import EQUALS, FP8, POLICIES, SHORT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

INTERLEAVED = dict(pp=2, vpp=2, dp=2, ep=2)
JOBS: dict[str, tuple[dict, tuple[str, ...]]] = {
    # As many rows that stages work forward and backward in turns.
    "PP2 x VPP2 x EP2": (INTERLEAVED, ("data.rows_per_step=8",)),
    "experts overlapped": (INTERLEAVED, ("layout.overlap_experts=true", "data.rows_per_step=8")),
    "PP2 x CP2, EP2, bfloat16": (
        dict(pp=2, cp=2, ep=2),
        ("train.dtype=bfloat16", "model.language.num_heads=6"),
    ),
    "CP2 x TP2, EP2": (dict(cp=2, tp=2, ep=2), ("data.rows_per_step=2",)),
    "frozen language model": (INTERLEAVED, ("train.frozen=[language_model]",)),
}


FIRST, *_ = JOBS  # in which every policy is tried
SINGLE = ("norms", "swiglu", "mla_up")  # `test_memory_plan` holds their bytes in every run
CASES = [
    pytest.param(FIRST, policy, marks=[pytest.mark.slow] * (policy in SINGLE))
    for policy in POLICIES
]
for job in list(JOBS)[1:]:
    CASES += [pytest.param(job, policy) for policy in SHORT]
    CASES += [pytest.param(job, policy, marks=pytest.mark.slow) for policy in FP8]


def cases(*among):
    return pytest.mark.parametrize(("job", "policy"), [c for c in CASES if c.values[1] in among])


@pytest.fixture(scope="module")
def results(data_root, tmp_path_factory):
    """Whether of slow policies -> results by name of the job."""

    @cache
    def find(slow):
        return run(data_root, tmp_path_factory.mktemp("memory"), slow)

    return find


@pytest.fixture
def found(job, policy, results):
    return results(policy in SINGLE if job == FIRST else policy in FP8)


def run(data_root, folder, slow):
    jobs = {}
    for name, (axes, overrides) in JOBS.items():
        sizes = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1} | axes
        settings = [f"layout.{axis}={size}" for axis, size in sizes.items()]
        settings += ["model.language.yarn={factor: 4.0, original_max_position: 32}", *overrides]
        first, others = ("every", "FP8 storage") if slow else ("combined", "some")
        jobs[name] = first if name == FIRST else others, (f"data.root={data_root}", *settings)
    return run_jobs(jobs, folder, 4, timeout=250.0)


@cases(*EQUALS)
def test_no_bit_changes(job, policy, found):
    """Loss, gradients, gradients of vision embeddings, maxima of attention, routing biases."""
    result = found[job][policy]
    assert result["differing"] == []
    assert result["compared"] > (20 if "frozen" in job else 100)
    assert found[job]["padding"] > 0


@cases("fp8")
def test_fp8_changes_gradients_and_nothing_of_the_forward_pass(job, policy, found):
    """The control of the test above, too: what is compared can differ."""
    differing = found[job][policy]["differing"]
    assert differing
    assert not [name for name in differing if name.startswith(("loss", "maxima", "routing"))]
    assert found[job][policy]["error"][0] <= 0.06  # the farthest of all gradients


@cases("offload", "recompute, offload", "fp8, offload")
def test_a_schedule_that_was_seen_once_brings_nothing_late(job, policy, found):
    assert found[job][policy]["late"] == [0] * 4


@cases(*POLICIES)
def test_nothing_is_held_after_a_step_and_an_evaluation(job, policy, found):
    assert found[job][policy]["held"] == [{}] * 4


@cases(*(name for name in POLICIES if name != "none"))
def test_the_policy_acts_in_every_module(job, policy, found):
    """Where nothing is treated, the bits are those of no policy, too."""
    of_job, settings, trained = found[job], POLICIES[policy], "frozen" not in job
    layers, dense = of_job["layers"], of_job["dense layers"]
    assert layers > dense > 0
    sparse = layers - dense
    wanted = {"groups": layers, "saving FirstNorm": layers, "saving PackedLatentAttention": layers}
    wanted |= {"saving DenseMlp": dense, "saving SharedExperts": sparse}
    wanted["saving PartNorm"] = 3 * layers  # the latents' two and the one before the MLP
    wanted |= {"saving GroupedExperts": sparse, "saving PaddingAwareRouter": sparse}
    kinds = settings.get("recompute", [])
    shared = "CP2" in job
    if shared:  # keys and values of some heads, twice in the one job, each of latents in bfloat16
        # that are made of the row's in float32; outputs put together
        wanted["row PackedLatentAttention"] = layers * (5 if "bfloat16" in job else 2)
    if "mla_up" in kinds:  # queries, and latents that are gathered
        wanted["mla_up PackedLatentAttention"] = layers * (2 if shared else 1)
    if "norms" in kinds and trained:
        wanted |= {"norms FirstNorm": layers, "norms PartNorm": 3 * layers}
    if "swiglu" in kinds and trained:
        wanted |= {"swiglu DenseMlp": dense, "swiglu SharedExperts": sparse}
        wanted["swiglu GroupedExperts"] = sparse
    if settings.get("fp8_storage"):
        wanted |= {"fp8 DenseMlp": dense, "fp8 SharedExperts": sparse}
        wanted["fp8 GroupedExperts"] = 2 * sparse
        # Products with frozen weights save no input: SwiGLU alone does.
        wanted["codes"] = dense + (3 if trained else 2) * sparse
    done = sum((Counter(done) for done, _, _ in of_job[policy]["did"]), Counter())
    assert done.pop("saving LastNorm") > 0
    if not trained:  # the norms whose gradients are needed all the same
        assert ("norms" in kinds) == (done.pop("norms PartNorm", 0) > 0)
    assert dict(done) == wanted


@cases("offload", "recompute, offload", "fp8, offload")
def test_offload_moves_what_is_saved(job, policy, found):
    """On every rank, with a group for each layer and microbatch."""
    for done, peak, groups in found[job][policy]["did"]:
        assert groups == done["groups"] > 0
        assert 0 < peak["moving"] <= peak["host"]


@cases("offload", "recompute, offload", "fp8, offload")
def test_what_is_let_go_is_free(job, policy, found):
    """No schedule holds it, but for the input of the microbatch that was run last."""
    for _, peak, _ in found[job][policy]["did"]:
        assert peak["left"] <= found[job]["bytes of a residual"] < peak["host"] / 5


@pytest.mark.parametrize(
    ("less", "more"),
    [
        *(pytest.param("recompute", kind, marks=pytest.mark.slow) for kind in SINGLE),
        ("fp8", "recompute"),
        ("recompute, offload", "offload"),
        ("fp8, offload", "recompute, offload"),
    ],
)
def test_every_treatment_leaves_fewer_bytes(less, more, results):
    kind, found = "host" if "offload" in less else "kept", results(more in SINGLE)[FIRST]
    pairs = zip(found[less]["did"], found[more]["did"], strict=True)
    assert all(one[1][kind] < other[1][kind] for one, other in pairs)
