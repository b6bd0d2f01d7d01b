"""The safetensors format: we read what the library writes, and the library reads what we write."""

import json
import struct
from io import BytesIO
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from moonvit3d.safetensors_io import (
    FileLayout,
    SafetensorsError,
    TensorEntry,
    bytes_of,
    entry_of,
    header_length,
    layout_of,
    parse_header,
    split_by_size,
    tensor_at,
    torch_dtypes,
    wide_first,
    write_tensors,
)

GOLDEN = (
    b"\xa8\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt","sizes":"{\\"x\\": 1}"},'
    b'"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    b'"b":{"dtype":"I8","shape":[4],"data_offsets":[8,12]}}       '
)
SHAPES = [(), (3,), (2, 5), (0, 4), (1, 1, 7)]


def example() -> dict[str, torch.Tensor]:
    """Return tensors of every type in every shape; random bits include NaNs of all kinds."""
    draw, found = torch.Generator().manual_seed(0), {}
    for number, (name, dtype) in enumerate(torch_dtypes().items()):
        shape = SHAPES[number % len(SHAPES)]
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (prod(shape), dtype.itemsize), generator=draw)
        found[f"{name}.{number}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    return found


def laid_out(tensors: dict[str, torch.Tensor]) -> FileLayout:
    return layout_of(
        wide_first({name: entry_of(name, t.shape, t.dtype) for name, t in tensors.items()})
    )


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    layout = laid_out(tensors)
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    buffer[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
    for name, entry in layout.entries.items():
        tensor_at(buffer, entry).copy_(tensors[name])
    return buffer.numpy().tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.contiguous()))


def test_the_library_reads_what_is_laid_out_here():
    tensors = example()
    found = load(written(tensors))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def test_tensors_written_one_at_a_time_are_the_same_file():
    tensors, out, counts = example(), BytesIO(), []
    turned = {name: tensor.t() for name, tensor in tensors.items() if tensor.dim() == 2}
    tensors |= {f"turned.{name}": tensor for name, tensor in turned.items()}
    layout = laid_out(tensors)
    write_tensors(out, layout, tensors.__getitem__, counts.append)
    assert out.getvalue() == written(tensors)
    assert len(out.getvalue()) == layout.size == len(layout.head) + sum(counts)


def test_the_bytes_of_a_header_stay_as_they_are():
    """Checkpoints and exports are compared as files: equal tensors must give equal bytes."""
    entries = {"b": TensorEntry("I8", (4,)), "a": TensorEntry("F32", (2, 1))}
    layout = layout_of(wide_first(entries), {"sizes": '{"x": 1}'})
    assert layout.head == GOLDEN
    assert layout.size == len(GOLDEN) + 12
    assert layout_of(entries).entries["a"].offset == layout_of(entries).size - 8  # order as given


@given(st.dictionaries(st.text("abc"), st.integers(0, 40)), st.integers(1, 50))
def test_files_are_of_about_the_wanted_size(sizes, limit):
    files = split_by_size(sizes, limit)
    assert [name for names in files for name in names] == list(sizes)
    for names in files:
        assert len(names) == 1 or sum(sizes[name] for name in names) <= limit
    for names, (following, *_) in pairwise(files):
        assert sum(sizes[name] for name in [*names, following]) > limit


def test_what_the_library_writes_is_read_here():
    tensors = example()
    data = save(tensors)
    length = header_length(data[:8], len(data), "there")
    entries = parse_header(data[8 : 8 + length], len(data), "there")
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name, tensor in tensors.items():
        assert bits(tensor_at(buffer.clone(), entries[name]).clone()) == bits(tensor), name


def test_every_tensor_is_aligned():
    sizes = zip(range(1, 17), torch_dtypes().values(), strict=True)
    tensors = {f"{size}": torch.zeros(size, dtype=dtype) for size, dtype in sizes}
    layout = laid_out(tensors)
    for name, entry in layout.entries.items():
        assert entry.offset % tensors[name].element_size() == 0


def header(**changes) -> tuple[bytes, int]:
    """Return a header of two tensors, 8 and 4 bytes, with changes, and the size of the file."""
    values = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "I8", "shape": [4], "data_offsets": [8, 12]},
    }
    for key, value in changes.items():
        values[key[0]][{"d": "dtype", "s": "shape", "o": "data_offsets"}[key[1]]] = value
    text = json.dumps(values).encode()
    return text, 8 + len(text) + 12


def test_a_sound_header_is_read():
    text, size = header()
    entries = parse_header(text, size, "there")
    assert entries["b"].offset == size - 4


@pytest.mark.parametrize(
    "changes",
    [
        {"ad": "F31"}, {"ad": None}, {"ad": ["F32"]}, {"as": [-2]}, {"as": [2.0]}, {"as": "2"},
        {"as": [True, 2]}, {"as": [3]}, {"as": [1 << 63]}, {"as": [1] * 99}, {"ao": [0, 9]},
        {"ao": [0]}, {"ao": [4, 12]}, {"ao": [8, 0]}, {"ao": [-8, 0]}, {"bo": [4, 8]},
        {"bo": [12, 16]}, {"bo": [1 << 61, (1 << 61) + 4]}, {"bs": [0], "bo": [8, 8]},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_refused(changes):
    text, size = header(**changes)
    with pytest.raises(SafetensorsError, match="^there: "):
        parse_header(text, size, "there")


@pytest.mark.parametrize("size", [8, 1 << 40])
def test_a_file_that_is_cut_off_or_longer_is_refused(size):
    with pytest.raises(SafetensorsError, match="its header tells of"):
        parse_header(header()[0], size, "there")


@given(st.binary(max_size=16), st.integers(0, 100))
def test_the_length_of_a_header_is_inside_the_file(prefix, size):
    try:
        length = header_length(prefix[:8], size, "there")
    except SafetensorsError:
        return
    assert length == struct.unpack("<Q", prefix[:8])[0]
    assert 8 + length <= size


@given(st.binary(max_size=200))
def test_rubbish_is_refused_and_nothing_else_happens(text):
    with pytest.raises(SafetensorsError):
        parse_header(text, len(text) + 8 + 1, "there")
