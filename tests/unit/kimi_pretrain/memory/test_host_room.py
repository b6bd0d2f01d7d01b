"""Tests the free memory of a machine and its control groups, and offload that exceeds it."""

from pathlib import Path

import psutil
import pytest

from kimi_pretrain.config import GIB, ConfigError, load_config
from kimi_pretrain.memory import limits
from kimi_pretrain.memory.host_room import Room, host_room
from kimi_pretrain.memory.plan import host_bytes
from kimi_pretrain.reliability.preflight import check_host, check_start
from tests.dist.jobs import SMALL, layout

AVAILABLE = 64 * GIB
# Control group files -> free memory. The membership file names the group of this process.
GROUPS = {
    "no limit": ("0::/job\n", {"job/memory.max": "max", "job/memory.current": 5}, AVAILABLE),
    "version 2": (
        "0::/job/step\n",
        {"job/step/memory.max": 9 * GIB, "job/step/memory.current": 4 * GIB},
        5 * GIB,
    ),
    "a limit of the group above": (
        "0::/job/step\n",
        {"job/step/memory.max": "max", "job/memory.max": 8 * GIB, "job/memory.current": 2 * GIB},
        6 * GIB,
    ),
    "cached files give way": (
        "0::/job\n",
        {
            "job/memory.max": 9 * GIB,
            "job/memory.current": 8 * GIB,
            "job/memory.stat": f"inactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB}",
        },
        4 * GIB,
    ),
    "version 1, among others": (
        "5:devices:/other\n4:cpu,memory:/job\n0::/\n",
        {
            "memory/job/memory.limit_in_bytes": 9 * GIB,
            "memory/job/memory.usage_in_bytes": 3 * GIB,
            "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n"
            "total_active_file 9",
        },
        7 * GIB + 9,
    ),
    "version 1 without a limit": (
        "4:memory:/\n",
        {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 1},
        AVAILABLE,
    ),
    "a container with the host's path": (
        "0::/docker/abc\n",
        {"memory.max": 3 * GIB, "memory.current": GIB},
        2 * GIB,
    ),
    "over its limit already": ("0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=AVAILABLE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(folder: Path, membership: str, files: dict) -> tuple[Path, Path]:
    (folder / "membership").write_text(membership)
    for name, value in files.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        if not (stat := file.parent / "memory.stat").exists():
            stat.write_text("anon 1\n")
    return folder / "groups", folder / "membership"


@pytest.mark.parametrize("name", GROUPS)
def test_the_least_that_is_left_counts(name, tmp_path):
    membership, files, left = GROUPS[name]
    found = host_room(*write(tmp_path, membership, files))
    assert found.size == left
    assert ("this machine" in found.bound) == (left == AVAILABLE)


def test_without_control_groups_the_machine_counts(tmp_path):
    assert host_room(tmp_path / "groups", tmp_path / "membership").size == AVAILABLE


PIPELINE = (*layout(pp=2, vpp=2, dp=2), "data.root=/nowhere")
OFFLOAD = ("train.offload=true", "train.offload_min_mib=0", "train.recompute=[]")


def configured(*settings: str):
    return load_config("tiny_cpu", [*SMALL, *PIPELINE, *settings])


@pytest.fixture
def room(monkeypatch):
    """Return a function that sets how much memory is free on the host."""
    return lambda size: monkeypatch.setattr(limits, "host_room", lambda: Room(size, "a bound"))


def test_offload_without_room_is_refused_before_data_are_opened(room):
    config = configured(*OFFLOAD)
    first, last = host_bytes(config)
    assert first > last > 0
    room(2 * (first + last) - 1)
    with pytest.raises(ConfigError) as error:
        check_start(config, ranks_here=4)
    (line,) = str(error.value).splitlines()
    for part in ("train.offload=true", "ranks 0 to 3", "a bound", "train.offload=false",
                 "with train.recompute=[norms,swiglu,mla_up] they fit"):  # fmt: skip
        assert part in line
    assert f"{2 * (first + last) / GIB:.1f} GiB of activations" in line
    room(2 * first - 1)
    with pytest.raises(ConfigError, match="ranks 0 to 1 of"):  # two machines of two: the first
        check_start(config, ranks_here=2)
    with pytest.raises(ConfigError, match="ranks 0 to 1 of"):  # whichever is given first
        limits.check_host_memory(config, [range(2, 4), range(2)])


@pytest.mark.parametrize(
    ("settings", "free", "here"),
    [
        (OFFLOAD, "all", 4),  # it fits
        (OFFLOAD, "nothing", None),  # the ranks run on another machine
        ((), "nothing", 4),  # nothing is moved
    ],
)
def test_else_the_data_are_what_is_looked_at_next(settings, free, here, room):
    config = configured(*settings)
    room(2 * sum(host_bytes(config)) if free == "all" else 0)
    with pytest.raises(Exception, match="/nowhere"):
        check_start(config, ranks_here=here)


@pytest.mark.parametrize(("rank", "refused"), [(0, True), (1, False), (2, False)])
def test_ranks_that_others_started_look_at_their_own_machine(rank, refused, room, monkeypatch):
    """Two machines have two ranks each, and only the ranks of the second stage fit."""
    config = configured(*OFFLOAD)
    room(2 * host_bytes(config)[1])
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if refused:
        with pytest.raises(ConfigError, match="ranks 0 to 1 of one machine"):
            check_host(config)
    else:
        check_host(config)
