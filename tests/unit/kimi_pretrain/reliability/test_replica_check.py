"""Tests that differing copies of tensors are found by their bits, with the ranks that hold them."""

import pytest
import torch

from kimi_pretrain.reliability.replica_check import CopyHash, check_copies, hash_bits, hash_order

SHAPES = [(), (1,), (3, 5), (1024,), (7, 1024), (2055,)]
TYPES = [torch.float32, torch.bfloat16, torch.float64]


def plain_hash(tensor: torch.Tensor) -> int:
    """Return the hash computed number by number with Python's integers."""
    size = 8 if tensor.nbytes % 8 == 0 else tensor.element_size()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(raw[at : at + size], "little", signed=True)
             for at in range(0, len(raw), size)]  # fmt: skip
    rows = len(words) // 1024
    total = sum(words[rows * 1024 :])
    total += sum((3 + 2 * row) * sum(words[row * 1024 : row * 1024 + 1024]) for row in range(rows))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_hash_is_that_of_plain_integers_and_sees_each_wrong_bit(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = int(hash_bits(tensor))
    assert found == plain_hash(tensor)
    raw = tensor.reshape(-1).view(torch.uint8)
    for at in {0, len(raw) // 2, len(raw) - 1}:
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert int(hash_bits(tensor)) != found
            raw[at] ^= 1 << bit
    assert int(hash_bits(tensor)) == found


def test_the_hash_is_of_the_numbers_wherever_they_lie():
    whole = torch.randn(6, 2049)
    for part in (whole[1, 1:], whole[:, ::3], whole.T):
        assert int(hash_bits(part)) == int(hash_bits(part.clone()))


def copies(*hashes: int, name: str = "x") -> list[tuple[CopyHash, ...]]:
    return [(CopyHash(0, name, found),) for found in hashes]


def test_copies_that_differ_are_named_with_their_ranks():
    check_copies(7, copies(5, 5, 5))
    check_copies(7, [(), ()])
    # Two stages may hold different tensors of one name.
    check_copies(7, [(CopyHash(0, "x", 1),), (CopyHash(1, "x", 2),)])
    with pytest.raises(RuntimeError, match=r"^step 7: x is one on ranks 0, 2, another on rank 1: "):
        check_copies(7, copies(5, 6, 5))
    many = copies(*(int(rank == 40) for rank in range(64)))
    with pytest.raises(RuntimeError, match=r"5, 6, 7 and 55 others, another on rank 40: "):
        check_copies(7, many)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(6, 8), (3, 5), (70, 2048)])
def test_at_the_start_order_and_signs_count_too(shape, dtype):
    """Neither a norm nor the sums of each step's hash can tell these tensors apart."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wrong = tensor.clone()
    wrong[-1, -1] = torch.nextafter(wrong[-1, -1], torch.tensor(9.0, dtype=dtype))
    signs = tensor.clone()
    signs[:2] *= -1
    others = [tensor.flip(0), tensor[:, list(range(1, shape[1])) + [0]], -tensor, signs, wrong]
    hashes = {int(hash_order(one)) for one in (tensor, *others)}
    assert len(hashes) == 6
    assert int(hash_order(tensor.clone())) in hashes
