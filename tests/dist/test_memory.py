"""Tensors recomputed, stored in FP8 or offloaded: a step in several layouts, bit for bit."""

from collections import Counter
from functools import cache

import pytest

from tests.dist.jobs import run_jobs
from tests.dist.memory_case import EQUALS, FP8, POLICIES, SHORT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

INTERLEAVED = dict(pp=2, vpp=2, dp=2, ep=2)
JOBS: dict[str, tuple[dict, tuple[str, ...]]] = {
    # Enough rows for alternating forward and backward passes.
    "PP2 x VPP2 x EP2": (INTERLEAVED, ("data.rows_per_step=8",)),
    "experts overlapped": (INTERLEAVED, ("layout.overlap_experts=true", "data.rows_per_step=8")),
    "PP2 x CP2, EP2, bfloat16": (
        dict(pp=2, cp=2, ep=2),
        ("train.dtype=bfloat16", "model.language.num_heads=6"),
    ),
    "CP2 x TP2, EP2": (dict(cp=2, tp=2, ep=2), ("data.rows_per_step=2",)),
    "frozen language model": (INTERLEAVED, ("train.frozen=[language_model]",)),
}


FIRST, *_ = JOBS  # every policy runs in this one
SINGLE = ("norms", "swiglu", "mla_up")  # `test_memory_plan` checks their bytes in every test run
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
    """A function from "slow policies?" to results by job name."""

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
    """Compares loss, gradients, vision embedding gradients, attention maxima and routing biases."""
    result = found[job][policy]
    assert result["differing"] == []
    assert result["compared"] > (20 if "frozen" in job else 100)
    assert found[job]["padding"] > 0


@cases("fp8")
def test_fp8_changes_gradients_and_nothing_of_the_forward_pass(job, policy, found):
    """Also the control of the test above: the compared values can differ."""
    differing = found[job][policy]["differing"]
    assert differing
    assert not [name for name in differing if name.startswith(("loss", "maxima", "routing"))]
    assert found[job][policy]["error"][0] <= 0.06  # largest error of all gradients


@cases("offload", "recompute, offload", "fp8, offload")
def test_a_schedule_that_was_seen_once_brings_nothing_late(job, policy, found):
    assert found[job][policy]["late"] == [0] * 4


@cases(*POLICIES)
def test_nothing_is_held_after_a_step_and_an_evaluation(job, policy, found):
    assert found[job][policy]["held"] == [{}] * 4


@cases(*(name for name in POLICIES if name != "none"))
def test_the_policy_acts_in_every_module(job, policy, found):
    """Without it, an inactive policy would also pass the bit comparison."""
    of_job, settings, trained = found[job], POLICIES[policy], "frozen" not in job
    layers, dense = of_job["layers"], of_job["dense layers"]
    assert layers > dense > 0
    sparse = layers - dense
    wanted = {"groups": layers, "saving FirstNorm": layers, "saving PackedLatentAttention": layers}
    wanted |= {"saving DenseMlp": dense, "saving SharedExperts": sparse}
    wanted["saving PartNorm"] = 3 * layers  # the two latent norms and the norm before the MLP
    wanted |= {"saving GroupedExperts": sparse, "saving PaddingAwareRouter": sparse}
    kinds = settings.get("recompute", [])
    shared = "CP2" in job
    if shared:  # keys and values of some heads (in one job twice, from bfloat16 latents
        # cast from the row's float32 latents), and concatenated outputs
        wanted["row PackedLatentAttention"] = layers * (5 if "bfloat16" in job else 2)
    if "mla_up" in kinds:  # queries, and gathered latents
        wanted["mla_up PackedLatentAttention"] = layers * (2 if shared else 1)
    if "norms" in kinds and trained:
        wanted |= {"norms FirstNorm": layers, "norms PartNorm": 3 * layers}
    if "swiglu" in kinds and trained:
        wanted |= {"swiglu DenseMlp": dense, "swiglu SharedExperts": sparse}
        wanted["swiglu GroupedExperts"] = sparse
    if settings.get("fp8_storage"):
        wanted |= {"fp8 DenseMlp": dense, "fp8 SharedExperts": sparse}
        wanted["fp8 GroupedExperts"] = 2 * sparse
        # Products with frozen weights save no input; only SwiGLU does.
        wanted["codes"] = dense + (3 if trained else 2) * sparse
    done = sum((Counter(done) for done, _, _ in of_job[policy]["did"]), Counter())
    assert done.pop("saving LastNorm") > 0
    if not trained:  # the norms whose gradients are still needed
        assert ("norms" in kinds) == (done.pop("norms PartNorm", 0) > 0)
    assert dict(done) == wanted


@cases("offload", "recompute, offload", "fp8, offload")
def test_offload_moves_what_is_saved(job, policy, found):
    """Moves tensors on every rank, with a group for each layer and microbatch."""
    for done, peak, groups in found[job][policy]["did"]:
        assert groups == done["groups"] > 0
        assert 0 < peak["moving"] <= peak["host"]


@cases("offload", "recompute, offload", "fp8, offload")
def test_what_is_let_go_is_free(job, policy, found):
    """Only the input of the last microbatch may still be held by a schedule."""
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
