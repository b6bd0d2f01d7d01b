"""The fast attention against the reference attention, and the rule that chooses between them."""

import logging

import pytest
import torch

from moonvit3d import attention
from moonvit3d.attention import (
    Segments,
    attend,
    attend_reference,
    attend_sdpa,
    attend_varlen,
    choose,
)

LENGTHS = [4, 40, 8, 24]


def qkv(dtype):
    torch.manual_seed(0)
    return torch.randn(3, sum(LENGTHS), 2, 12, dtype=dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_sdpa_equals_the_reference(dtype, atol):
    segments = Segments.of(LENGTHS, torch.device("cpu"))
    results = []
    for function in (attend_reference, attend_sdpa):
        x = qkv(dtype)
        out = function(*x, segments)
        (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        results.append((out.detach(), x.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_reference_is_one_softmax_under_a_block_mask():
    q, k, v = qkv(torch.float64).detach()
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    logits = torch.einsum("inh,jnh->nij", q, k) / 12**0.5
    logits = logits.masked_fill(owner[:, None] != owner[None], -torch.inf)
    want = torch.einsum("nij,jnh->inh", logits.softmax(-1), v)
    got = attend_reference(q, k, v, Segments.of(LENGTHS, torch.device("cpu")))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_segments():
    segments = Segments.of(LENGTHS, torch.device("cpu"))
    assert segments.cu_seqlens.tolist() == [0, 4, 44, 52, 76]
    assert segments.cu_seqlens.dtype == torch.int32


def test_choice():
    assert choose("cpu", torch.float32, 72, (0, 0)) == (attend_sdpa, "")
    assert choose("cuda", torch.bfloat16, 72, (9, 0)) == (attend_varlen, "")
    for dtype, head_dim, capability, word in [
        (torch.float32, 72, (9, 0), "float32"),
        (torch.bfloat16, 12, (9, 0), "head_dim 12"),
        (torch.bfloat16, 512, (9, 0), "head_dim 512"),
        (torch.float16, 72, (7, 5), "capability"),
    ]:
        function, reason = choose("cuda", dtype, head_dim, capability)
        assert function is attend_sdpa
        assert word in reason


def test_reason_is_logged_once(monkeypatch, caplog):
    attention._log_once.cache_clear()
    monkeypatch.setattr(attention, "choose", lambda *_: (attend_sdpa, "a reason of this test"))
    segments = Segments.of(LENGTHS, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            attend(*qkv(torch.float32), segments)
    assert [r.getMessage() for r in caplog.records].count(
        "MoonViT attention runs item by item: a reason of this test"
    ) == 1


def test_varlen_call_fits_torch(monkeypatch):
    """Without CUDA, the kernel call and its backward pass run on meta tensors."""
    monkeypatch.setattr(attention, "choose", lambda *_: (attend_varlen, ""))
    segments = Segments.of(LENGTHS, torch.device("meta"))
    x = torch.empty(3, sum(LENGTHS), 2, 72, device="meta", dtype=torch.bfloat16).requires_grad_()
    out = attend(*x, segments)
    assert out.shape == (sum(LENGTHS), 2, 72)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_equals_the_reference():
    """Queries and keys are views of one tensor, as the block passes them."""
    segments = Segments.of(LENGTHS, torch.device("cuda"))
    x = torch.randn(sum(LENGTHS), 3, 2, 72, device="cuda", dtype=torch.bfloat16)
    results = []
    for function, dtype in ((attend_varlen, torch.bfloat16), (attend_reference, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        out = function(*leaf.unbind(1), segments)
        out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").to(dtype).view_as(out))
        results.append((out.detach().double(), leaf.grad.double()))
    for got, want in zip(*results):
        assert (got - want).norm() < 1e-2 * want.norm()
