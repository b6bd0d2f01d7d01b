"""The rendezvous of a job's ranks, closed to other users.

What torch's stores hold is unpickled (`broadcast_object_list`, torchrun's own rendezvous), and a
TCPStore listens on every address of its machine: who reaches the port can run code as this user.

- On one machine the store is a file in a folder that only this user can open. The launcher makes
  it and passes it in the variable `FOLDER`. gloo and NCCL then listen on loopback alone.
- A single process keeps its store in its own memory.
- On several machines rank 0 holds a TCPStore that listens at MASTER_ADDR and at no other address.
  There is no password: the network between the machines has to be trusted.
"""

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

log = logging.getLogger(__name__)

# Environment variable; `launch.local.job.MEETING` is the launcher's name for it.
FOLDER = "KIMI_PRETRAIN_MEETING"
_LOOPBACK = "lo"
_BACKLOG = 2048  # ranks may all come at once; as torch has it


def meeting_store(world_size: int, timeout: timedelta) -> Store | None:
    """Return the store of this start of the job; None: torch uses its own launcher's."""
    folder = os.environ.get(FOLDER)
    alone = world_size == 1 and "MASTER_ADDR" not in os.environ
    if not (alone or folder):
        return _store_at_address(world_size, timeout)
    _listen_on_loopback()
    if alone or folder is None:
        return HashStore()
    # Each start has its own: in the one before stand the addresses of ranks that are gone.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = FileStore(str(Path(folder) / f"ranks_{start}"), world_size)
    store.set_timeout(timeout)
    return store


def own_store() -> Store:
    """Return a store for this process alone, whatever job it is part of."""
    _listen_on_loopback()
    return HashStore()


def _listen_on_loopback() -> None:
    # gloo would listen at the address that the machine's name stands for.
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)


def _store_at_address(world_size: int, timeout: timedelta) -> Store | None:
    """Return a store that listens at MASTER_ADDR alone; None if torchrun's agent holds one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    first = os.environ["RANK"] == "0"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _listener(address, port) if first else None
    return TCPStore(
        address,
        port,
        world_size,
        first,
        timeout,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at this address; None for torch's own, on all addresses."""
    try:
        own = socket.gethostbyname(address)
        one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        if own.startswith("127.") and not one_machine:
            # A machine may know its own name so; the others will not find it there.
            raise OSError(f"{own} is the loopback")
        return socket.create_server((own, port), backlog=_BACKLOG)
    except OSError as error:  # such as a container behind a port of its host
        log.info("rank 0 listens on all addresses, not on %s alone: %s", address, error)
        return None
