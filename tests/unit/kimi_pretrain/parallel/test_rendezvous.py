"""Tests where ranks meet: the address that a store listens at, and a new store for each start."""

import os
from datetime import timedelta

import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from kimi_pretrain.parallel.rendezvous import FOLDER, meeting_store

SOON = timedelta(seconds=10)
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FOLDER)
OTHERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets variables; the relevant ones are unset before and after."""
    for name in (*NAMES, *OTHERS):
        monkeypatch.setenv(name, "")  # makes monkeypatch undo what the code sets
        monkeypatch.delenv(name)

    def put(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


def listens_at(port: int) -> set[str]:
    return {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }


@pytest.mark.parametrize(
    ("machines", "address", "expected"),
    [
        (1, "127.0.0.2", {"127.0.0.2"}),
        (2, "127.0.0.2", {"::", "0.0.0.0"}),  # either one: IPv6 may be off
    ],
    ids=["at this address alone", "others cannot find a loopback"],
)
def test_rank_0_listens_where_the_others_are_told(environment, machines, address, expected):
    environment(RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2 // machines)
    environment(MASTER_ADDR=address, MASTER_PORT=0)
    store = meeting_store(1, SOON)
    assert isinstance(store, TCPStore)
    assert listens_at(store.port)
    assert listens_at(store.port) <= expected
    other = TCPStore(address, store.port, timeout=SOON)
    store.set("a", "b")
    assert other.get("a") == b"b"


def test_the_store_of_torchrun_s_agent_is_left_to_torch(environment):
    environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    environment(TORCHELASTIC_USE_AGENT_STORE=True)
    assert meeting_store(2, SOON) is None


def test_each_start_of_one_machine_has_a_store_of_its_own(environment, tmp_path):
    environment(**{FOLDER: tmp_path}, GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth0")
    ranks = [meeting_store(2, SOON) for _ in range(2)]
    ranks[0].set("address of rank 1", "gone")
    assert ranks[1].get("address of rank 1") == b"gone"
    environment(TORCHELASTIC_RESTART_COUNT=1)
    assert not meeting_store(2, SOON).check(["address of rank 1"])
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth0")


def test_one_process_meets_nobody(environment):
    assert isinstance(meeting_store(1, SOON), HashStore)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
