"""Lists the critical organs with their files and tests."""

from dataclasses import dataclass
from pathlib import Path

_DATA, _OURS = "tests/unit/data_pipeline", "tests/unit/kimi_pretrain"


@dataclass(frozen=True)
class Organ:
    """Source files and their tests, as glob patterns under the root.

    Attributes:
        forks: True if tests start processes through `tests.fork_server`.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    forks: bool = False

    def expanded(self, root: Path) -> tuple[list[str], list[str]]:
        """Return its source files and test files.

        Raises:
            ValueError: a pattern matches nothing.
        """
        return _expanded(root, self.files), _expanded(root, self.tests)


def _expanded(root: Path, patterns: tuple[str, ...]) -> list[str]:
    found = list[str]()
    for pattern in patterns:
        some = [str(file.relative_to(root)) for file in sorted(root.glob(pattern))]
        some = [one for one in some if not one.endswith("__init__.py")]
        if not some:
            raise ValueError(
                f"no file is called {pattern}: bring tests/mutants/organs.py up to date"
            )
        found += some
    return list(dict.fromkeys(found))


ORGANS = {
    "optim": Organ(
        ("kimi_pretrain/optim/*.py",),
        (f"{_OURS}/optim/test_*.py", "tests/dist/test_muonclip.py", "tests/dist/test_optim_*.py",
         "tests/dist/test_deepspeed.py"),
        forks=True,
    ),
    "dep": Organ(
        ("kimi_pretrain/dep/*.py",),
        (f"{_OURS}/dep/test_*.py", "tests/dist/test_dep.py", "tests/dist/test_bubbles.py",
         "tests/dist/test_sharded.py", "tests/dist/test_exchange.py"),
        forks=True,
    ),
    "engine": Organ(
        ("kimi_pretrain/engine/*.py",),
        ("tests/dist/test_engine.py", "tests/dist/test_positions.py", "tests/dist/test_memory.py",
         "tests/dist/test_layouts.py", "tests/dist/test_muonclip.py", "tests/dist/test_overlap.py",
         "tests/dist/test_sequence.py", "tests/dist/test_bubbles.py",
         "tests/dist/test_calibrate_passes.py", "tests/dist/test_precision.py",
         "tests/dist/test_weights.py"),
        forks=True,
    ),
    "memory": Organ(
        ("kimi_pretrain/memory/*.py",),
        (f"{_OURS}/memory/test_*.py", "tests/dist/test_memory.py",
         "tests/dist/test_memory_plan.py"),
        forks=True,
    ),
    "checkpoint": Organ(
        ("kimi_pretrain/checkpoint/*.py",),
        (f"{_OURS}/checkpoint/test_*.py", "tests/dist/test_resume.py",
         "tests/fault/test_checkpoint_s3.py"),
        forks=True,
    ),
    "train": Organ(
        ("kimi_pretrain/train.py", "kimi_pretrain/run.py", "kimi_pretrain/update.py",
         "kimi_pretrain/step.py", "kimi_pretrain/model.py", "kimi_pretrain/tools/validation.py",
         "kimi_pretrain/tools/held_out.py", "kimi_pretrain/tools/exposure.py"),
        (f"{_OURS}/tools/test_exposure.py", f"{_OURS}/reliability/test_anomaly_guard.py",
         "tests/dist/test_resume.py", "tests/dist/test_change_data.py", "tests/dist/test_chain.py",
         "tests/dist/test_stops.py", "tests/dist/test_layouts.py", "tests/dist/test_dep.py",
         "tests/unit/launch/test_govern_command.py", "tests/fault/test_quarantine.py"),
        forks=True,
    ),
    "plan": Organ(
        ("data_pipeline/plan/*.py",),
        tuple(f"{_DATA}/test_{name}.py" for name in (
            "blend",  "change", "chosen", "mixture", "order", "order_grid", "pack", "plan",
            "source", "token_budget", "tombstones", "loader", "loader_rules", "quarantine_rules",
            "text",
        )),
    ),
    "index": Organ(
        ("data_pipeline/index/*.py",),
        tuple(f"{_DATA}/test_{name}.py" for name in (
            "index", "shards", "shared_index", "redact", "append", "reindex", "verify", "source",
            "facts", "fetch", "find_samples",
        )) + ("tests/security/test_hostile_manifests.py",),
    ),
    "govern": Organ(
        ("data_pipeline/govern/*.py",),
        (f"{_DATA}/test_collect.py", f"{_DATA}/test_redact.py",
         "tests/unit/launch/test_collect_command.py", "tests/unit/launch/test_govern_command.py",
         "tests/fault/test_collect_s3.py", "tests/fault/test_redact_s3.py"),
        forks=True,
    ),
    "catalog": Organ(
        ("data_pipeline/catalog/*.py",),
        (f"{_DATA}/test_catalog.py", "tests/unit/launch/test_catalog_command.py"),
    ),
    "sync": Organ(
        ("data_pipeline/sync/*.py",),
        (f"{_DATA}/test_sync.py", "tests/unit/launch/test_sync_command.py",
         "tests/fault/test_sync.py"),
    ),
    "inspect": Organ(
        ("data_pipeline/inspect/*.py",),
        (f"{_DATA}/test_facts.py", f"{_DATA}/test_stats.py", f"{_DATA}/test_verify*.py",
         f"{_DATA}/test_find_samples.py", "tests/unit/launch/test_data_inspect.py",
         "tests/unit/launch/test_facts_command.py"),
    ),
}  # fmt: skip
