import gc
import os
import resource
import socket

import numpy as np
import pytest

from data_pipeline.workers.shm_transport import (
    INLINE,
    KEPT,
    Receiver,
    Sender,
    anonymous_file,
    receive_bytes,
    send_bytes,
    spans_of,
)
from tests import worker_jobs
from tests.resume import fingerprint
from tests.worker_jobs import arrays_of


@pytest.fixture
def memory_files():
    """Return a counter of this process's anonymous files, not counting those of earlier tests."""
    gc.collect()
    before = worker_jobs.memory_files()
    return lambda: worker_jobs.memory_files() - before


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)  # a broken test must not wait for ever
        theirs.settimeout(60)
        yield Sender(theirs), Receiver(ours)


def carry(ends, value):
    """Send, receive and release in one thread, so only segments or small messages fit."""
    sender, receiver = ends
    sender.send(sender.pack(value))
    loaded = receiver.receive().load()
    sender.reclaim(receiver.released())
    return loaded


def large(fill, size=INLINE + 1):
    return np.full(size, fill, np.uint8)


def test_spans_are_aligned_and_apart():
    spans = spans_of([10, 0, 64, 65, 1])
    assert spans == [(0, 10), (64, 64), (64, 128), (128, 193), (256, 257)]


@pytest.mark.parametrize("seed", range(6))
def test_everything_arrives_as_it_was(ends, seed):
    sent = arrays_of(seed)
    got = carry(ends, sent)
    assert fingerprint(got) == fingerprint(sent)
    for name in ("patches", "fortran", "half", "frozen"):
        assert got[name].flags.writeable == sent[name].flags.writeable
        assert got[name].flags.f_contiguous == sent[name].flags.f_contiguous


def test_objects_and_long_bytes_arrive(ends):
    sent = {"objects": np.array(["a", None, (1, 2)], object), "bytes": bytes(3 * INLINE)}
    got = carry(ends, sent)
    assert got["objects"].tolist() == ["a", None, (1, 2)]
    assert got["bytes"] == sent["bytes"]


@pytest.mark.parametrize("size", [1, INLINE - 400, INLINE, INLINE + 1, 1 << 20])
def test_sizes_on_both_sides_of_inline(ends, size):
    sent = np.arange(size) % 251
    got = carry(ends, sent.astype(np.uint8))
    np.testing.assert_array_equal(got, sent)
    got += 1  # writeable


def test_arrays_are_views_of_one_mapping(ends, memory_files):
    first, second = carry(ends, (large(1), large(2)))
    both = [a.__array_interface__["data"][0] for a in (first, second)]
    assert 0 < both[1] - both[0] < 2 * INLINE
    assert not any(address % 64 for address in both)
    assert memory_files() == 2  # one of the sender, one of the receiver


def test_a_segment_is_used_again_only_when_no_array_is_left(ends):
    held = carry(ends, (large(1), large(2)))[1][5:9]
    other = carry(ends, large(3))
    address = other.__array_interface__["data"][0]
    assert held.tolist() == [2] * 4
    del other
    third = carry(ends, large(4))  # packed before `other` was given back
    fourth = carry(ends, large(5))
    assert fourth.__array_interface__["data"][0] == address
    assert held.tolist() == [2] * 4
    assert set(third) == {4}
    del third, fourth
    assert held.tolist() == [2] * 4


def test_segments_that_nobody_needs_are_dropped(ends, memory_files):
    many = [carry(ends, large(i)) for i in range(6)]
    assert memory_files() == 12
    assert [int(array[0]) for array in many] == list(range(6))
    many.clear()
    for i in range(KEPT + 3):
        assert carry(ends, large(i))[-1] == i
    assert memory_files() <= 4


def test_larger_objects_take_the_place_of_small_segments(ends, memory_files):
    for i in range(12):
        got = carry(ends, large(i, INLINE << i // 2))
        assert got.size == max(INLINE << i // 2, 1)
        assert int(got[-1]) == i
        del got
    assert memory_files() <= 6


def test_memory_goes_with_the_last_array(memory_files):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Sender(theirs), Receiver(ours)
        sender.send(sender.pack(large(7)))
        got = receiver.receive().load()
    assert memory_files() == 2
    view = got[3:5]
    del sender, receiver, got
    gc.collect()
    assert memory_files() == 1
    assert view.tolist() == [7, 7]
    del view
    gc.collect()
    assert memory_files() == 0


def test_without_memfd_nothing_has_a_name_either(ends, monkeypatch, memory_files):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = anonymous_file()
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    got = carry(ends, arrays_of(3))
    assert fingerprint(got) == fingerprint(arrays_of(3))
    assert memory_files() == 0


def test_what_cannot_be_pickled_costs_nothing(ends):
    with pytest.raises((TypeError, AttributeError)):
        carry(ends, (large(1), lambda: None))
    assert carry(ends, large(2))[0] == 2


def test_no_descriptor_is_left(ends):
    carry(ends, large(1))
    before = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        carry(ends, large(i))
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # descriptors of one more segment


def test_no_descriptors_left_is_said(ends):
    sender, receiver = ends
    sender.send(sender.pack(large(1)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        with pytest.raises(OSError, match="hold fewer results at once"):
            receiver.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("sent", [b"", b"\x05\0\0", b"\x05" + bytes(7) + b"abc"])
def test_an_end_in_the_middle_is_an_end(sent):
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(sent)
        theirs.close()
        with pytest.raises(EOFError, match="closed"):
            receive_bytes(ours)


@pytest.mark.parametrize("kept", [0, 7, 16, 40])
def test_an_object_cut_off_is_an_end(kept):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Sender(theirs).send(Sender(theirs).pack(b"x" * 100))
        data = ours.recv(10_000)[:kept]
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(EOFError, match="closed"):
            Receiver(ours).receive()


def test_messages_arrive_whole():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for data in (b"", b"a", b"b" * 50_000):
            send_bytes(theirs, data)
            assert receive_bytes(ours) == data
