"""Tests the policy for saved tensors on a block with its three kinds: bits, bytes and misuse."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from kimi_pretrain.memory import saved
from kimi_pretrain.memory.fp8_tiles import from_fp8, to_fp8
from kimi_pretrain.memory.host_memory import HostMemory
from kimi_pretrain.memory.pointwise import rms_norm, swiglu
from kimi_pretrain.memory.saved import Policy, Saves, apply, trimmed

WIDTH, TOKENS = 128, 24
KINDS = ("norms", "swiglu", "mla_up")


class Block(Saves, torch.nn.Module):
    """Block of a norm, two recomputed products of one input, SwiGLU, and a sum."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in {
            "gain": (WIDTH,), "one": (WIDTH, WIDTH), "two": (WIDTH, WIDTH), "up": (WIDTH, WIDTH),
            "down": (WIDTH // 2, WIDTH),
        }.items():  # fmt: skip
            values = torch.randn(shape, generator=generator) / shape[0] ** 0.5
            setattr(self, name, torch.nn.Parameter(values.to(dtype)))

    def pair(self, x):
        return x @ self.one, torch.tanh(x @ self.two)

    def forward(self, x):
        with self.policy.saving():
            normed = self.policy.remade("norms", rms_norm, x, self.gain, 1e-5)
            one, two = self.policy.remade("mla_up", self.pair, normed)
            y = x + one * two.sigmoid()
            y = self.policy.squeezed(y)
            gate_up = self.policy.squeezed(y @ self.up)
            return x + self.policy.remade("swiglu", swiglu, gate_up) @ self.down


def block(policy=None, dtype=torch.float32):
    made = Block(dtype)
    if policy is not None:
        apply(policy, made.modules(), made.parameters())
    return made


def leaf(dtype=torch.float32):
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    return x.to(dtype).requires_grad_()


def gradients(module, x=None):
    x = leaf(module.gain.dtype) if x is None else x
    out = module(x)
    (out.float() ** 2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same_bits(found, wanted):
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in KINDS), KINDS])
def test_what_is_made_again_has_the_same_bits(kinds, dtype):
    policy = Policy(kinds)
    assert_same_bits(gradients(block(policy, dtype)), gradients(block(dtype=dtype)))
    assert not set(policy.bytes_by_kind()) - {"weights"}


def test_each_kind_takes_its_own_bytes():
    """Counts the bytes of fp32 TOKENS x WIDTH tensors held between forward and backward."""
    every = TOKENS * WIDTH * 4

    def held(*kinds, fp8=False):
        policy = Policy(kinds, fp8=fp8)
        module = block(policy)
        if not policy.active:
            policy.recompute = frozenset(["nothing"])
        out = module(leaf())
        found = policy.bytes_by_kind()
        assert found["weights"] == sum(p.nbytes for p in module.parameters())
        del out
        return found["kept"]

    # x and one number per row; normed; one, two, sigmoid(two); y; gate_up; SwiGLU, of half the
    # width.
    assert held() == 7 * every + every // 2 + TOKENS * 4
    assert held("norms") == held() - every
    # tanh also saves its output `two`, which its consumer reads from the recipe.
    assert held("swiglu") == held() - every // 2
    assert held("mla_up") == held() - every
    codes = TOKENS * (WIDTH + 4)
    assert held(fp8=True) == held() - 2 * every + 2 * codes
    assert held(*KINDS, fp8=True) == held(*KINDS) - 2 * every + 2 * codes


class Quantised(torch.autograd.Function):
    """Reference with explicit quantisation: a function of `x` whose backward pass reads `kept`."""

    @staticmethod
    def forward(ctx, function, x, kept, *weights):
        ctx.function = function
        ctx.save_for_backward(kept, *weights)
        return function(x, *weights)

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        of_x, *rest = torch.autograd.grad(out, inputs, grad)
        return None, of_x, None, *rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(), ("swiglu",), KINDS])
def test_fp8_is_what_a_twin_that_quantises_gets(kinds, dtype):
    def through(x):
        return from_fp8(*to_fp8(x.detach()), x.dtype)

    module, x = block(dtype=dtype), leaf(dtype)
    one, two = module.pair(rms_norm(x, module.gain, 1e-5))
    y = x + one * two.sigmoid()
    gate_up = Quantised.apply(torch.matmul, y, through(y), module.up)
    inner = Quantised.apply(swiglu, gate_up, through(gate_up))
    if "swiglu" in kinds:
        out = x + Quantised.apply(torch.matmul, inner, swiglu(through(gate_up)), module.down)
    else:
        out = x + inner @ module.down
    (out.float() ** 2).sum().backward()
    wanted = [out.detach(), x.grad, *(p.grad for p in module.parameters())]
    found = gradients(block(Policy(kinds, fp8=True), dtype))
    assert_same_bits(found, wanted)
    plain = gradients(block(dtype=dtype))
    assert_same_bits(found[:1], plain[:1])  # the forward pass does not change
    assert not torch.equal(found[5], plain[5])  # gradient of `up`


def test_a_consumer_outside_the_hooks_gets_its_tensor():
    module = block(Policy(KINDS, fp8=True))
    x = leaf()
    with module.policy.saving():
        normed = module.policy.remade("norms", rms_norm, x, module.gain, 1e-5)
    (outside,) = torch.autograd.grad((normed**2).sum(), x)
    (wanted,) = torch.autograd.grad((rms_norm(x, module.gain, 1e-5) ** 2).sum(), x)
    assert torch.equal(outside, wanted)


def test_an_output_that_was_written_to_is_kept_as_it_is():
    module, results = block(Policy(KINDS)), []
    for policy in (module.policy, Policy()):
        x = leaf()
        with policy.saving():
            normed = policy.remade("norms", torch.tanh, x * 1.0).clone()
            made = policy.remade("norms", torch.neg, normed)
            made.mul_(3.0)
            out = (made @ module.one).sum()
        results.append(torch.autograd.grad(out, (x, module.one)))
    assert_same_bits(*results)


def test_a_saved_tensor_that_is_written_to_is_refused():
    module = block(Policy(KINDS))
    x = leaf() * 1.0
    with module.policy.saving():
        out = (x * x).sum()
    x.data_ptr()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"\[24, 128\] .* written to after it was saved"):
        out.backward()


def test_inputs_of_a_recipe_that_are_written_to_are_refused():
    module = block(Policy(KINDS))
    x = leaf() * 1.0
    with module.policy.saving():
        out = (module.policy.remade("norms", torch.neg, x) @ module.one).sum()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="written to after it was saved"):
        out.backward()


def test_inputs_that_are_written_to_before_an_output_is_saved_are_refused():
    policy = Policy(KINDS)
    x = leaf() * 1.0
    with policy.saving():
        out = policy.remade("norms", torch.neg, x)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match=r"\[24, 128\] .* written to after it was saved"):
            out * out


def test_inputs_are_kept_once():
    """Later writes to the inputs are detected when they are needed, not before."""
    policy = Policy(KINDS)
    x = leaf() * 1.0
    with policy.saving():
        out = policy.remade("norms", torch.neg, x)
        product = (out * out).sum()
        with torch.no_grad():
            x.mul_(2)
        product = product + (out * out).sum()
    with pytest.raises(RuntimeError, match="written to after it was saved"):
        product.backward()


def test_what_is_written_to_before_it_is_saved_has_no_codes():
    policy, results = Policy(fp8=True), []
    for used in (policy, Policy()):
        x = leaf()
        with used.saving():
            y = used.squeezed(x * 1.0)
            y.mul_(3)
            out = (y * y).sum()
        results.append(torch.autograd.grad(out, x))
    assert_same_bits(*results)


def test_made_once_for_all_and_gone_with_the_last():
    policy, made = Policy(["norms"]), []

    def make(x):
        out = torch.exp(x).neg()
        made.append(weakref.ref(out.untyped_storage()))
        return out

    weights = [torch.ones(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]

    def forward():
        out = policy.remade("norms", make, leaf())
        return sum((out @ weight).sum() for weight in weights)

    alive = []
    for weight in weights:
        weight.register_hook(lambda _: alive.append(made[-1]() is not None))
    with policy.saving():
        total = forward()
    assert [ref() for ref in made] == [None]
    total.backward()
    assert alive == [True, False]  # released before the second gradient is handed on
    assert len(made) == 2
    assert made[1]() is None


def test_nothing_is_held_after_an_exception_or_without_a_graph():
    policy = Policy(KINDS, fp8=True)
    module = block(policy)
    with torch.no_grad():
        module(leaf())
    assert policy.bytes_by_kind() == {}
    module.down.data = module.down.data[:3]
    failed = False
    try:
        module(leaf())
    except RuntimeError:  # its traceback holds the frames and goes with it
        failed = True
    assert failed
    assert policy.bytes_by_kind() == {}


@pytest.mark.parametrize("used", [True, False])
def test_a_view_of_an_input_is_not_kept_alive_by_itself(used):
    """A recipe that owned its own storage would never be freed without a backward pass."""
    policy, weight = Policy(["norms"]), torch.ones(TOKENS, TOKENS, requires_grad=True)
    x = leaf() * 1.0
    seen, wanted = weakref.ref(x.untyped_storage()), x.detach().view(WIDTH, TOKENS).sum(0)
    with policy.saving():
        out = policy.remade("norms", lambda x: x.view(WIDTH, TOKENS), x)
        loss = (out @ weight).sum() if used else None
    if loss is not None:
        (of_weight,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(of_weight[:, 0], wanted)
    del x, out, loss
    assert seen() is None
    assert policy.bytes_by_kind() == {}


def test_an_int_view_of_an_output_keeps_its_type():
    policy = Policy(["norms"])
    with policy.saving():
        out = policy.remade("norms", torch.tanh, leaf() * 1.0)
        bits = out.detach().view(torch.int32)
        saved = policy.keep(bits)
    assert saved.give().dtype == torch.int32
    assert torch.equal(saved.give(), bits)


def test_an_evaluation_notes_no_recipe():
    policy = Policy(KINDS, fp8=True)
    with torch.no_grad():
        out = policy.remade("norms", torch.tanh, leaf() * 1.0)
    assert not hasattr(out.untyped_storage(), "treatment")


def test_views_of_outputs_are_found():
    results = []
    for policy in (Policy(["swiglu"]), Policy()):
        x, copied = leaf(), []
        with policy.saving():
            out = policy.remade("swiglu", torch.exp, x * 1.0)
            left, right = out.chunk(2, -1)
            product = F.silu(left) * right.flip(0)
            copied = [policy.keep(view) for view in (left, right.T, out[3:5, 7])]
        product.sum().backward()
        results.append([x.grad, *(one.give() for one in copied)])
    assert_same_bits(*results)


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "rows": lambda x: x[3:5],
    "one number": lambda x: x[4, 7],
    "half of the columns, transposed": lambda x: x.chunk(2, -1)[1].T,
    "every other column": lambda x: x[:, 1::2],
    "repeated": lambda x: x[:, :1].expand(-1, 5),
    "another shape": lambda x: x.view(WIDTH, TOKENS),
}


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("first", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("treatment", ["fp8", "remade"])
def test_any_view_may_be_the_first_that_is_saved(treatment, first, host):
    """Codes cover the whole storage in its own order, whichever view autograd saves."""
    memory = HostMemory(torch.device("cpu"), 0, 5000) if host else None
    policy = Policy(["norms"], fp8=True, host=memory)
    policy.open_group()
    x = leaf().detach() * 1.0
    with policy.saving():
        if treatment == "fp8":
            y = policy.squeezed(x * 1.0)
            wanted = from_fp8(*to_fp8(y), y.dtype)
        else:
            y = policy.remade("norms", torch.tanh, x)
            wanted = torch.tanh(x)
        views = [view.detach() for view in (first(y), *(view(y) for view in VIEWS.values()))]
        kept = [policy.keep(view) for view in views]
    assert all(isinstance(one, saved.Remade) for one in kept)
    for _ in range(3):
        policy.open_group()
    assert ("host" in policy.bytes_by_kind()) == host
    expected = [first(wanted), *(view(wanted) for view in VIEWS.values())]
    assert_same_bits([one.give() for one in kept], expected)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("planted", [float("inf"), float("nan")])
def test_codes_show_what_is_not_finite_wherever_they_wait(planted, host):
    """Otherwise the update would look right."""
    memory = HostMemory(torch.device("cpu"), 0, 5000) if host else None
    policy = Policy(fp8=True, host=memory)
    policy.open_group()
    x, weight = leaf().detach() * 1.0, torch.ones(WIDTH, 2, requires_grad=True)
    x[5, 9] = planted
    with policy.saving():
        out = policy.squeezed(x) @ weight
    for _ in range(3):
        policy.open_group()
    assert ("host" in policy.bytes_by_kind()) == host
    (of_weight,) = torch.autograd.grad(out[5].sum(), weight)
    assert of_weight.isnan().all()


def test_a_saved_part_does_not_hold_the_rest():
    """Only the saved beginning of a sorted order stays, and values and gradient are right."""
    x = torch.randn(8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    order = torch.argsort(x.detach())
    rest = weakref.ref(order.untyped_storage())
    with trimmed():
        y = x[order[:3]]
    expected = torch.zeros(8)
    expected[order[:3]] = torch.tensor([1.0, 2.0, 3.0])
    del order
    gc.collect()
    assert rest() is None
    y.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


PARTS = {
    "a part of a storage": lambda x: torch.cat([x, x + 1])[3 : 3 + TOKENS],
    "columns first": lambda x: x.T.contiguous().T,
    "columns of a wider one": lambda x: torch.cat([x, x + 1], -1)[:, 5 : 5 + WIDTH],
}


@pytest.mark.parametrize("made", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("treatment", ["fp8", "remade"])
def test_what_is_not_all_of_its_storage_is_kept_as_it_is(made, treatment):
    """Codes decode to a contiguous tensor, in which a view's storage offset has no meaning."""
    policy, results = Policy(["norms"], fp8=True), []
    for used in (policy, Policy()):
        x = leaf()
        with used.saving():
            if treatment == "fp8":
                y = used.squeezed(made(x * 1.0))
            else:
                y = used.remade("norms", made, x * 1.0)
            out = (y * y).sum()
            if used is policy:
                (held,) = {kept.tensor.untyped_storage() for kept in policy._kept}
                assert held._cdata == y.untyped_storage()._cdata
        results.append(torch.autograd.grad(out, x))
    assert_same_bits(*results)


def test_what_is_recomputed_has_no_codes():
    """Its bits stay the same, and a recipe holds fewer bytes than codes."""
    policy, results = Policy(["norms"], fp8=True), []
    for used in (policy, Policy()):
        x = leaf()
        with used.saving():
            y = used.squeezed(used.remade("norms", torch.tanh, x * 1.0))
            out = (y**3).sum()
        results.append(torch.autograd.grad(out, x))
    assert_same_bits(*results)


def test_an_alias_made_by_data_is_recomputed():
    """An alias has its own version counter; Megatron-Core makes such aliases (`covers`)."""
    policy = Policy(["norms"])
    with policy.saving():
        x = leaf() * 1.0
        out = policy.remade("norms", torch.tanh, x)
        alias = policy.keep(out.data)
    assert isinstance(alias, saved.Remade)
    assert torch.equal(alias.give(), out)


class Expert(Saves, torch.nn.Module):
    """Expert, trained or frozen, whose input has a gradient."""

    def __init__(self, *, trained):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, inner in {"up": WIDTH, "down": WIDTH // 2}.items():
            weight = torch.randn(inner, WIDTH, generator=generator) / WIDTH**0.5
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=trained))

    def forward(self, x):
        with self.policy.saving():
            gate_up = self.policy.squeezed(self.policy.squeezed(x) @ self.up)
            return self.policy.remade("swiglu", swiglu, gate_up) @ self.down


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_nothing_is_done_for_tensors_that_no_backward_pass_needs(trained, host, monkeypatch):
    """With frozen weights neither product needs its input, so only SwiGLU saves a tensor."""
    coded, copied = [], []
    monkeypatch.setattr(saved, "to_fp8", lambda x: coded.append(tuple(x.shape)) or to_fp8(x))
    memory = HostMemory(torch.device("cpu"), 0) if host else None
    policy = Policy(KINDS, fp8=True, host=memory)
    if memory is not None:
        keep = memory.keep
        monkeypatch.setattr(memory, "keep", lambda x: copied.append(x.nbytes) or keep(x))
    module, plain = Expert(trained=trained), Expert(trained=trained)
    apply(policy, module.modules(), module.parameters())
    policy.open_group()
    x = leaf() * 1.0
    out = module(x)
    shape = (TOKENS, WIDTH)
    assert coded == ([shape, shape] if trained else [shape])
    codes, found = [TOKENS * WIDTH, TOKENS * 4], policy.bytes_by_kind()
    wanted = len(coded) * sum(codes)
    assert found == {"weights": sum(p.nbytes for p in module.parameters())} | (
        {"host": wanted, "moving": wanted} if host else {"kept": wanted}
    )
    assert copied == (codes * len(coded) if host else [])
    (of_x,) = torch.autograd.grad((out**2).sum(), x)
    assert of_x.isfinite().all()
    assert torch.equal(out, plain(x))


def plainly_cast(monkeypatch):
    """Make codes by a plain cast, as Megatron-Core's own FP8 storage does."""
    monkeypatch.setattr(saved, "to_fp8", lambda x: (x.to(torch.float8_e4m3fn), torch.ones(1)))
    monkeypatch.setattr(saved, "from_fp8", lambda codes, scales, dtype: codes.to(dtype))


@pytest.mark.parametrize("kinds", [(), KINDS])
def test_every_gradient_stays_within_six_percent_at_any_scale(kinds, monkeypatch):
    """Checks gradients of input, up and down weights for inputs around 1 and 1e-3.

    A plain cast is the control.
    """

    def errors(scale):
        found = []
        for policy in (Policy(kinds, fp8=True), Policy()):
            module = Expert(trained=True)
            apply(policy, module.modules(), module.parameters())
            x = (leaf().detach() * scale).requires_grad_()
            grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
            module(x).backward(grad)
            found.append([x.grad, module.up.grad, module.down.grad])
        pairs = zip(*found, strict=True)
        return [float((one - other).norm() / other.norm()) for one, other in pairs]

    assert 0 < max(*errors(1.0), *errors(1e-3)) <= 0.06
    plainly_cast(monkeypatch)
    assert max(errors(1.0)) <= 0.06
    assert max(errors(1e-3)) > 0.5
