"""The policy over saved tensors, on a block made of its three kinds: bits, bytes, misuse."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from kimi_pretrain.memory.fp8_tiles import from_fp8, to_fp8
from kimi_pretrain.memory.pointwise import rms_norm, swiglu
from kimi_pretrain.memory.saved import Policy, Saves, apply, trimmed

WIDTH, TOKENS = 128, 24
KINDS = ("norms", "swiglu", "mla_up")


class Block(Saves, torch.nn.Module):
    """Norm, two products from one input made again together, SwiGLU, and a sum."""

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
    """Of fp32 tensors of TOKENS x WIDTH: what is held between forward and backward."""
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

    # x, a number a row; normed; one, two, sigmoid(two); y; gate_up; its SwiGLU, of half the width.
    assert held() == 7 * every + every // 2 + TOKENS * 4
    assert held("norms") == held() - every
    # tanh saves its output as well: `two`, which its own consumer reads from the recipe.
    assert held("swiglu") == held() - every // 2
    assert held("mla_up") == held() - every
    codes = TOKENS * (WIDTH + 4)
    assert held(fp8=True) == held() - 2 * every + 2 * codes
    assert held(*KINDS, fp8=True) == held(*KINDS) - 2 * every + 2 * codes


class Quantised(torch.autograd.Function):
    """The explicit twin: a product or SwiGLU of `x`, whose backward pass reads `kept`."""

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
    assert_same_bits(found[:1], plain[:1])  # the forward pass is as it was
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
    assert alive == [True, False]  # gone before the second gradient is handed on
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
    except RuntimeError:  # its traceback holds the frames, and is gone with it
        failed = True
    assert failed
    assert policy.bytes_by_kind() == {}


def test_a_view_of_an_input_is_not_kept_alive_by_itself():
    """Its recipe would lie on the storage that it holds: for ever, without a backward pass."""
    policy = Policy(["norms"])
    x = leaf() * 1.0
    seen = weakref.ref(x.untyped_storage())
    with policy.saving():
        out = policy.remade("norms", lambda x: x.view(WIDTH, TOKENS), x)
        loss = (out * out).sum()
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


def test_a_saved_part_does_not_hold_the_rest():
    """Of a sorted order whose beginning is saved, the beginning stays; values and gradient do."""
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
