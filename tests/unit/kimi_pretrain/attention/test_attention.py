"""Compares block-wise attention and FlexAttention with the full matrix of logits."""

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.memory.attention_peak import attention_peak
from kimi_pretrain.attention.blockwise import (
    QUERIES,
    SHARED_QUERIES,
    block_attention,
    blocks_of,
    whole_attention,
)
from kimi_pretrain.attention.flex import block_mask, eager_kernel, flex_attention
from kimi_pretrain.attention.spans import KeySpans, largest
from kimi_pretrain.parallel.sequence import SequenceParts

CPU = torch.device("cpu")
TOKENS = 480
SHARES = [1, 2, 3]  # CP sizes; chunks of 480, 120 and 80 tokens, none a multiple of 128


def random_row(seed):
    """Return random segment borders up to TOKENS, and which segments are documents, not padding."""
    generator = np.random.default_rng(seed)
    longest = (4, 70, 300, TOKENS)[seed % 4]
    borders = [0]
    while borders[-1] < TOKENS:
        borders.append(min(TOKENS, borders[-1] + int(generator.integers(1, longest + 1))))
    documents = (generator.random(len(borders) - 1) < 0.8).tolist()
    return borders, documents


def all_ranks(seed, num_cp):
    """Yield the key spans and the token positions of each context-parallel rank."""
    shared = SequenceParts(TOKENS, num_cp)
    for rank in range(num_cp):
        spans = KeySpans.of(*random_row(seed), shared, rank)
        yield spans, torch.from_numpy(shared.positions_cp(rank))


def visible(spans):
    """Return which keys each query sees, bool [queries, tokens]."""
    key = np.arange(spans.num_keys)
    return (key >= spans.first_Q[:, None]) & (key <= spans.last_Q[:, None])


@pytest.mark.parametrize("num_cp", SHARES)
def test_spans_are_the_own_segment_up_to_the_own_place(num_cp):
    for seed in range(4):
        borders, documents = random_row(seed)
        segment = np.repeat(np.arange(len(documents)), np.diff(borders))
        for spans, places in all_ranks(seed, num_cp):
            mine = places.numpy()
            causal = np.arange(TOKENS) <= mine[:, None]
            assert (visible(spans) == (causal & (segment == segment[mine][:, None]))).all()
            assert (spans.counted_Q == np.array(documents)[segment[mine]]).all()


@pytest.mark.parametrize("num_cp", SHARES)
def test_blocks_hold_every_query_once_and_every_key_it_sees(num_cp):
    for seed in range(8):
        for spans, places in all_ranks(seed, num_cp):
            blocks = blocks_of(spans, CPU)
            found = np.zeros((len(places), TOKENS), dtype=bool)
            for block in blocks:
                shown = block.keys.start + block.shown
                found[block.queries, block.keys.start : shown] = True
                found[block.queries, shown : block.keys.stop] = ~block.hidden_LK.numpy()
                queries = block.queries.stop - block.queries.start
                several = len(set(spans.first_Q[block.queries].tolist())) > 1
                assert queries <= (SHARED_QUERIES if several else QUERIES)
            sizes = [range(block.queries.start, block.queries.stop) for block in blocks]
            assert [query for size in sizes for query in size] == list(range(len(places)))
            assert (found == visible(spans)).all()


def test_a_block_is_of_one_chunk():
    """Rank 0 of two holds the first and the last chunk.

    Blocks of equal size share a mask, which assumes consecutive queries, so no block may span both
    chunks.
    """
    shared = SequenceParts(48, 2)
    for borders in ([0, 48], [0, 5, 40, 48], [0, 12, 36, 48], [0, 16, 32, 48]):
        spans = KeySpans.of(borders, [True] * (len(borders) - 1), shared, 0)
        assert [block.queries for block in blocks_of(spans, CPU)] == [slice(0, 12), slice(12, 24)]


def test_a_short_document_s_block_has_no_other_keys():
    """40 documents of 30 tokens share 20 blocks of 60 queries by 60 keys."""
    blocks = blocks_of(KeySpans.of(list(range(0, 1201, 30)), [True] * 40), CPU)
    assert [(b.queries, b.keys) for b in blocks] == [
        (slice(n, n + 60), slice(n, n + 60)) for n in range(0, 1200, 60)
    ]
    (alone,) = blocks_of(KeySpans.of([0, QUERIES], [True]), CPU)
    assert (alone.queries, alone.keys, alone.shown) == (slice(0, QUERIES), slice(0, QUERIES), 1)


def inputs(dtype, seed, heads=3, qk=12, v=8):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(TOKENS, heads, width, generator=generator, dtype=torch.float64).to(dtype)
        for width in (qk, qk, v, v)
    ]


def everything(attend, q, k, v, grad):
    """Return the output, each query's maximum, and the gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, maxima = attend(*leaves)
    assert not maxima.requires_grad
    out.backward(grad)
    return [out.detach(), maxima, *(x.grad for x in leaves)]


TWINS = {"blocks": "blocks", "FlexAttention": "flex"}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def attention(name, spans, scale):
    """Return the named attention with the masks of these spans."""
    if name == "blocks":
        blocks = blocks_of(spans, CPU)
        return lambda q, k, v: block_attention(q, k, v, blocks, scale)
    mask = block_mask(spans, CPU)
    return lambda q, k, v: flex_attention(q, k, v, mask, scale, eager_kernel)


@pytest.mark.parametrize("name", TWINS.values(), ids=TWINS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_cp", SHARES)
def test_outputs_maxima_and_gradients_equal_the_whole_matrix(name, dtype, num_cp):
    for seed in range(4):
        q, k, v, grad = inputs(dtype, seed)
        for spans, mine in all_ranks(seed, num_cp):
            tested = everything(attention(name, spans, 0.3), q[mine], k, v, grad[mine])
            twin = everything(
                lambda *x, spans=spans: whole_attention(*x, spans, 0.3), q[mine], k, v, grad[mine]
            )
            for found, wanted in zip(tested, twin, strict=True):
                assert found.dtype == dtype
                torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", TWINS.values(), ids=TWINS.keys())
def test_gradients_add_up_over_the_ranks_of_a_row(name):
    q, k, v, grad = inputs(torch.float64, 2)
    whole = everything(attention(name, KeySpans.of(*random_row(2)), 0.3), q, k, v, grad)
    parts = [
        everything(attention(name, spans, 0.3), q[mine], k, v, grad[mine])
        for spans, mine in all_ranks(2, 3)
    ]
    for place in (3, 4):  # gradients of keys and values
        found = torch.stack([part[place] for part in parts]).sum(0)
        torch.testing.assert_close(found, whole[place], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TWINS.values(), ids=TWINS.keys())
def test_maxima_are_exact(name):
    """Integer inputs cause no rounding, so the maximum over all pairs is known exactly."""
    generator = np.random.default_rng(5)
    q, k = generator.integers(-40, 41, (2, TOKENS, 2, 6))
    for seed in range(4):
        borders, documents = random_row(seed)
        largest_N = np.full(2, -np.inf)
        for start, end, document in zip(borders[:-1], borders[1:], documents, strict=True):
            for i in range(start, end) if document else ():
                pairs = np.einsum("nd,knd->kn", q[i], k[start : i + 1])
                largest_N = np.maximum(largest_N, pairs.max(0) * 0.25)
        spans = KeySpans.of(borders, documents)
        values = torch.zeros(TOKENS, 2, 4)
        floats = (torch.from_numpy(x).float() for x in (q, k))
        _, maxima = attention(name, spans, 0.25)(*floats, values)
        assert largest(maxima, spans.counted(CPU)).tolist() == pytest.approx(
            largest_N.tolist(),
            rel=0 if name == "blocks" else 2e-7,  # FlexAttention works in base 2
        )


def test_a_row_without_documents_has_no_maxima():
    spans = KeySpans.of([0, 8], [False])
    assert largest(torch.ones(2, 8), spans.counted(CPU)).tolist() == [-torch.inf] * 2


def test_bfloat16_is_rounded_once():
    """Compares with fp64 on the same rounded inputs, within one or two roundings of the result."""
    spans = KeySpans.of(*random_row(2))
    rounded = inputs(torch.bfloat16, 2)
    found = everything(attention("blocks", spans, 0.3), *rounded)
    wanted = everything(attention("blocks", spans, 0.3), *(x.double() for x in rounded))
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-6, atol=1e-6)
    for place in (0, 2, 3, 4):
        assert found[place].dtype == torch.bfloat16
        torch.testing.assert_close(found[place].double(), wanted[place], rtol=2**-8, atol=1e-5)


def test_only_queries_keys_and_values_are_kept():
    q, k, v, _ = (x.requires_grad_() for x in inputs(torch.float32, 1))
    blocks = blocks_of(KeySpans.of(*random_row(1)), CPU)
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        block_attention(q, k, v, blocks, 0.3)
    assert kept == [x.data_ptr() for x in (q, k, v)]


def test_memory_grows_with_the_document_and_not_with_its_square():
    """Counts the peak bytes of forward and backward on the meta device."""
    sizes = (2048, 4096, 8192)
    blocks, whole = (
        [attention_peak(form, tokens, heads=4) for tokens in sizes] for form in ("blocks", "whole")
    )
    assert blocks[2] <= 0.1 * whole[2]
    assert blocks[1] / blocks[0] < 2.05 > blocks[2] / blocks[1]
    assert whole[2] / whole[1] > 3.5


@pytest.mark.parametrize("num_cp", SHARES)
@pytest.mark.parametrize("block", [32, 128])
def test_block_masks_are_those_of_every_pair(num_cp, block):
    names = [
        f"{full}{side}_{what}"
        for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
    ]  # fmt: skip
    whole_blocks = 0
    for seed in range(4):
        for spans, _ in all_ranks(seed, num_cp):
            found = block_mask(spans, CPU, block)
            size = len(spans.first_Q), TOKENS
            wanted = create_block_mask(
                found.mask_mod, None, None, *size, device="cpu", BLOCK_SIZE=block
            )
            assert found.shape == wanted.shape == (1, 1, *size)
            assert all(torch.equal(getattr(found, n), getattr(wanted, n)) for n in names)
            whole_blocks += int(found.full_kv_num_blocks.sum())
    assert whole_blocks > 0 or block == 128


def test_compiled_once_for_all_microbatches(monkeypatch):
    """Borders are data, so a new row needs no new kernel; compiled for a CPU, without Triton."""
    builds = []

    def backend(graph, example_inputs):
        builds.append(graph)
        return graph.forward

    kernel = torch.compile(eager_kernel, backend=backend, dynamic=False, fullgraph=True)
    q, k, v, grad = inputs(torch.float32, 0)
    for seed in range(4):
        mask = block_mask(KeySpans.of(*random_row(seed)), CPU)
        found = everything(
            lambda *x, mask=mask: flex_attention(*x, mask, 0.3, kernel), q, k, v, grad
        )
        spans = KeySpans.of(*random_row(seed))
        twin = everything(lambda *x, s=spans: whole_attention(*x, s, 0.3), q, k, v, grad)
        torch.testing.assert_close(found, twin, rtol=0, atol=1e-5)
    assert len(builds) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("qk", "v"), [(192, 128), (32, 24)])
def test_the_fused_kernel_equals_the_whole_matrix(dtype, qk, v):
    torch._dynamo.reset()  # these cases compile more kernels than a run does
    device = torch.device("cuda")
    loose = 2**-6 if dtype == torch.bfloat16 else 5e-3  # fp32 products may use TF32
    for seed in range(4):
        tensors = [x.to(device) for x in inputs(dtype, seed, heads=4, qk=qk, v=v)]
        for spans, mine in all_ranks(seed, 1 + seed % 2):
            mask, q, grad = block_mask(spans, device), tensors[0][mine], tensors[3][mine]
            found = everything(
                lambda *x, mask=mask: flex_attention(*x, mask, qk**-0.5), q, *tensors[1:3], grad
            )
            twin = everything(
                lambda *x, s=spans: whole_attention(*x, s, qk**-0.5), q, *tensors[1:3], grad
            )
            assert found[1].dtype == torch.float32
            for one, other in zip(found, twin, strict=True):
                error = torch.linalg.vector_norm(one.float() - other.float())
                assert error <= loose * torch.linalg.vector_norm(other.float())
