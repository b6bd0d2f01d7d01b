"""Runs torchrun and leaves nothing behind, whatever ends it.

torchrun puts every worker into a session of its own, so a signal to a process group does not reach
them: what is still there at the end is found as descendants and killed.
"""

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from launch.worker import error_file

# torchrun itself gives its workers 30 seconds to end.
GRACE_SECONDS = 40.0


def run(command: Sequence[str], env: Mapping[str, str], run_dir: Path) -> tuple[int, str | None]:
    """Run torchrun until it ends, passing its output on.

    Once a rank has left an error in the run folder, what else reaches stderr (torchrun's report,
    the other ranks losing their peer) goes to `logs/torchrun.log` only: the cause stays visible.

    Args:
        command: from `launch.torchrun.command`.
        env: the whole environment of the processes.
        run_dir: the run folder.

    Returns:
        Exit code, and the line of the rank that failed first if that was the user's to mend.

    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("error_rank_*.txt"):
        old.unlink()
    with (logs / "torchrun.log").open("w") as log:
        # A session of its own: Ctrl-C reaches only us, and we end it in order.
        process = subprocess.Popen(
            command, env=dict(env), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stderr is not None
        hush = threading.Event()
        relay = threading.Thread(target=_relay, args=(process.stderr, log, logs, hush), daemon=True)
        relay.start()
        try:
            code = process.wait()
        except BaseException:
            # Whoever interrupts us knows why: torchrun's traceback of it would only be noise.
            hush.set()
            raise
        finally:
            stop(process)
            relay.join(timeout=5)
    return code, first_error(logs)


def first_error(logs: Path) -> str | None:
    """Return the line of the rank that failed first, or None."""
    files = sorted(logs.glob(error_file(Path(), 0).name.replace("0", "*")))
    if not files:
        return None
    return min(files, key=lambda f: f.stat().st_mtime_ns).read_text().strip()


def stop(process: subprocess.Popen) -> None:
    """End a process and all its descendants: by request first, by force after a while."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family, timeout=5)


def _relay(lines: IO[str], log: IO[str], logs: Path, hush: threading.Event) -> None:
    for line in lines:
        log.write(line)
        log.flush()
        if not hush.is_set() and not any(logs.glob("error_rank_*.txt")):
            sys.stderr.write(line)
