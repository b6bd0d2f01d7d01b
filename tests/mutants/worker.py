"""A pytest plugin that plants faults one after the other, each in a fork of the collected session.

`python -m tests.mutants` starts it in a copy of the tree, with a job in a file. The tests are
collected once. Each test file first runs traced and without a fault. A fault then runs only the
tests that reach its line, quickest first, up to the first failure.
"""

import hashlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mutants import plant

JOB = "KIMI_PRETRAIN_MUTANTS_JOB"
_SITE = "from tests.mutants import plant\nplant.begin()\n"
_MORE_MEMORY, _LARGEST_FILE = 8 << 30, 1 << 30


@dataclass
class _TestFile:
    """Items of one test file and their results without a fault.

    Attributes:
        reached: item (its number, or "*" for all) -> lines, as (file, line).
    """

    items: list[pytest.Item]
    reached: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)

    def meeting(self, file: str, lines: range) -> list[int]:
        """Return the numbers of the items that reach one of the lines."""
        some = {(file, line) for line in lines}
        if some & self.reached.get("*", set()):
            return list(range(len(self.items)))
        return [n for n in range(len(self.items)) if some & self.reached.get(str(n), set())]


def stamp(root: Path, files: Sequence[str]) -> str:
    """Return a hash of some files of a tree."""
    found = hashlib.sha256()
    for file in sorted({*files}):
        found.update(hashlib.sha256((root / file).read_bytes()).digest())
    return found.hexdigest()[:16]


class _Ended(Exception):
    """A fork was killed or timed out; the message says which."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop hypothesis at the first failing example, because nobody reads the shrunk one."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutants", settings.default, phases=(Phase.explicit, Phase.generate), database=None
    )
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the job instead of the tests."""
    job = json.loads(Path(os.environ[JOB]).read_text())
    _Worker(session, job).run()
    return True


class _Worker:
    def __init__(self, session: pytest.Session, job: dict[str, Any]):
        self.session, self.job = session, job
        self.root, self.folder = Path(job["root"]), Path(job["folder"])
        self.folder.chmod(0o711)
        self.files, self._clock = dict[str, _TestFile](), 0
        for item in session.items:
            name = str(item.path.relative_to(self.root))
            self.files.setdefault(name, _TestFile([])).items.append(item)
        (self.root / "sitecustomize.py").write_text(_SITE)
        os.environ["PYTHONPATH"] = os.pathsep.join(job["path"])

    def run(self) -> None:
        if self.job["forks"]:
            from tests import fork_server

            os.environ[plant.INDEX] = "1"
            fork_server.python()
        plant.index(self.root)
        for name in list(self.files):
            self._without_fault(name)
        for number, fault in enumerate(self.job["faults"], 1):
            began = time.monotonic()
            outcome, killer, tried = self._with(fault)
            seconds = round(time.monotonic() - began, 2)
            tests = [killer.partition("::")[0]] if killer else fault["tests"]
            line = {
                "key": fault["key"], "outcome": outcome, "killer": killer, "tried": tried,
                "seconds": seconds, "stamp": stamp(self.root, [fault["file"], *tests]),
            }  # fmt: skip
            with open(self.job["results"], "a") as file:
                file.write(json.dumps(line) + "\n")
            of_all = f"{number}/{len(self.job['faults'])}"
            _say(f"  {of_all:>9} {seconds:6.1f}s {outcome:9} {fault['key']}")

    def _without_fault(self, name: str) -> None:
        """Run a test file without a fault and store the lines it reaches; skip unchanged files.

        Raises:
            pytest.UsageError: a test fails without a fault.
        """
        file, trace = self.files[name], self.folder / "trace"
        lines = self.folder / "lines.json"
        lines.write_text(json.dumps({str(self.root / f): n for f, n in self.job["lines"].items()}))
        which = hashlib.sha256(json.dumps(self.job["lines"]).encode()).hexdigest()[:16]
        rest_on = stamp(self.root, [name, *self.job["lines"]])
        kept = Path(self.job["kept"]) / f"{rest_on}-{which}"
        if not kept.exists():
            trace.write_text("")
            environment = {plant.TRACE: os.pathsep.join([str(trace), str(lines)])}
            failed, took = self._fork(file.items, environment, 600.0, traced=True)
            if failed is not None:
                _say((self.folder / "output").read_text(errors="replace")[-6000:])
                raise pytest.UsageError(f"{failed} fails without a fault: mend it first")
            reached = trace.read_text().replace(f"{self.root}/", "").splitlines()
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({"took": took, "lines": reached}))
        found = json.loads(kept.read_text())
        file.took = found["took"]
        for line in found["lines"]:
            tag, path, number = line.split("\t")
            file.reached.setdefault(tag, set()).add((path, int(number)))
        number = len(set().union(*file.reached.values()))
        _say(f"  {sum(file.took):6.1f}s {len(file.items):4} tests reach {number:5} lines: {name}")

    def _with(self, fault: dict[str, Any]) -> tuple[str, str | None, int]:
        """Return the outcome of a fault, the test that noticed it, and the number of tests run."""
        path, lines = self.root / fault["file"], range(fault["lines"][0], fault["lines"][1] + 1)
        chosen = list[tuple[float, list[pytest.Item]]]()
        for name, file in self.files.items():
            numbers = file.meeting(fault["file"], lines)
            if numbers and name in fault["tests"]:
                seconds = sum(file.took[n] for n in numbers)
                chosen.append((seconds, [file.items[n] for n in numbers]))
        if not chosen:
            return "unreached", None, 0
        chosen.sort(key=lambda one: one[0])
        before, copy = path.read_bytes(), self.folder / "before.py"
        after = before[: fault["span"][0]] + fault["span"][2].encode() + before[fault["span"][1] :]
        if not plant.fits(before, after):
            return "unfit", None, 0
        times = path.stat()
        copy.write_bytes(before)
        path.write_bytes(after)
        # Python matches byte code by mtime in seconds and size, so each version gets a new mtime.
        self._clock = max(self._clock, int(times.st_mtime)) + 2
        os.utime(path, (self._clock, self._clock))
        environment = {plant.FAULT: os.pathsep.join([str(path), str(copy)])}
        tried = 0
        try:
            for seconds, items in chosen:
                tried += len(items)
                limit = self.job["least_limit"] + 5 * seconds
                try:
                    failed, _ = self._fork(items, environment, limit)
                except _Ended as end:
                    return str(end), items[0].nodeid.partition("::")[0], tried
                if failed is not None:
                    return "killed", failed, tried
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return "survived", None, tried

    def _fork(
        self,
        items: Sequence[pytest.Item],
        environment: dict[str, str],
        limit: float,
        traced: bool = False,
    ) -> tuple[str | None, list[float]]:
        """Run items in a fork; return the first that failed, and the seconds of each.

        Raises:
            _Ended: the fork timed out or died.
        """
        reader, writer = os.pipe()
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            os.chmod(own, 0o711)  # tests start servers of other users, whose folders lie in here
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                self._be_a_fork(items, environment, writer, Path(own), traced)
            os.close(writer)
            try:
                text = _read(reader, limit)
            finally:
                os.close(reader)
                _end(pid)
        if text is None:
            raise _Ended("time-out")
        lines = text.splitlines()
        if not lines or not lines[-1].startswith("end"):
            raise _Ended("died")
        took = [float(line.split()[1]) for line in lines if line.startswith("took ")]
        failed = lines[-1].partition(" ")[2]
        return failed or None, took

    def _be_a_fork(
        self,
        items: Sequence[pytest.Item],
        environment: dict[str, str],
        writer: int,
        own: Path,
        traced: bool,
    ) -> None:
        os.setsid()
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _limit_memory()
        os.environ.update(environment)
        os.environ["TMPDIR"] = str(own)
        tempfile.tempdir = None
        factory: Any = self.session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = own
        notes = _Notes()
        self.session.config.pluginmanager.register(notes)
        failed = ""
        try:
            if plant.FAULT in environment:
                plant.begin()
            if traced:
                notes.tracer = plant.Tracer(*environment[plant.TRACE].split(os.pathsep))
                notes.tracer.start()
            for number, item in enumerate(items):
                following = items[number + 1] if number + 1 < len(items) else None
                began = time.monotonic()
                notes.number = str(number)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                os.write(writer, f"took {time.monotonic() - began}\n".encode())
                if notes.failed:
                    failed = item.nodeid
                    if following is not None:
                        self.session._setupstate.teardown_exact(None)
                    break
        except BaseException as error:
            failed = failed or f"{items[0].nodeid} ({type(error).__name__})"
        os.write(writer, f"end {failed}".encode())
        os._exit(0)


class _Notes:
    """Records results of the items in a fork."""

    def __init__(self) -> None:
        self.failed, self.number = False, "*"
        self.tracer: plant.Tracer | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        if self.tracer is not None:
            self.tracer.tag = self.number
        try:
            return (yield)
        finally:
            if self.tracer is not None:
                self.tracer.tag = "*"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = True
            print(report.longreprtext)


def _limit_memory() -> None:
    """Limit memory and file sizes, so that a fault cannot fill the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_MEMORY, used + _MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(descriptor: int, limit: float) -> str | None:
    """Return all written text, or None if the end marker does not arrive in time."""
    end, parts = time.monotonic() + limit, list[bytes]()
    while (left := end - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            part = os.read(descriptor, 1 << 16)
            parts.append(part)
            if not part or b"end" in b"".join(parts[-2:]):
                return b"".join(parts).decode()
    return None


def _end(pid: int) -> None:
    """Kill a fork, if it still runs, and its remaining children."""
    try:
        left = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        left = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _say(line: str) -> None:
    print(line, file=sys.__stderr__, flush=True)
