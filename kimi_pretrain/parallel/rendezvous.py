"""Rendezvous of a job's ranks, closed to other users.

The content of torch's stores is unpickled (`broadcast_object_list`, torchrun's rendezvous), and a
TCPStore listens on every address of its machine. So anyone who can reach the port can run code as
this user.

- On one machine, the store is a file in a folder that only this user can open. The launcher creates
  it and passes it in the variable `FOLDER`. gloo and NCCL then listen only on loopback.
- A single process keeps its store in its own memory.
- On several machines, rank 0 holds a TCPStore that listens only at MASTER_ADDR. There is no
  password, so the network between the machines must be trusted.
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
_BACKLOG = 2048  # all ranks may connect at once; torch uses the same value


def meeting_store(world_size: int, timeout: timedelta) -> Store | None:
    """Return the store for this start of the job; None: torch uses its launcher's store."""
    folder = os.environ.get(FOLDER)
    alone = world_size == 1 and "MASTER_ADDR" not in os.environ
    if not (alone or folder):
        return _store_at_address(world_size, timeout)
    _listen_on_loopback()
    if alone or folder is None:
        return HashStore()
    # Each start has its own file; the previous file holds addresses of ranks that are gone.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = FileStore(str(Path(folder) / f"ranks_{start}"), world_size)
    store.set_timeout(timeout)
    return store


def own_store() -> Store:
    """Return a store for this process only, whatever job it is part of."""
    _listen_on_loopback()
    return HashStore()


def _listen_on_loopback() -> None:
    # By default, gloo would listen at the address that the machine's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)


def _store_at_address(world_size: int, timeout: timedelta) -> Store | None:
    """Return a store that listens only at MASTER_ADDR; None if torchrun's agent holds one."""
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
    """Return a socket listening at this address; None: torch listens on all addresses."""
    try:
        own = socket.gethostbyname(address)
        one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        if own.startswith("127.") and not one_machine:
            # A machine may resolve its own name to loopback, where other machines cannot reach it.
            raise OSError(f"{own} is the loopback")
        return socket.create_server((own, port), backlog=_BACKLOG)
    except OSError as error:  # for example, a container behind a port of its host
        log.info("rank 0 listens on all addresses, not on %s alone: %s", address, error)
        return None
