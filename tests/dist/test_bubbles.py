"""Vision work in the pipeline's bubbles (`dep.bubbles`): the gradients of DEP, in any slots."""

import pytest

from tests.dist.jobs import layout, run_job, run_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

# Passes that are as slow as the small encoder's pieces, so that bubbles hold some of them.
SLOW_DEVICE = ("dep.flops_per_second=3e6", "data.vision_token_ratio=0.3", "model.vision.depth=3")
ALL, EDGES = ("dep.bubbles=all", *SLOW_DEVICE), ("dep.bubbles=edges", *SLOW_DEVICE)
VPP = dict(pp=2, vpp=2)
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def jobs(cases, data_root):
    for name, (axes, settings) in cases.items():
        sizes = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1} | axes
        overrides = [f"layout.{axis}={size}" for axis, size in sizes.items()]
        yield name, ("bubbles", (f"data.root={data_root}", "train.steps=1", *overrides, *settings))


def check(found, dtype="float32", kept=False):
    """Every variant comes to DEP's gradients, on every rank."""
    found = dict(found)
    assert found.pop("units") > 8
    found.pop("shared")
    assert found.pop("dep loss") > 0
    for name, ranks in found.items():
        for rank in ranks:
            assert rank["encoder"] <= TOLERANCE[dtype], (name, rank)
            assert rank["backbone"] == 0, (name, rank)
            assert rank["loss"], name
            assert rank["bits"], name
        assert sum(rank["forward inside"] for rank in ranks) > 0, name
        assert sum(rank["backward inside"] for rank in ranks) > 0, name
        assert (sum(rank["kept"] for rank in ranks) > 0) == kept, name


FAST = {"PP2 x VPP2 x EP2": (VPP | dict(dp=2, ep=2), ALL)}


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    return run_jobs(dict(jobs(FAST, data_root)), tmp_path_factory.mktemp("bubbles"), 4)


@pytest.mark.parametrize("name", FAST)
def test_gradients_are_those_of_dep(name, found):
    check(found[name])
