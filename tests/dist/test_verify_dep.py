"""`kimi-pretrain verify dep` as a user runs it: it passes correct runs and finds every fault."""

import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_pretrain.verify.dep_compare import GROUPS
from kimi_pretrain.verify.dep_faults import FAULTS
from tests import fork_server
from tests.dist.jobs import SMALL, layout

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

ENCODER = {group for group in GROUPS if group.startswith("vision")} | {"projector"}


def verify(*arguments: str) -> subprocess.CompletedProcess:
    return fork_server.run(["-m", "launch.cli", "verify", "dep", "--json", *arguments], 200)


def told(done: subprocess.CompletedProcess) -> dict:
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def failed(comparison: dict) -> set[str]:
    return {group["group"] for group in comparison["groups"] if not group["passed"]}


# Two replicas allow every fault.
LAYOUTS = {
    "DP2": layout(dp=2),
    "PP2 x VPP2 x EP2, in bubbles": (
        *layout(pp=2, vpp=2, dp=2, ep=2), "dep.bubbles=all", "dep.flops_per_second=3e6",
        "model.vision.depth=3",
    ),
}  # fmt: skip


@pytest.fixture(
    scope="module", params=[pytest.param("DP2", marks=pytest.mark.slow), *list(LAYOUTS)[1:]]
)
def where(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def kept(where, tmp_path_factory):
    return tmp_path_factory.mktemp("verify") / "kept"


@pytest.fixture(scope="module")
def self_test(where, data_root, kept):
    """Result of a self-test whose reference has another row order."""
    return verify(
        "--config", "tiny_cpu", "--self-test", "--keep", str(kept),
        *SMALL, f"data.root={data_root}", *LAYOUTS[where], "data.order_rows=light_ends",
        "data.rows_per_step=8",  # with four rows the wrong expert would show in the loss
    )  # fmt: skip


def test_the_step_with_dep_is_the_step_without(where, self_test):
    result = told(self_test)
    assert self_test.returncode == 0, self_test.stdout + self_test.stderr
    assert result["passed"]
    comparison = result["comparison"]
    assert [group["group"] for group in comparison["groups"]] == list(GROUPS)
    assert max(group["error"] for group in comparison["groups"]) < 1e-5
    assert min(group["error"] for group in comparison["groups"]) > 0  # the comparison has two runs
    silent = {group["group"] for group in comparison["groups"] if group["zero"]}
    assert silent <= {"experts"}
    for name in ("loss_tokens", "vision_tokens", "items"):
        assert comparison["counts"][name][0] == comparison["counts"][name][1] > 0
    (routes,) = comparison["routes"]
    assert (routes["at_ties"], routes["wrong"]) == (0, 0)
    assert routes["tokens"] >= comparison["counts"]["loss_tokens"][0]
    plan = result["plan"]
    assert plan["encoding_ranks"] == result["processes"]
    assert plan["items_in_bubbles"] == (plan["items"] if "in bubbles" in where else 0)
    assert 0 < plan["moved_items"] < plan["items"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, self_test):
    found = told(self_test)["faults"][fault]
    assert found["found"]
    comparison = found["comparison"]
    assert max(group["error"] for group in comparison["groups"]) > 1e-2
    # Each fault shows its signature: in the right half, and visible in the loss or not.
    if fault in ("doubled-gradient", "lost-gradient"):
        assert failed(comparison) == ENCODER
    elif fault == "unequal-sums":
        # Only tensors that the last rank updates: it has its own part, and no rank has their sums.
        assert failed(comparison) <= ENCODER
    else:
        assert failed(comparison) == set(GROUPS)
    assert not comparison["differing"]
    (loss_error,) = comparison["loss_errors"]
    assert (loss_error > 8e-6) == (fault in ("lost-item", "swapped-items"))
    (routes,) = comparison["routes"]
    assert (routes["wrong"] > 0) == (fault == "wrong-expert")


@pytest.mark.parametrize("step", ["clean", "lost-gradient"])
def test_the_table_is_that_of_the_kept_files(step, self_test, kept):
    """Recomputes the table in plain numpy from the files of --keep."""
    result = told(self_test)
    assert json.loads((kept / "result.json").read_text()) == result
    table = result["comparison"] if step == "clean" else result["faults"][step]["comparison"]
    found, reference = read(kept / "dep" / step), read(kept / "reference" / "clean")
    assert sorted(found) == sorted(reference)
    assert sum(group["parameters"] for group in table["groups"]) == len(found)
    for group in table["groups"]:
        mine, wanted = found[group["worst"]], reference[group["worst"]]
        error = np.linalg.norm(mine - wanted) / np.linalg.norm(wanted)
        assert group["error"] == pytest.approx(error, rel=1e-9), group["group"]
    (projector,) = [group for group in table["groups"] if group["group"] == "projector"]
    norms = [
        np.sqrt(sum((g**2).sum() for name, g in part.items() if name.startswith("mm_projector")))
        for part in (found, reference)
    ]
    assert projector["norm_ratio"] == pytest.approx(norms[0] / norms[1], rel=1e-12)


def read(folder) -> dict[str, np.ndarray]:
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert sum(map(len, files)) == len({name for file in files for name in file})
    return {name: g.astype(np.float64).ravel() for file in files for name, g in file.items()}


def test_a_shrunk_preset_with_a_fault_fails(data_root):
    """Moonlight on two processes, with an update before the compared step."""
    done = verify(
        "--config", "moonlight_16b_a3b", "--shrink", "--processes", "2", "--steps", "2",
        "--plant", "lost-gradient", f"data.root={data_root}", "data.tokenizer=tokenizer.tiktoken",
        "data.sources={pictures: 1.0, words: 1.0}",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    result = told(done)
    assert (result["passed"], result["planted"]) == (False, "lost-gradient")
    assert failed(result["comparison"]) == ENCODER  # the rest agrees, also after an update
    assert result["comparison"]["counts"]["steps"] == [2, 2]
    assert max(result["comparison"]["loss_errors"]) < 1e-5
    assert result["layout"] | {"pp": 2, "dp": 1} == result["layout"]
    changed = {key: new for key, _, new in result["changes"]}
    assert changed["model.language.num_layers"] == 4
    assert changed["model.language.vocab_size"] < 1_000  # the tokenizer's size


def test_shrunk_presets_can_be_built():
    code = """
from kimi_pretrain.config import load_config
from kimi_pretrain.tools.dry_run import dry_run
from kimi_pretrain.verify.shrink import shrink
for name in ("kimi_k25_1t", "moonlight_16b_a3b"):
    small = shrink(load_config(name)).config
    result = dry_run(small)
    print(len(result.stages), result.language_model, result.vision_tower)
"""
    done = fork_server.run(["-c", code], 200)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[-2:]:
        stages, language, vision = map(int, line.split())
        assert stages == 2
        assert language < 60e6  # two tables of 163,840 x 128, and little else
        assert vision < 2e6
