"""Action of worker.py on tokens at a tie between two experts."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

NOISE = 3e-6  # relative noise of the weights, so that scores differ by a few roundings


def tied_routes(run) -> dict[str, Any]:
    """Run `verify dep` in one process on a model where experts 0 and 1 tie everywhere.

    Each run has different rounding in the weights that decide the tie. Returns the command's
    comparison; the same with a reference that did not follow the routes; and that of a run whose
    last router sometimes picks the next best expert.
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
            ("alone", -1.0, None),  # no difference counts as a tie
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
