"""Worker pools: order, limits, errors and ends of runs; tests/fault covers process failures."""

import gc
import os
import random
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

from data_pipeline.workers.workers import ExecutorClosed, JobError, RemoteTraceback, Workers
from tests.resume import fingerprint
from tests.worker_jobs import (
    Doubled,
    Sleepy,
    Unpicklable,
    a_lock,
    arrays_of,
    broken_setup,
    calls,
    environment,
    hang,
    memory_files,
    sleepy,
    throw,
    touch_later,
)

PLENTY = {"max_bytes": 1 << 40, "max_jobs": 8}


@pytest.fixture(scope="module")
def pair():
    with Workers(calls, 2, timeout_s=20) as workers:
        yield workers


@pytest.fixture(params=["thread", "processes"])
def crew(request, pair):
    with Workers(calls, 0, timeout_s=20) as thread:
        yield thread if request.param == "thread" else pair


def wait_until(condition, seconds=50.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "ahead"), [(0, 5), (1, 3), (2, 1), (2, 6), (4, 9)])
def test_results_are_the_same_whoever_does_the_jobs(number, ahead):
    durations = random.Random(3)
    jobs = [(Sleepy(i, durations.choice((0, 0, 0.01, 0.03))), 1) for i in range(30)]
    with Workers(sleepy, number, timeout_s=20) as workers:
        got = [fingerprint(r) for r in workers.run(jobs, max_bytes=100, max_jobs=ahead)]
    assert got == [fingerprint(arrays_of(i)) for i in range(30)]


def test_results_stay_as_they_are_while_others_arrive(pair):
    kept = list(pair.run(((partial(arrays_of, i), 1) for i in range(25)), **PLENTY))
    assert [fingerprint(r) for r in kept] == [fingerprint(arrays_of(i)) for i in range(25)]


def test_memory_goes_with_the_results(pair):
    gc.collect()
    before = memory_files()  # files left by other tests
    big = partial(np.zeros, 1 << 20)
    kept = list(pair.run([(big, 1)] * 30, **PLENTY))
    assert memory_files() >= 30
    del kept
    gc.collect()
    for _ in pair.run([(big, 1)] * 60, max_bytes=9, max_jobs=1):
        pass
    assert memory_files() < before + 12


class Probe:
    def __call__(self):
        return Probe()


def test_nothing_of_a_job_is_held_once_it_is_taken():
    release = threading.Event()
    seen = []

    def jobs():
        probe = Probe()
        seen.append(weakref.ref(probe))
        yield probe, 1
        del probe
        release.wait(20)

    with Workers(calls, 0) as workers:
        run = workers.run(jobs(), **PLENTY)
        result = next(run)
        seen.append(weakref.ref(result))
        del result
        wait_until(lambda: not any(ref() for ref in seen))
        release.set()


class Watched:
    """An iterator of jobs that counts how many were requested."""

    def __init__(self, sizes, job=os.getpid):
        self.asked = 0
        self._jobs = [(job, size) for size in sizes]

    def __iter__(self):
        return self

    def __next__(self):
        if self.asked == len(self._jobs):
            raise StopIteration
        self.asked += 1
        return self._jobs[self.asked - 1]


@pytest.mark.parametrize("max_jobs", [1, 3, 20])
def test_bytes_in_flight_stay_within_the_limit(crew, max_jobs):
    draw = random.Random(max_jobs)
    sizes = [draw.choice((0, 1, 10, 40, 60)) for _ in range(60)]
    jobs = Watched(sizes)
    run = crew.run(jobs, max_bytes=100, max_jobs=max_jobs)
    for taken in range(60):
        # Beyond the jobs in flight one may be requested to learn its size.
        asked = jobs.asked
        assert sum(sizes[taken : max(0, asked - 1)]) <= 100
        assert asked <= taken + max_jobs + 1
        next(run)
    assert next(run, None) is None


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "max_jobs", "asked"),
    [
        ([40] * 5, 100, 8, [3, 4, 5, 5]),  # two at a time, and one that waits for memory
        ([1, 99, 5, 6], 10, 9, [2, 3, 4]),  # a huge job runs alone
        ([0] * 6, 0, 2, [2, 3, 4, 5, 6]),  # as many as may be in flight
    ],
)
def test_the_limit_is_used_and_holds_back(sizes, max_bytes, max_jobs, asked):
    with Workers(calls, 0) as workers:
        jobs = Watched(sizes)
        run = workers.run(jobs, max_bytes=max_bytes, max_jobs=max_jobs)
        for expected in asked:
            wait_until(lambda: jobs.asked == expected)  # noqa: B023
            time.sleep(0.05)
            assert jobs.asked == expected
            next(run)
        assert len(list(run)) == len(sizes) - len(asked)


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize(
    ("kind", "type_", "message"),
    [
        ("value", ValueError, "no 7"),
        ("unpicklable", Unpicklable, "x is 7"),
        ("doubled", Doubled, "^no bread$"),
        ("stop", JobError, "StopIteration: 7"),
        ("exit", JobError, "SystemExit: 3"),
        ("base", JobError, "Ends: enough"),
    ],
)
def test_an_error_is_raised_in_its_place(crew, pair, kind, type_, message, ahead):
    jobs = [(partial(int, i), 1) for i in range(4)]
    jobs += [(partial(throw, kind), 1)] + [(partial(int, 9), 1)] * 9
    got = []
    process = crew is pair
    expected = JobError if process and kind in ("unpicklable", "doubled") else type_
    text = message if expected is type_ else f"^{type_.__name__}: {message.strip('^')}"
    with pytest.raises(expected, match=text) as caught:  # noqa: PT012
        for result in (run := crew.run(jobs, max_bytes=99, max_jobs=ahead)):
            got.append(result)
    assert got == [0, 1, 2, 3]
    assert next(run, "nothing") == "nothing"
    if process:
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "in throw" in str(caught.value.__cause__)


def test_after_an_error_no_job_is_begun(crew, tmp_path):
    jobs = [(partial(throw, "value"), 1)]
    jobs += [(partial(touch_later, tmp_path / str(i), 0.05), 1) for i in range(100)]
    with pytest.raises(ValueError, match="no 7"):
        next(crew.run(iter(jobs), max_bytes=10**9, max_jobs=200))
    counts = [-1]
    while len(list(tmp_path.iterdir())) > counts[-1]:  # started jobs finish
        counts.append(len(list(tmp_path.iterdir())))
        time.sleep(0.3)
    assert counts[-1] < 90


def test_an_earlier_job_is_waited_for_when_a_later_one_fails(crew, tmp_path):
    jobs = [(partial(touch_later, tmp_path / "a", 0.2), 1), (partial(throw, "value"), 1)]
    run = crew.run(jobs, **PLENTY)
    assert next(run) is None
    assert (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="no 7"):
        next(run)


def test_an_error_of_the_iterator_is_raised_in_its_place(crew):
    def jobs(estimate):
        yield partial(int, 3), 1
        yield partial(int, 4), estimate
        raise KeyError("the plan")

    run = crew.run(jobs(1), **PLENTY)
    assert [next(run), next(run)] == [3, 4]
    with pytest.raises(KeyError, match="the plan"):
        next(run)
    run = crew.run(jobs(-2), **PLENTY)
    assert next(run) == 3
    with pytest.raises(ValueError, match="job 1 is estimated at -2 bytes"):
        next(run)


def test_what_does_not_pickle_is_named(pair):
    lock = threading.Lock()
    run = pair.run([(partial(int, 3), 1), (lambda: lock, 1)], **PLENTY)
    assert next(run) == 3
    with pytest.raises(ValueError, match=r"job 1 \(<function .*lambda.* cannot be sent"):
        next(run)
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock'"):
        next(pair.run([(a_lock, 1)], **PLENTY))
    with pytest.raises(ValueError, match="setup cannot be sent to a worker process"):
        Workers(lambda: calls, 1)


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_setup_is_the_first_result(number):
    with Workers(broken_setup, number) as workers:
        for _ in range(2):  # the setup is tried again
            with pytest.raises(FileNotFoundError, match="no bucket 'b'"):
                next(workers.run([(3, 1)], **PLENTY))


def test_a_new_run_ends_the_former(crew):
    pids = set(crew.run([(os.getpid, 1)] * 20, **PLENTY))
    first = crew.run(((partial(int, i), 1) for i in range(10**9)), **PLENTY)
    assert [next(first), next(first)] == [0, 1]
    second = crew.run([(partial(int, 50 + i), 1) for i in range(20)], **PLENTY)
    assert next(first, "nothing") == "nothing"
    assert list(second) == list(range(50, 70))
    pids |= set(crew.run([(os.getpid, 1)] * 20, **PLENTY))
    assert len(pids) <= 2, "none was restarted"


def test_a_job_that_hangs_is_named_and_its_worker_replaced(tmp_path):
    with Workers(calls, 1, timeout_s=50) as workers:
        assert list(workers.run([(partial(int, 3), 1)], **PLENTY)) == [3]
        workers._timeout_s = 3.0  # set after the start, which may be slow on a loaded machine
        run = workers.run([(partial(hang, tmp_path), 1)] * 2, **PLENTY)
        with pytest.raises(TimeoutError, match=r"3 s for job 0 \(.*hang.* worker 0 is still at"):
            next(run)
        workers._timeout_s = 50.0
        assert list(workers.run([(partial(int, 4), 1)], **PLENTY)) == [4]
        assert len(list(tmp_path.iterdir())) == 1


def test_the_time_of_a_job_counts_from_its_beginning():
    def jobs():
        time.sleep(2.6)
        yield partial(time.sleep, 2.6), 1

    with Workers(calls, 0, timeout_s=5.0) as workers:
        assert list(workers.run(jobs(), **PLENTY)) == [None]


def test_an_iterator_that_hangs_is_named():
    release = threading.Event()

    def jobs():
        yield partial(int, 3), 1
        release.wait(20)

    with Workers(calls, 0, timeout_s=2.0) as workers:
        run = workers.run(jobs(), **PLENTY)
        assert next(run) == 3
        with pytest.raises(TimeoutError, match="for job 1: the iterator of jobs has not given it"):
            next(run)
        release.set()


def test_workers_have_one_thread_and_the_path_of_their_parent(pair, tmp_path, monkeypatch):
    found = next(pair.run([(environment, 1)], **PLENTY))
    assert found["OMP_NUM_THREADS"] == found["OPENBLAS_NUM_THREADS"] == "1"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_here.py").write_text("def setup():\n    return len\n")
    import only_here  # type: ignore

    with Workers(only_here.setup, 1) as workers:
        assert list(workers.run([("four", 1)], **PLENTY)) == [4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 1, "timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_wrong_numbers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Workers(calls, **arguments)


def test_wrong_limits_are_named(crew):
    with pytest.raises(ValueError, match="max_bytes is -1"):
        crew.run([], max_bytes=-1, max_jobs=1)
    with pytest.raises(ValueError, match="max_jobs is 0; give at least 0 and 1"):
        crew.run([], max_bytes=1, max_jobs=0)


@pytest.mark.parametrize("number", [0, 1])
def test_closed_workers_say_so(number):
    workers = Workers(calls, number)
    run = workers.run([(partial(int, 4), 1)] * 9, max_bytes=9, max_jobs=3)
    assert next(run) == 4
    workers.close()
    workers.close()
    assert next(run, "nothing") == "nothing"
    with pytest.raises(ExecutorClosed, match="closed"):
        workers.run([], **PLENTY)


def test_workers_that_nobody_holds_end():
    before = set(threading.enumerate())
    workers = Workers(calls, 1)
    run = workers.run([(os.getpid, 1)] * 9, **PLENTY)
    pid = next(run)
    del workers
    assert next(run) == pid  # the run keeps the workers alive
    del run
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    wait_until(lambda: not set(threading.enumerate()) - before)
