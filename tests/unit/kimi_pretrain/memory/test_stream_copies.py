"""Tests races of `StreamCopies`; a sleeping stream widens each, so a missing wait changes values.

A sleeping stream lags behind all others by a fraction of a second. Code that does not wait for it
reads or overwrites data that the stream has not copied yet.
"""

import pytest
import torch

from kimi_pretrain.memory.host_memory import HostMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE, CYCLES = 1 << 22, 1 << 29  # floats of a storage; a fraction of a second


@pytest.fixture
def memory():
    device = torch.device("cuda", torch.cuda.current_device())
    made = HostMemory(device, 0, slab_bytes=4 * SIZE)  # a storage fills a slab
    made.open_group()
    yield made
    torch.cuda.synchronize()


def full(value):
    return torch.full((SIZE,), float(value), device="cuda")


def let_go(memory):
    """Open two groups, so that tensors saved before them leave the device."""
    memory.open_group()
    memory.open_group()


def asleep(stream):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)


def test_a_copy_to_the_host_waits_for_the_work_that_makes_the_tensor(memory):
    torch.cuda.synchronize()
    x = torch.zeros(SIZE, device="cuda")
    torch.cuda._sleep(CYCLES)
    x.fill_(7)
    saved = memory.keep(x)
    let_go(memory)
    del x
    assert (saved.give() == 7).all()


def test_memory_that_is_let_go_is_not_reused_before_it_is_copied(memory):
    asleep(memory._copies._outward)
    x = full(7)
    place = x.data_ptr()
    saved = memory.keep(x)
    let_go(memory)
    del x
    other = full(8)
    assert other.data_ptr() == place  # otherwise the test shows nothing
    assert (saved.give() == 7).all()


def test_work_waits_for_the_copy_back(memory):
    x = full(7)
    saved = memory.keep(x)
    let_go(memory)
    del x
    torch.cuda.synchronize()
    asleep(memory._copies._inward)
    assert (saved.give() == 7).all()


def test_a_copy_back_waits_for_the_copy_to_the_host(memory):
    asleep(memory._copies._outward)
    x = full(7)
    saved = memory.keep(x)
    let_go(memory)
    del x
    saved.copy.load()  # ahead of time, as a guess does
    assert (saved.give() == 7).all()


def test_memory_brought_back_is_not_reused_while_it_is_read(memory):
    """The memory belongs to the copying stream, which would reuse it for the next copy back."""
    first, second = full(7), full(8)
    saved, other = memory.keep(first), memory.keep(second)
    let_go(memory)
    del first, second
    torch.cuda.synchronize()
    given = saved.give()
    torch.cuda._sleep(CYCLES)
    read = given.clone()
    del given, saved
    assert (other.give() == 8).all()
    assert (read == 7).all()


def test_a_slab_is_not_written_to_while_it_is_read(memory):
    """The reading stream is not the saving stream, as in the combined schedule."""
    side = torch.cuda.Stream()
    x = full(7)
    saved = memory.keep(x)
    let_go(memory)
    del x
    torch.cuda.synchronize()
    asleep(memory._copies._inward)
    with torch.cuda.stream(side):
        read = saved.give().clone()
    slabs = memory.pool.slabs
    del saved
    later = memory.keep(full(8))
    assert memory.pool.slabs == slabs  # the same slab; otherwise the test shows nothing
    side.synchronize()
    assert (read == 7).all()
    assert (later.give() == 8).all()


@pytest.mark.parametrize("asleep_at", ["_outward", "_inward"])
def test_a_whole_step_with_a_stream_that_is_late(asleep_at):
    """Compares the bits of a stack of layers while a copying stream sleeps at the start."""
    from tests.unit.kimi_pretrain.memory.test_host_memory import SCHEDULES, Stack, policy, step
    from tests.unit.kimi_pretrain.memory.test_saved import assert_same_bits

    device, schedule = torch.device("cuda", torch.cuda.current_device()), SCHEDULES["1F1B"]
    kept = policy(device=device)
    model = Stack(kept, torch.bfloat16, device)
    wanted = step(Stack(policy(least=1 << 40, device=device), torch.bfloat16, device), schedule)
    for _ in range(3):
        asleep(getattr(kept.host._copies, asleep_at))
        assert_same_bits(step(model, schedule), wanted)
