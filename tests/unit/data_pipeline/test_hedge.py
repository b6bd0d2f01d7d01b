"""Hedged requests: when the second is sent, which of the two wins, and no thread is left over."""

import random
import threading
import time

import pytest

from data_pipeline.store.hedge import Crew, Hedger, Latencies
from data_pipeline.store.retry import BASE_S, CAP_S, Tries, backoff


class Flight:
    """A request that completes when the test sets `land`, or after `seconds`."""

    def __init__(self, name, seconds=30.0, error=None, got=0):
        self.name, self._seconds, self._end = name, seconds, error
        self.sent, self.got, self.error = None, got, None
        self.land = threading.Event()
        self.abandoned = threading.Event()

    def run(self):
        self.sent = time.monotonic()
        self.land.wait(self._seconds)
        self.error = self._end

    def abandon(self):
        self.abandoned.set()
        self.land.set()


def _yes():
    return True


def _settled(name, seconds=50):
    """Wait until no thread of that name is alive."""
    end = time.monotonic() + seconds
    while any(t.name == name for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(t.name == name for t in threading.enumerate())


@pytest.fixture
def hedger():
    hedger = Hedger(threads=2, share=0.5, floor=0.01, samples=4)
    yield hedger
    hedger.close()
    assert _settled("hedged-read")


def test_the_second_wins_when_the_first_hangs(hedger):
    hedger.delay(1), hedger.delay(1)  # two reads that together earn one hedge
    first, second = Flight("first"), Flight("second", 0.0)
    winner, late = hedger.race(first, lambda: second, 0.01, _yes)
    assert (winner, late) == (second, True)
    assert first.abandoned.is_set()


def test_a_first_that_is_in_time_has_no_second(hedger):
    hedger.delay(1), hedger.delay(1)
    first = Flight("first", 0.0)
    assert hedger.race(first, lambda: pytest.fail("not late"), 20, _yes) == (first, False)


def test_the_first_may_win_after_all_and_ends_the_second(hedger):
    hedger.delay(1), hedger.delay(1)
    first, second = Flight("first"), Flight("second")
    second.run = lambda: (first.land.set(), second.land.wait(30))
    assert hedger.race(first, lambda: second, 0.01, _yes) == (first, True)
    assert second.land.is_set()


@pytest.mark.parametrize("got", [(5, 3), (3, 5)])
def test_of_two_that_fail_the_one_that_got_further_goes_on(hedger, got):
    hedger.delay(1), hedger.delay(1)
    first = Flight("first", 30.0, OSError("1"), got[0])
    second = Flight("second", 0.0, OSError("2"), got[1])
    winner, _ = hedger.race(first, lambda: first.land.set() or second, 0.01, _yes)
    assert winner.got == 5


def test_one_that_fails_does_not_win(hedger):
    hedger.delay(1), hedger.delay(1)
    first, second = Flight("first", 0.3), Flight("second", 0.0, OSError("2"), 9)
    assert hedger.race(first, lambda: second, 0.01, _yes)[0] is first


def test_no_second_when_it_is_not_welcome(hedger):
    hedger.delay(1), hedger.delay(1)
    first = Flight("first", 0.1)
    winner = hedger.race(first, lambda: pytest.fail("unwelcome"), 0.01, lambda: False)
    assert winner == (first, False)


def test_a_first_that_waits_to_be_sent_is_not_late(hedger):
    """It waits for the budget; a second request would wait, too."""
    hedger.delay(1), hedger.delay(1)
    first = Flight("first")
    first.run = lambda: time.sleep(0.3)  # never sent
    assert hedger.race(first, lambda: pytest.fail("not sent"), 0.01, _yes) == (first, False)


def test_an_interrupt_ends_both(hedger):
    hedger.delay(1), hedger.delay(1)
    first = Flight("first")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hedger.race(first, lambda: pytest.fail("interrupted"), 0.01, interrupted)
    assert first.abandoned.is_set()


def test_when_all_threads_are_busy_a_read_runs_in_its_own(hedger):
    free = threading.Event()
    assert all(hedger._crew.start(lambda: free.wait(30)) for _ in range(4))
    first = Flight("first", 0.0)
    ran = []
    run = first.run
    first.run = lambda: (ran.append(threading.current_thread()), run())
    assert hedger.race(first, lambda: pytest.fail("no thread"), 0.01, _yes) == (first, False)
    assert ran == [threading.current_thread()]
    free.set()


def test_hedges_are_a_share_of_the_reads():
    hedger = Hedger(threads=4, share=0.05, floor=0.0, samples=1)
    hedger.note(100, 0.0)
    sent = 0
    for _ in range(1000):
        if hedger.delay(100) is not None and hedger._spend():
            sent += 1
    assert 45 <= sent <= 50
    for _ in range(10_000):  # credit does not accumulate over a long quiet time
        hedger.delay(100)
    assert sum(hedger._spend() for _ in range(100)) == 10


def test_what_is_late_is_known_by_size_and_only_after_enough_reads():
    known = Latencies(0.95, samples=100)
    for i in range(99):
        known.note(1000, i / 100)
    assert known.high(1000) is None
    known.note(70_000, 5.0)
    for i in range(99, 117):
        known.note(60_000, i / 100)
    assert known.high(1) == pytest.approx(1.06, abs=0.06)  # sizes up to 64 KiB are one class
    assert known.high(70_000) is None
    hedger = Hedger(threads=1, share=1.0, floor=0.5, samples=2)
    for seconds in (0.1, 0.2):
        hedger.note(10, seconds)
    assert hedger.delay(10) == 0.5
    assert hedger.delay(1 << 20) is None


def test_idle_threads_end_by_themselves(monkeypatch):
    monkeypatch.setattr("data_pipeline.store.hedge._IDLE_S", 0.05)
    crew, done = Crew(8, "idle-crew"), []
    for _ in range(50):  # some jobs meet an idle thread, some a thread that is about to end
        while not crew.start(lambda: done.append(1)):
            time.sleep(0.001)
        time.sleep(random.random() * 0.02)
    assert _settled("idle-crew")
    assert len(done) == 50
    assert crew.start(lambda: done.append(1))  # new threads can start
    crew.close()
    assert _settled("idle-crew")
    assert not crew.start(lambda: done.append(1))


def test_jitter_is_full_and_bounded():
    draw = random.Random(0)
    for failures in (1, 3, 60, 10_000):
        waits = [backoff(failures, draw) for _ in range(400)]
        bound = min(CAP_S, BASE_S * 2.0 ** min(failures, 30))
        assert 0 <= min(waits) < 0.05 * bound
        assert 0.95 * bound < max(waits) <= bound


def test_tries_end_by_time_by_number_and_start_afresh_with_progress(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("data_pipeline.store.retry.time.monotonic", lambda: clock[0])
    tries = Tries("x", 10.0, None, random.Random(0))
    clock[0] = 9.9
    waits = [tries.failed() for _ in range(50)]
    assert 0 <= min(waits) < max(waits) <= 0.1 + 1e-9  # the last wait ends at the deadline
    clock[0] = 10.0
    assert tries.failed() is None
    tries.excuse(5.0)  # a wait that is not the server's fault
    assert tries.failed() is not None
    tries.progress()
    assert (tries.failures, tries.seconds) == (0, 0.0)
    few = Tries("x", 10.0, 3, random.Random(0))
    assert [few.failed() is None for _ in range(3)] == [False, False, True]
