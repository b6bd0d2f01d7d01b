"""A real SLURM of several nodes on one machine, on the loopback address, without systemd.

    python -m tests.slurm.lab up --folder /tmp/lab --nodes 2    # prints export SLURM_CONF=...
    python -m tests.slurm.lab down --folder /tmp/lab

The lab runs real munged, slurmctld and one slurmd per node (Debian: slurm-wlm, munge), with their
own key, socket, ports and state in the folder. It writes nothing outside the folder. The node names
n1, n2, ... need not resolve, because the configuration gives every node an address. Processes are
ended by process id, after a check of their start time, so that a reused id is never signalled.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# Only root can start the daemons, because they take their keys and credentials from root.
ROOT = 0
NODE = "LAB_NODE"  # environment variable of a slurmd, inherited by its processes
STARTED_SECONDS = 60.0
STOPPED_SECONDS = 20.0


def obstacle() -> str | None:
    """Return why this machine cannot run a lab; None if it can."""
    if missing := [name for name in PROGRAMS if program(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != ROOT:
        return "SLURM's daemons have to be started by root"
    return None


def program(name: str) -> str | None:
    """Return the path of a program; daemons may be outside a user's PATH."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    """Return ports that nothing on this machine uses.

    The ports are bound later. They are below the range for outgoing connections (from 32768) and
    the S3 servers' range (from 12000), so that other programs rarely take them first.
    """
    found = list[int]()
    for port in random.SystemRandom().sample(range(10_100, 11_900), 1800):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports found on 127.0.0.1")


def configuration(folder: Path, ports: list[int], cpus: int, kill_wait: int) -> str:
    """Return slurm.conf; ports[0] is the controller's, the others are the nodes'.

    The timeouts are short where SLURM's defaults would delay a test: a requeued job starts after
    about `cred_expire` seconds (two minutes by default), a dead node is detected after
    SlurmdTimeout. Partition `high` preempts `low`, whose jobs get their requested signal
    (--signal), then GraceTime, and then return to the queue.
    """
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname=n{i} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
        f"RealMemory=4096 State=UNKNOWN"
        for i, port in enumerate(ports[1:], start=1)
    )
    everywhere = f"Nodes=n[1-{len(ports) - 1}] MaxTime=INFINITE State=UP"
    return f"""\
ClusterName=lab
SlurmctldHost={socket.gethostname().split(".")[0]}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
TreeWidth=65533
KillWait={kill_wait}
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmctldTimeout=30
SlurmdTimeout=10
{nodes}
PartitionName=low {everywhere} Default=YES PriorityTier=1 GraceTime=120
PartitionName=high {everywhere} PriorityTier=2 PreemptMode=off
"""


class Lab:
    """The daemons of one lab, started by any process; `folder` holds all their state."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.conf = self.folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self.env["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

    def up(self, nodes: int = 2, cpus: int = 8, kill_wait: int = 30) -> None:
        """Start everything and wait until all nodes are idle.

        Raises:
            RuntimeError: the lab cannot start here, runs already, or did not come up in time.
        """
        if reason := obstacle():
            raise RuntimeError(f"no SLURM lab: {reason}")
        if self._pids():
            raise RuntimeError(f"{self.folder}: a lab runs here already; take it down first")
        for name in ("state", "log", "munge", *(f"spool/n{i}" for i in range(1, nodes + 1))):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge" / "key"
        if not key.exists():
            key.touch(mode=0o400)
            key.write_bytes(os.urandom(128))
        # Nodes have a fixed order, so that a restarted lab keeps the nodes of its jobs.
        self.conf.write_text(configuration(self.folder, free_ports(nodes + 1), cpus, kill_wait))
        self._start_munge(key)
        self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
        for number in range(1, nodes + 1):
            self.start_node(f"n{number}")
        self.wait(lambda: self.node_states() == ["idle"] * nodes, "all nodes are idle")

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str, everything: bool = True) -> None:
        """Kill a node's slurmd and all its descendants, like a power failure."""
        victim = self._process(name)
        if victim is None:
            raise RuntimeError(f"{name} does not run")
        family = _with_children(self._steps(name)) if everything else []
        for process in (victim, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([victim], timeout=STOPPED_SECONDS)

    def down(self) -> None:
        """End all jobs and daemons of this lab, and nothing else."""
        if self._process("slurmctld") is not None:
            self.run("scancel", "--user=root", check=False)
            self._until(lambda: not self.run("squeue", "-h", check=False).strip(), 15.0)
        processes = [self._process(name) for name in reversed(self._pids())]
        _end([process for process in processes if process is not None])
        _end(_with_children(self._steps()))
        (self.folder / "pids.json").unlink(missing_ok=True)

    def run(self, *command: str, check: bool = True, timeout: float = 100.0) -> str:
        """Run a SLURM command on this lab; return its standard output."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def node_states(self) -> list[str]:
        """Return the state of every node, in the order of their names."""
        return self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T", check=False).split()

    def wait(self, found: Callable[[], bool], what: str, seconds: float = STARTED_SECONDS) -> None:
        """Wait until `found()` is true.

        Raises:
            RuntimeError: it is not true in time; shows the ends of the daemons' logs.
        """
        if not self._until(found, seconds):
            logs = sorted((self.folder / "log").iterdir())
            ends = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
            raise RuntimeError(f"not after {seconds:.0f} s: {what}\n{self.node_states()}\n{ends}")

    def _start_munge(self, key: Path) -> None:
        munge = self.folder / "munge"
        self._start(
            "munged", "munged", "-F", "--force", f"--key-file={key}", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            "--num-threads=2",
        )  # fmt: skip
        ask = ("munge", "-S", f"{munge}/socket", "-n")
        self.wait(lambda: bool(self.run(*ask, check=False).strip()), "munged answers")

    def _start(self, name: str, daemon: str, *arguments: str) -> None:
        path = program(daemon)
        assert path is not None
        with (self.folder / "log" / f"{name}.out").open("a") as out:
            process = subprocess.Popen(
                [path, *arguments], env=self.env | {NODE: name}, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        pids = self._pids() | {name: (process.pid, psutil.Process(process.pid).create_time())}
        (self.folder / "pids.json").write_text(json.dumps(pids))

    def _pids(self) -> dict[str, tuple[int, float]]:
        file = self.folder / "pids.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    def _process(self, name: str) -> psutil.Process | None:
        """Return a running daemon, or None."""
        pid, began = self._pids().get(name, (0, 0.0))
        try:
            process = psutil.Process(pid) if pid else None
        except psutil.NoSuchProcess:
            return None
        if process is None or process.create_time() != began:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        return None

    def _steps(self, node: str | None = None) -> list[psutil.Process]:
        """Return the slurmstepds of a node, or of all nodes; they outlive their slurmd."""
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                if process.info["name"] != "slurmstepd":
                    continue
                # The process title overwrites the start of the environment, so parse the raw bytes.
                env = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                ours = [f"SLURM_CONF={self.conf}", *([f"{NODE}={node}"] if node else [])]
                if all(word.encode() in env for word in ours):
                    found.append(process)
            except (psutil.NoSuchProcess, OSError):
                continue
        return found

    @staticmethod
    def _until(found: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not found():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def _with_children(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def _end(processes: list[psutil.Process]) -> None:
    """Terminate processes, and kill those that remain after a while."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOPPED_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOPPED_SECONDS)


def main() -> int:
    """Bring a lab up or down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()
    lab = Lab(arguments.folder)
    if arguments.what == "down":
        lab.down()
        return 0
    start = time.monotonic()
    try:
        lab.up(arguments.nodes)
    except RuntimeError as error:
        lab.down()
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"# {arguments.nodes} nodes idle after {time.monotonic() - start:.1f} s", file=sys.stderr)
    print(f"export SLURM_CONF={lab.conf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
