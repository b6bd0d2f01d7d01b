"""The supervisor with small stand-ins for torchrun: output, errors, and nothing left running."""

import os
import sys
import time

import psutil
import pytest

from launch import supervise


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_passes_the_exit_code_and_the_output_on(tmp_path, capfd):
    code = "import sys; print('out'); print('noted', file=sys.stderr); sys.exit(7)"
    assert supervise.run(python(code), os.environ, tmp_path) == (7, None)
    assert capfd.readouterr().out == "out\n"
    assert (tmp_path / "logs" / "torchrun.log").read_text() == "noted\n"


def test_shows_the_first_error_and_hides_what_follows(tmp_path, capsys):
    code = """
import pathlib, sys, time
logs = pathlib.Path(sys.argv[1]) / "logs"
print("a warning", file=sys.stderr, flush=True)
time.sleep(0.3)
(logs / "error_rank_2.txt").write_text("no bucket\\n")
time.sleep(0.05)
(logs / "error_rank_0.txt").write_text("lost rank 2\\n")
print("Traceback of torchrun", file=sys.stderr, flush=True)
sys.exit(1)
"""
    stale = tmp_path / "logs" / "error_rank_1.txt"
    stale.parent.mkdir()
    stale.write_text("of an earlier run\n")
    result = supervise.run([*python(code), str(tmp_path)], os.environ, tmp_path)
    assert result == (1, "no bucket")
    assert capsys.readouterr().err == "a warning\n"
    assert "Traceback of torchrun" in (tmp_path / "logs" / "torchrun.log").read_text()


def test_a_worker_in_a_session_of_its_own_does_not_survive(tmp_path, monkeypatch):
    """As torchrun does it; and torchrun itself is killed by force, so it cannot clean up."""
    code = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"],
                         start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(120)
"""
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.3)
    pid_file = tmp_path / "pid"

    class Interrupted(BaseException):
        pass

    def interrupt(process):
        end = time.monotonic() + 20
        while not (pid_file.is_file() and pid_file.read_text()):
            assert time.monotonic() < end
            time.sleep(0.02)
        raise Interrupted

    real = supervise.subprocess.Popen

    class Popen(real):
        def wait(self, timeout=None):
            if timeout is None and self.poll() is None and not getattr(self, "hit", False):
                self.hit = True
                interrupt(self)
            return super().wait(timeout)

    monkeypatch.setattr(supervise.subprocess, "Popen", Popen)
    with pytest.raises(Interrupted):
        supervise.run([*python(code), str(pid_file)], os.environ, tmp_path)
    worker = int(pid_file.read_text())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie"
