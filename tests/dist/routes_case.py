"""What a process of a test job does about tokens at a tie between two experts; see worker.py."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

NOISE = 3e-6  # of the weights, so that scores differ by a few roundings


def tied_routes(run) -> dict[str, Any]:
    """`verify dep` in one process, of a model in which experts 0 and 1 are at a tie everywhere.

    Each run has rounding of its own in the weights that decide between the two. Returns the
    comparison as the command makes it, the same of gradients whose reference did not follow, and
    that of a run whose last router takes the next best expert now and then, which is its clean one.
    """
    from kimi_pretrain.verify import configs, dep
    from kimi_pretrain.verify.dep_compare import tolerance_for
    from kimi_pretrain.verify.dep_faults import FAULTS
    from kimi_pretrain.verify.dep_files import compare_jobs
    from kimi_pretrain.verify.fault import Replaced

    tolerance = tolerance_for("float32", "model", steps=2)
    with TemporaryDirectory() as name:
        folder = Path(name)

        def take(config, job: str, seed: int, follow: str | None, bound: float, fault=None):
            other = _tied(type(run)(config, run.mesh), seed)
            followed = None if follow is None else folder / follow / "dep"
            with Replaced() as replaced:
                if fault is not None:
                    FAULTS[fault].plant(replaced, other, None)
                dep.take_steps(other, folder / job, 2, (), followed, bound)
            other.close()

        found = {}
        ours, plain = configs.decoupled(run.config), configs.reference(run.config)
        for case, bound, fault in (
            ("followed", tolerance.ties, None),
            ("alone", -1.0, None),  # nothing is a tie
            ("fault", tolerance.ties, "wrong-expert"),
        ):
            take(ours, f"{case}/dep", 1, None, bound, fault)
            take(plain, f"{case}/reference", 2, case, bound)
            compared = compare_jobs(
                folder / case / "dep", folder / case / "reference", tolerance, ()
            )
            found[case] = compared.as_dict()["comparison"]
    return json.loads(json.dumps(found))


def _tied(run, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for _, router in run.backbone.routers():
        weight = router.weight.data
        noise = torch.randn(weight[1].shape, generator=generator) * NOISE
        weight[1] = weight[0] * (1 + noise.to(weight))
    return run


ACTIONS = {"tied_routes": tied_routes}
