"""Import rules between rooms, rooms that may use certain packages, and file names in the docs.

Uses only `ast` and imports nothing under test, so it runs in a second without torch.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kimi_pretrain.reliability.stack_inspection import FILING
from tests import ROOT

# A room may import itself and modules under the names listed here, and nothing else of ours. The
# longest name wins. Imports inside functions and under TYPE_CHECKING count too.
MEDIA = {"moonvit3d.geometry", "moonvit3d.media", "moonvit3d.preprocess"}
SECTIONS = {
    "kimi_pretrain.checkpoint.config", "kimi_pretrain.dep.config",
    "kimi_pretrain.parallel.layout", "kimi_pretrain.reliability.config",
    "kimi_pretrain.siglip.config", "kimi_pretrain.weights.model_config",
}  # fmt: skip
BASE = {"kimi_pretrain.config", "typed_config", *SECTIONS}
ROOMS: dict[str, set[str]] = {
    "typed_config": set(),
    "moonvit3d.geometry": {"typed_config"},
    "moonvit3d.preprocess": {"moonvit3d.geometry"},
    "moonvit3d.mp4_tables": set(),
    "moonvit3d.media": {"moonvit3d.geometry", "moonvit3d.mp4_tables"},
    "moonvit3d.safetensors_io": set(),
    "moonvit3d": {*MEDIA, "moonvit3d.safetensors_io", "typed_config"},
    "data_pipeline": {*MEDIA, "typed_config"},
    **{section: {"typed_config"} for section in SECTIONS},
    "kimi_pretrain.weights.model_config": {"typed_config", "moonvit3d.config"},
    "kimi_pretrain.config": {
        *SECTIONS, "typed_config", "moonvit3d.config", "data_pipeline.config",
        "data_pipeline.store", "kimi_pretrain.optim.config", "kimi_pretrain.optim.schedule",
    },
    "kimi_pretrain.parallel.balance": set(),
    "kimi_pretrain.parallel": BASE,
    "kimi_pretrain.optim": {
        "kimi_pretrain.parallel.balance", "kimi_pretrain.telemetry.stopwatch",
        "kimi_pretrain.weights.model_config", "typed_config",
    },
    "kimi_pretrain.telemetry.phases": set(),
    "kimi_pretrain.telemetry.stopwatch": set(),
    "kimi_pretrain.telemetry.losses": {"data_pipeline.plan"},
    "kimi_pretrain.memory": set(),
    "kimi_pretrain.attention": {*BASE, "kimi_pretrain.parallel.sequence"},
    "kimi_pretrain.memory.kept": BASE,
    "kimi_pretrain.weights.siglip_shapes": {
        "kimi_pretrain.siglip.config", "kimi_pretrain.weights.shapes",
    },
    "kimi_pretrain.weights.shapes": {"kimi_pretrain.weights.model_config", "moonvit3d.layouts"},
    "kimi_pretrain.tools.optimizer_division": {"kimi_pretrain.optim"},
    "kimi_pretrain.memory.switches": {*BASE, "moonvit3d.memory"},
    "kimi_pretrain.memory.states": {
        *BASE, "kimi_pretrain.optim", "kimi_pretrain.tools.optimizer_division",
        "kimi_pretrain.weights.shapes", "kimi_pretrain.weights.siglip_shapes", "moonvit3d.layouts",
    },
    "kimi_pretrain.memory.plan": {
        *BASE, "kimi_pretrain.memory.kept", "kimi_pretrain.memory.states",
        "kimi_pretrain.memory.switches", "kimi_pretrain.siglip.counts",
        "kimi_pretrain.tools.optimizer_division", "moonvit3d.geometry", "moonvit3d.memory",
    },
    "kimi_pretrain.memory.search": {
        *BASE, "kimi_pretrain.memory.plan", "kimi_pretrain.memory.states",
        "kimi_pretrain.memory.switches", "kimi_pretrain.tools.optimizer_division",
    },
    "kimi_pretrain.memory.limits": {
        *BASE, "kimi_pretrain.memory.host_room", "kimi_pretrain.memory.plan",
        "kimi_pretrain.memory.search", "kimi_pretrain.memory.states",
    },
    "kimi_pretrain.engine": {
        *BASE, "kimi_pretrain.attention", "kimi_pretrain.telemetry.losses", "kimi_pretrain.memory",
        "kimi_pretrain.parallel", "data_pipeline.loader",
        "data_pipeline.plan",
    },
    "kimi_pretrain.dep.leaves": {"kimi_pretrain.dep", "kimi_pretrain.engine.microbatch"},
    "kimi_pretrain.dep.bubble_run": {
        "kimi_pretrain.dep", "kimi_pretrain.engine.microbatch",
        "kimi_pretrain.telemetry.stopwatch", "moonvit3d",
    },
    "kimi_pretrain.dep.bubble_step": {
        *BASE, "kimi_pretrain.dep", "kimi_pretrain.engine", "kimi_pretrain.model",
        "kimi_pretrain.step", "kimi_pretrain.telemetry.phases", "kimi_pretrain.telemetry.stopwatch",
        "kimi_pretrain.update", "data_pipeline",
    },
    "kimi_pretrain.dep": {*BASE, "kimi_pretrain.parallel", "data_pipeline.plan", "moonvit3d"},
    "kimi_pretrain.checkpoint": {
        *BASE, "kimi_pretrain.engine.mesh", "kimi_pretrain.parallel", "data_pipeline",
        "moonvit3d.safetensors_io",
    },
    "kimi_pretrain.reliability": {
        *BASE, "kimi_pretrain.checkpoint", "kimi_pretrain.dep.planner", "kimi_pretrain.engine.mesh",
        "kimi_pretrain.memory.limits", "kimi_pretrain.optim", "kimi_pretrain.siglip.tokenizer",
        "data_pipeline", "moonvit3d.geometry",
    },
    "kimi_pretrain.weights": {
        *BASE, "kimi_pretrain.checkpoint", "kimi_pretrain.engine.mesh", "kimi_pretrain.optim",
        "kimi_pretrain.reliability.run_history", "kimi_pretrain.weights.shapes",
        "kimi_pretrain.weights.siglip_shapes",
        "data_pipeline.store", "moonvit3d",
    },
    "kimi_pretrain.siglip": {*BASE, "kimi_pretrain.dep", "data_pipeline", "moonvit3d"},
    "kimi_pretrain.siglip.counts": {"kimi_pretrain.siglip.config"},
    "kimi_pretrain.siglip.tokenizer": {
        "kimi_pretrain.siglip.config", "data_pipeline.config", "data_pipeline.store",
    },
    "kimi_pretrain.siglip.step": {
        *BASE, "kimi_pretrain.dep", "kimi_pretrain.engine", "kimi_pretrain.model",
        "kimi_pretrain.siglip", "kimi_pretrain.siglip.tokenizer", "kimi_pretrain.step",
        "kimi_pretrain.update", "data_pipeline",
    },
    "kimi_pretrain.model": {
        *BASE, "kimi_pretrain.dep", "kimi_pretrain.engine", "kimi_pretrain.optim",
        "kimi_pretrain.parallel", "kimi_pretrain.siglip", "moonvit3d",
    },
    "kimi_pretrain.update": {
        *BASE, "kimi_pretrain.dep", "kimi_pretrain.engine", "kimi_pretrain.model",
        "kimi_pretrain.optim", "kimi_pretrain.reliability", "kimi_pretrain.parallel",
    },
    "kimi_pretrain.step": {
        *BASE, "kimi_pretrain.dep", "kimi_pretrain.engine", "kimi_pretrain.telemetry.losses",
        "kimi_pretrain.model", "kimi_pretrain.telemetry.phases", "kimi_pretrain.update",
        "data_pipeline",
    },
    "kimi_pretrain.tools.validation": {
        *BASE, "kimi_pretrain.dep", "kimi_pretrain.engine.mesh", "kimi_pretrain.telemetry.losses",
        "kimi_pretrain.model", "kimi_pretrain.step", "data_pipeline",
    },
    "kimi_pretrain.telemetry": {
        *BASE, "kimi_pretrain.checkpoint.manifest", "kimi_pretrain.checkpoint.saver",
        "kimi_pretrain.dep", "kimi_pretrain.engine.mesh", "kimi_pretrain.telemetry.losses",
        "kimi_pretrain.optim", "kimi_pretrain.parallel", "kimi_pretrain.reliability",
        "kimi_pretrain.siglip.counts", "kimi_pretrain.step", "kimi_pretrain.telemetry.phases",
        "kimi_pretrain.telemetry.stopwatch", "kimi_pretrain.update", "data_pipeline", "moonvit3d",
    },
    "kimi_pretrain.run": {
        *BASE, "kimi_pretrain.checkpoint", "kimi_pretrain.dep", "kimi_pretrain.engine.mesh",
        "kimi_pretrain.model", "kimi_pretrain.optim", "kimi_pretrain.reliability",
        "kimi_pretrain.siglip.step",
        "kimi_pretrain.step", "kimi_pretrain.update", "kimi_pretrain.tools.validation",
        "kimi_pretrain.weights", "data_pipeline",
    },
    "kimi_pretrain.tools": {
        *BASE, "kimi_pretrain.checkpoint", "kimi_pretrain.dep", "kimi_pretrain.engine",
        "kimi_pretrain.memory", "kimi_pretrain.memory.plan", "kimi_pretrain.memory.search",
        "kimi_pretrain.memory.states", "kimi_pretrain.model",
        "kimi_pretrain.optim", "kimi_pretrain.parallel", "kimi_pretrain.reliability",
        "kimi_pretrain.run", "kimi_pretrain.telemetry.jsonl",
        "kimi_pretrain.tools.optimizer_division", "kimi_pretrain.tools.validation",
        "kimi_pretrain.update", "kimi_pretrain.weights.siglip_shapes",
        "data_pipeline", "moonvit3d",
    },
    "kimi_pretrain.train": {
        *BASE, "kimi_pretrain.attention.choice", "kimi_pretrain.checkpoint", "kimi_pretrain.dep",
        "kimi_pretrain.engine",
        "kimi_pretrain.reliability", "kimi_pretrain.run", "kimi_pretrain.step",
        "kimi_pretrain.telemetry", "kimi_pretrain.tools.state_hashes", "data_pipeline",
    },
    "kimi_pretrain.verify": {
        *BASE, "kimi_pretrain.checkpoint", "kimi_pretrain.dep", "kimi_pretrain.engine",
        "kimi_pretrain.parallel", "kimi_pretrain.reliability", "kimi_pretrain.run",
        "kimi_pretrain.step", "kimi_pretrain.train", "kimi_pretrain.update",
        "kimi_pretrain.weights", "data_pipeline", "moonvit3d",
    },
    "launch.pages": {"data_pipeline", "moonvit3d.geometry"},
    "launch.web": {
        "data_pipeline", "launch.local", "launch.pages", "moonvit3d.geometry", "moonvit3d.media",
    },
    "launch.local": {"kimi_pretrain", "data_pipeline", "typed_config"},
    "launch.slurm": {"kimi_pretrain.config", "launch.local", "typed_config"},
    "launch.chain": {"kimi_pretrain", "launch.local", "launch.slurm", "typed_config"},
    "launch.verify": {"kimi_pretrain", "data_pipeline", "launch.local"},
    "launch.demo": {
        "kimi_pretrain", "data_pipeline", "moonvit3d", "launch.chain", "launch.local",
        "launch.verify",
    },
    "launch.cli": {
        "kimi_pretrain", "data_pipeline", "moonvit3d", "typed_config", "launch.chain",
        "launch.demo", "launch.local", "launch.pages", "launch.slurm", "launch.verify",
        "launch.web",
    },
}  # fmt: skip

# Packages that only the listed rooms (or files) may import, to contain their quirks.
WALLS: dict[str, set[str]] = {
    "megatron": {"kimi_pretrain.engine"},
    "av": {"moonvit3d.media", "launch.demo"},
    "PIL": {
        "moonvit3d.media", "moonvit3d.preprocess", "data_pipeline.augment.pixels",
        "launch.demo", "launch.pages.pictures",
    },
    # Training does not use the catalogue: a start queries it once, before the ranks exist.
    "data_pipeline.catalog": {
        "data_pipeline.catalog", "launch.cli.data_catalog", "launch.cli.data_collect",
        "launch.cli.data_facts", "launch.cli.data_govern", "launch.cli.data_serve",
        "launch.local.versions", "launch.web.records",
    },
    "duckdb": {"data_pipeline.inspect.query"},
    "sqlalchemy": {"data_pipeline.catalog"},
    "alembic": {"data_pipeline.catalog"},
    "starlette": {"launch.web"},
    "jinja2": {"launch.web"},
    "uvicorn": {"launch.web.connections"},
    "boto3": {"data_pipeline.store.open"},
    "botocore": {"data_pipeline.store.open"},
    # Only these modules read sample bytes, because they compare them with the index. `data verify`
    # makes its own comparison. `SampleStream` has its own reads; mismatching samples are read again
    # here.
    "data_pipeline.store.open.get_many": {
        "data_pipeline.index.reads", "data_pipeline.inspect.shard",
    },
    "deepspeed": {"kimi_pretrain.optim.deepspeed_zero"},
    "torch.distributed": {
        "kimi_pretrain.engine", "kimi_pretrain.dep", "kimi_pretrain.optim.muonclip",
        "kimi_pretrain.optim.replica_group", "kimi_pretrain.optim.reduce",
        "kimi_pretrain.optim.broadcast", "kimi_pretrain.optim.optimizer",
        "kimi_pretrain.optim.deepspeed_zero",
        "kimi_pretrain.checkpoint", "kimi_pretrain.tools.dry_run",
        "kimi_pretrain.parallel.rendezvous", "kimi_pretrain.siglip.pair_loss",
    },
}  # fmt: skip


FOLDERS = ("typed_config", "moonvit3d", "data_pipeline", "kimi_pretrain", "launch")


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    inside = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    return max(inside, key=len, default=None)


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """Return the nodes for imports, definitions and names; cached, so each text is parsed once."""
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    kinds = ast.Import | ast.ImportFrom | defined | ast.Name | ast.Constant
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


@cache
def imports_of(text: str) -> list[tuple[int, str]]:
    """Return (line, module) of every absolute import, including imports inside functions."""
    found = []
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def wrong_ways(module: str, text: str) -> list[str]:
    home, bad = room_of(module), []
    for line, target in imports_of(text):
        if home and target.split(".")[0] in FOLDERS and target != "kimi_pretrain.__version__":
            room = room_of(target)
            if room != home and not within(target, ROOMS[home]):
                bad.append(f"{module}:{line} {home} imports {target}")
        for package, allowed in WALLS.items():
            if within(target, {package}) and not within(module, allowed):
                bad.append(f"{module}:{line} imports {package}")
    return bad


def test_imports_point_one_way():
    bad = [line for path in sources() for line in wrong_ways(module_of(path), path.read_text())]
    assert not bad, "\n".join(bad)


LOOSE = {"__init__", "train", "run", "step", "update", "model", "config"}


def test_every_module_has_its_room():
    loose = {path.stem for path in (ROOT / "kimi_pretrain").glob("*.py")}
    assert loose == LOOSE
    assert [path.name for path in (ROOT / "launch").glob("*.py")] == ["__init__.py"]
    homeless = [module_of(path) for path in sources() if room_of(module_of(path)) is None]
    assert homeless == ["kimi_pretrain", "launch"]


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other in a cycle."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        seen, ahead = set[str](), [start]
        while ahead:
            for target in arrows.get(ahead.pop(), set()) - seen:
                seen.add(target)
                ahead.append(target)
        reached[start] = seen
    found = {
        frozenset(other for other in reached[one] if one in reached[other])
        for one in arrows
        if one in reached[one]
    }
    return [set(group) for group in found]


def arrows_between(paths: list[Path]) -> dict[str, set[str]]:
    """Map each module to all modules it imports, including lazy and type-only imports."""
    names = {module_of(path) for path in paths}
    found: dict[str, set[str]] = {}
    for path in paths:
        targets = {target for _, target in imports_of(path.read_text())}
        inside = {t if t in names else t.rpartition(".")[0] for t in targets}
        found[module_of(path)] = (inside & names) - {module_of(path)}
    return found


def test_no_imports_in_a_circle():
    tests = list((ROOT / "tests").rglob("*.py"))
    arrows = arrows_between([*sources(), *(ROOT / "benchmarks").rglob("*.py"), *tests])
    assert circles(arrows) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_no_rooms_in_a_circle():
    between: dict[str, set[str]] = {}
    for module, targets in arrows_between(sources()).items():
        rooms = {room for room in map(room_of, targets) if room is not None}
        if home := room_of(module):
            between.setdefault(home, set()).update(rooms - {home})
    assert circles(between) == []


# The rooms of the data pipeline in import order: a room may import only rooms before it.
DATA_ROOMS = (
    "names", "keyed", "store", "cache", "index", "text", "augment", "config", "decode", "plan",
    "collate", "fetch", "access", "workers", "loader", "ingest", "inspect", "govern", "catalog",
    "sync",
    "stream",
)  # fmt: skip


def test_the_rooms_of_the_data_pipeline_point_one_way():
    bad, seen = [], set()
    for path in sources():
        home = module_of(path).split(".")
        if home[0] != "data_pipeline" or len(home) == 1:
            continue
        seen.add(home[1])
        for line, target in imports_of(path.read_text()):
            parts = target.split(".")
            known = parts[0] == "data_pipeline" and parts[1] in DATA_ROOMS
            if known and DATA_ROOMS.index(parts[1]) > DATA_ROOMS.index(home[1]):
                bad.append(f"{'.'.join(home)}:{line} imports {target}")
    assert not bad, "\n".join(bad)
    assert seen == set(DATA_ROOMS)


def test_every_import_of_ours_finds_its_name():
    """Covers code that no test runs, such as benchmarks and imports inside functions."""
    paths = [*sources(), *(p for d in ("benchmarks", "tests") for p in (ROOT / d).rglob("*.py"))]
    trees = {module_of(path): nodes_of(path.read_text()) for path in paths}
    names = {module: names_in(nodes) for module, nodes in trees.items()}
    ours = {module.split(".")[0] for module in names}
    bad = [
        f"{module}:{node.lineno} {node.module}.{alias.name}"
        for module, nodes in trees.items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ours
        for alias in node.names
        if f"{node.module}.{alias.name}" not in names
        and alias.name not in names.get(str(node.module), set())
    ]
    assert not bad, "\n".join(bad)


def names_in(nodes: list[ast.AST]) -> set[str]:
    """Return the names a module defines, imports, or lists in `__all__` for `__getattr__`."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # an entry of `__all__`, or of a table of lazy imports
    return found


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("moonvit3d.model", "import data_pipeline.plan.planner"),
        ("data_pipeline.plan.planner", "from kimi_pretrain.config import Config"),
        ("kimi_pretrain.step", "import megatron.core"),
        ("kimi_pretrain.step", "import torch.distributed as dist"),
        ("data_pipeline.loader", "def f():\n    import boto3"),
        ("data_pipeline.decode", "from av.error import FFmpegError"),
        ("kimi_pretrain.train", "def f():\n    from data_pipeline.catalog.engine import Catalog"),
        ("data_pipeline.loader", "import sqlalchemy"),
        ("data_pipeline.inspect.facts", "import duckdb"),
        ("launch.pages.html", "from starlette.responses import Response"),
        ("launch.web.app", "from data_pipeline.catalog.engine import Catalog"),
        ("moonvit3d.media", "from moonvit3d.model import normalise"),
        ("kimi_pretrain.tools.evaluate", "from data_pipeline.store.open import get_many"),
        ("kimi_pretrain.dep.assign", "from kimi_pretrain.engine.mesh import Mesh"),
    ],
)
def test_a_wrong_import_is_seen(module, text):
    assert wrong_ways(module, text)


NO_TORCH = (
    "typed_config",
    "data_pipeline",
    "moonvit3d.geometry",
    "moonvit3d.media",
    "moonvit3d.preprocess",
)


def test_planning_needs_no_torch():
    bad = [
        f"{module_of(path)}:{line}"
        for path in sources()
        if module_of(path).startswith(NO_TORCH)
        for line, target in imports_of(path.read_text())
        if target.split(".")[0] == "torch"
    ]
    assert not bad, bad


DOCUMENTS = [
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if path.exists()
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(document):
    named = set(re.findall(r"`([\w./-]+\.(?:py|md|yaml|toml|txt))`", document.read_text()))
    outputs = {"config.yaml", "diff.patch"}  # written into a run folder, not part of the project
    missing = [
        name for name in sorted(named - outputs)
        if not (ROOT / name).exists() and not (document.parent / name).exists()
    ]  # fmt: skip
    assert not missing, f"{document.name} names files that do not exist: {missing}"


def test_no_placeholder_is_left_in_the_readme():
    assert not re.findall(r"\b(?:DEMO|TEST)_[A-Z]+", (ROOT / "README.md").read_text())


def test_configs_say_how_they_are_run():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        head = path.read_text().split("\nmodel:")[0]
        for word in ("command:", "hardware:", "expected:"):
            assert word in head, f"{path.name}: the opening comment lacks {word!r}"


def test_files_named_in_code_exist():
    """`stack_inspection` lists our files that do file I/O by their paths."""
    assert [name for name in FILING if not (ROOT / name).exists()] == []
