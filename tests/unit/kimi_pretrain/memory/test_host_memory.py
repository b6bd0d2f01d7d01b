"""Tests saved tensors in host memory: equal bits, their location over time, and a stable pool."""

import gc

import psutil
import pytest
import torch

from kimi_pretrain.memory import host_memory
from kimi_pretrain.memory.host_memory import Copies, HostMemory, Piece, Pool
from kimi_pretrain.memory.saved import Policy, apply
from tests.unit.kimi_pretrain.memory.test_saved import (
    KINDS,
    TOKENS,
    WIDTH,
    Block,
    assert_same_bits,
    leaf,
)

LAYERS, SLAB = 4, 5000  # a slab is smaller than a storage and divides none
EVERY = TOKENS * WIDTH * 4
CPU = torch.device("cpu")


class Stack(torch.nn.Module):
    """Stack of blocks, each of which begins a group."""

    def __init__(self, policy, dtype=torch.float32, device=CPU):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(dtype) for _ in range(LAYERS))
        self.policy = policy
        self.to(device)
        apply(policy, self.modules(), self.parameters())

    def forward(self, x):
        for block in self.blocks:
            self.policy.open_group()
            x = block(x)
        return x


def policy(kinds=(), *, fp8=False, least=0, slab=SLAB, device=CPU):
    return Policy(kinds, fp8=fp8, host=HostMemory(device, least, slab))


def step(model, schedule=("F0", "B0")):
    """Run microbatches in the order of a schedule; return the losses and all gradients."""
    model.policy.begin_step()
    device = model.blocks[0].gain.device
    inputs, outputs = {}, {}
    for item in schedule:
        kind, number = item[0], int(item[1:])
        if kind == "F":
            inputs[number] = (leaf().detach() * (number + 1)).to(device).requires_grad_()
            x = inputs[number].to(model.blocks[0].gain.dtype)
            outputs[number] = (model(x).float() ** 2).mean()
        else:
            outputs[number].backward()
    found = [out.detach() for out in outputs.values()] + [x.grad for x in inputs.values()]
    found += [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


SCHEDULES = {
    "one after the other": ("F0", "B0", "F1", "B1", "F2", "B2"),
    "1F1B": ("F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"),
    "two in flight": ("F0", "F1", "B0", "F2", "B1", "B2"),
    "all forward first": ("F0", "F1", "F2", "B2", "B1", "B0"),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize("treatment", [{}, {"kinds": KINDS}, {"kinds": KINDS, "fp8": True}])
def test_no_bit_changes_in_two_steps(schedule, dtype, treatment):
    model = Stack(policy(**treatment), dtype)
    plain = dict(treatment)
    wanted = step(Stack(Policy(plain.pop("kinds", ()), **plain), dtype), schedule)
    for _ in range(3):
        assert_same_bits(step(model, schedule), wanted)
        assert not set(model.policy.bytes_by_kind()) - {"weights"}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_from_the_second_step_on_nothing_is_late_and_nothing_grows(schedule):
    model = Stack(policy())
    step(model, schedule)
    host = model.policy.host
    slabs = host.pool.slabs
    assert slabs > 0
    for _ in range(2):
        step(model, schedule)
        assert host.late == 0
        assert host.pool.slabs == slabs


def test_a_schedule_that_changes_is_late_and_right():
    """Guesses are wrong for one step; this is the control of `late` above."""
    first, then = SCHEDULES["all forward first"], SCHEDULES["1F1B"]
    model = Stack(policy())
    step(model, first)
    assert_same_bits(step(model, then), step(Stack(Policy()), then))
    assert model.policy.host.late > 0
    step(model, then)
    assert model.policy.host.late == 0


def test_what_is_where():
    """After a forward pass only the last two groups are also on the device."""
    model = Stack(policy())
    every = Stack(policy(least=1 << 40))
    model.policy.begin_step()
    out, kept = model(leaf()), every(leaf())
    found = model.policy.bytes_by_kind()
    assert "kept" not in found
    assert found["host"] == every.policy.bytes_by_kind()["kept"]
    assert found["moving"] == found["host"] * 2 // LAYERS
    del out, kept
    gc.collect()
    assert model.policy.bytes_by_kind() == {}


def test_small_tensors_and_weights_stay():
    model = Stack(policy(least=EVERY))
    model.policy.begin_step()
    out = model(leaf())
    found = model.policy.bytes_by_kind()
    # One number per row of each norm, and SwiGLU's output of half the width.
    assert found["kept"] == LAYERS * (TOKENS * 4 + EVERY // 2)
    assert found["weights"] == sum(p.nbytes for p in model.parameters())
    assert out.requires_grad


def test_integers_and_tensors_of_another_device_stay():
    kept = policy()
    kept.open_group()
    assert kept.host.keep(torch.arange(64)) is None
    assert kept.host.keep(torch.empty(64, device="meta")) is None
    found = kept.keep(torch.arange(64))
    assert kept.bytes_by_kind() == {"kept": 64 * 8}
    assert torch.equal(found.give(), torch.arange(64))


def test_an_evaluation_opens_no_group():
    kept = policy()
    with torch.no_grad():
        kept.open_group()
    assert kept.host._groups == []
    kept.open_group()
    assert len(kept.host._groups) == 1


def test_views_of_a_storage_share_one_copy():
    kept = policy()
    kept.open_group()
    x = leaf().detach() * 1.0
    views = [x, x[3:5, 7], x.T, x.chunk(2, -1)[1]]
    saved = [kept.keep(view) for view in views]
    assert kept.bytes_by_kind()["host"] == EVERY
    for _ in range(2):  # once in time, once after its release
        assert_same_bits([one.give() for one in saved], views)
        kept.open_group()
        kept.open_group()
    assert "moving" not in kept.bytes_by_kind() or saved[0].copy.bytes_on_device == EVERY
    assert saved[0].give().untyped_storage()._cdata == saved[2].give().untyped_storage()._cdata
    assert saved[1].give().stride() == views[1].stride()


def test_a_storage_that_was_written_to_between_two_savings_has_two_copies():
    kept = policy()
    kept.open_group()
    x = leaf().detach() * 1.0
    first, before = kept.keep(x), x.clone()
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"12288 bytes .* written to after it was saved"):
        first.give()
    second = kept.keep(x)
    assert torch.equal(second.give(), before * 2)
    del first


def test_a_tensor_that_is_written_to_while_it_is_copied_is_refused():
    kept = policy()
    kept.open_group()
    x = leaf().detach() * 1.0
    saved = kept.keep(x)
    kept.open_group()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="written to after it was saved"):
        kept.open_group()
    del saved


def test_nothing_is_kept_of_an_evaluation_or_a_dropped_graph():
    model = Stack(policy())
    model.policy.begin_step()
    with torch.no_grad():
        model(leaf())
    assert model.policy.bytes_by_kind() == {}
    assert model.policy.host.pool.slabs == 0
    model(leaf())
    assert model.policy.bytes_by_kind() == {}
    slabs = model.policy.host.pool.slabs
    assert_same_bits(step(model), step(Stack(Policy())))
    assert model.policy.host.pool.slabs == slabs


def test_what_comes_back_while_room_is_taken_overlaps_with_nothing(monkeypatch):
    """The garbage collector may run in between and drop the last storage of the open slab."""
    pool = Pool(Copies(), 100)
    dropped = [pool.take(30)]

    def collecting(*args):
        if dropped:
            pool.give_back(dropped.pop())
        return Piece(*args)

    monkeypatch.setattr(host_memory, "Piece", collecting)
    taken = [piece for size in (30, 40, 150) for piece in pool.take(size)]
    begins = [(piece.memory.data_ptr(), len(piece.memory)) for piece in taken]
    places = [byte for begin, size in begins for byte in range(begin, begin + size)]
    assert len(places) == len(set(places)) == 220


def test_what_a_storage_without_room_had_taken_is_given_back(monkeypatch):
    pool, ample = Pool(Copies(), 100), psutil.virtual_memory()
    first = pool.take(50)
    available = iter([1 << 30, 1 << 30, 0])  # room for two more slabs
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ample._replace(available=next(available)))
    with pytest.raises(ValueError, match=r"train\.offload=true"):
        pool.take(400)
    assert pool.slabs == 3
    pool.give_back(first)
    pool.take(300)  # fills them without a new slab
    assert pool.slabs == 3


def test_a_host_without_room_is_told(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=SLAB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    model = Stack(policy())
    model.policy.begin_step()
    with pytest.raises(ValueError, match=r"train\.offload=true: .* GiB are left"):
        model(leaf())


def test_a_storage_is_let_go_as_one_that_the_current_stream_uses():
    """Otherwise the memory of another stream's storage would be reused while it is being copied."""
    waits = []

    class Seen(Copies):
        def wait(self, event, *used):
            waits.append([one.data_ptr() for one in used])

    kept = policy()
    kept.host._copies = Seen()
    kept.open_group()
    x = leaf().detach() * 1.0
    saved = kept.keep(x)
    kept.open_group()
    assert waits == []
    kept.open_group()
    assert waits == [[x.data_ptr()]]
    del saved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_storage_of_another_stream_is_not_handed_on_while_it_is_copied():
    device = torch.device("cuda", torch.cuda.current_device())
    kept, side = policy(slab=1 << 24, device=device), torch.cuda.Stream(device)
    kept.open_group()
    with torch.cuda.stream(side):
        x = torch.full((1 << 24,), 7.0, device=device)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.stream(kept.host._copies._outward):
        torch.cuda._sleep(1 << 29)  # delays the copy by a fraction of a second
    saved = kept.keep(x)
    kept.open_group()
    kept.open_group()
    del x
    with torch.cuda.stream(side):  # would get the same memory if it were free
        torch.full((1 << 24,), 8.0, device=device)
    assert (saved.give() == 7.0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("treatment", [{"kinds": KINDS}, {"kinds": KINDS, "fp8": True}])
def test_no_bit_changes_on_a_gpu(schedule, treatment):
    """Uses streams and events: a missing wait changes bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = Stack(policy(**treatment, device=device), torch.bfloat16, device)
    plain = dict(treatment)
    other = Stack(Policy(plain.pop("kinds"), **plain), torch.bfloat16, device)
    wanted = step(other, schedule)
    for _ in range(20):
        assert_same_bits(step(model, schedule), wanted)
        torch.cuda.synchronize()
        assert not set(model.policy.bytes_by_kind()) - {"weights"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_on_a_gpu():
    """With large tensors in host memory, a forward pass leaves two groups on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    left = {}
    for name, used in {
        "device": Policy(["nothing"]),
        "host": policy(slab=1 << 24, device=device),
    }.items():
        model = Stack(used, torch.bfloat16, device)
        used.begin_step()
        x = torch.randn(1 << 16, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = model(x)
        torch.cuda.synchronize()
        left[name] = torch.cuda.memory_allocated() - before
        del out, model
    assert left["host"] < left["device"] * 3 // LAYERS
