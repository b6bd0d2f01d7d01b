"""Matches stored tensors with the tensors of the model; all checks use only headers.

Known formats are this project's checkpoints, Kimi K2.5's names, and DeepSeek-V3's names. K2 and
Moonlight use the latter, as does `save_pretrained` of transformers' `DeepseekV3ForCausalLM`: the
same names without `language_model.`, and no vision encoder. A matrix may be INT4 (`weights.int4`)
or FP8 (`weights.fp8`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.weights import fp8, int4
from kimi_pretrain.weights.shapes import LANGUAGE, SIGLIP, VISION, Shapes
from kimi_pretrain.weights.weight_reader import TensorHeader, WeightReader, and_more

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPTIMIZER = "optim."
MASTER = "optim.master."
# Constants that some releases include; they are computed here.
DERIVED = (".rotary_emb.inv_freq",)
_PART = 1 << 22  # numbers that are checked at a time


@dataclass(frozen=True)
class Weights:
    """Stored tensors matched with a model's tensors.

    Attributes:
        reader: reader of the folder that holds them.
        sources: name in the model -> the stored tensor, or the tensors of a quantised matrix: two
            for FP8, three for INT4.
        absent: parts of the model that are not stored: those of the vision encoder, or none.
    """

    reader: WeightReader
    sources: Mapping[str, tuple[str, ...]]
    absent: tuple[str, ...]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a dtype, made from the most exact stored form.

        If the dtype is wider than the stored weight and the optimizer has a master copy, use the
        master copy; otherwise use the weight itself, which the model computed with.

        Raises:
            CheckpointError: a number is not finite or too large for the dtype, or an INT4 matrix
                states a different shape.
        """
        sources = self.sources[name]
        if self.from_master(name, dtype):
            sources = (MASTER + name,)
        tensor = self._made(name, sources)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return tensor.to(dtype)  # widening is exact
        return check_finite(tensor.to(dtype), self.reader.place(sources[0]))

    def from_master(self, name: str, dtype: torch.dtype) -> bool:
        """Return True if `read` uses the optimizer's master copy of a tensor."""
        held = self.reader.headers.get(MASTER + name)
        now = self.reader.headers[self.sources[name][0]].dtype
        return held is not None and torch.promote_types(now, dtype) != now

    def _made(self, name: str, sources: tuple[str, ...]) -> Tensor:
        """Build a tensor of the model from its stored tensors."""
        first = self.reader.read(sources[0])
        if len(sources) == 1:
            return check_finite(first, self.reader.place(sources[0]))
        scale = self.reader.read(sources[1])
        if len(sources) == 2:
            return check_finite(fp8.dequantize(first, scale), self.reader.place(sources[0]))
        tensor, shape = int4.dequantize(first, scale), self.reader.read(sources[2])
        if shape.tolist() != list(tensor.shape):
            raise CheckpointError(
                f"{self.reader.place(sources[2])} is {shape.tolist()}, {sources[0]} holds "
                f"{list(tensor.shape)}"
            )
        return check_finite(tensor, self.reader.place(sources[1]))

    @property
    def quantized(self) -> str | None:
        """Quantisation of the matrices, "FP8" or "INT4"; None if there is none."""
        parts = max(map(len, self.sources.values()))
        return {1: None, 2: "FP8", 3: "INT4"}[parts]


def check_finite(tensor: Tensor, where: str) -> Tensor:
    """Return the tensor unchanged if all its numbers are finite.

    Raises:
        CheckpointError: a number in it is not finite.
    """
    for number, part in enumerate(tensor.reshape(-1).split(_PART)):  # isfinite allocates copies
        finite = torch.isfinite(part)
        if finite.all():
            continue
        place = int((~finite).nonzero()[0])
        index = torch.unravel_index(torch.tensor(number * _PART + place), tensor.shape)
        raise CheckpointError(
            f"{where}{[int(i) for i in index]} is {part[place].item()}: expected finite numbers"
        )
    return tensor


def match(reader: WeightReader, shapes: Shapes) -> Weights:
    """Find every tensor of a model among the stored tensors.

    The vision encoder may be absent, but only as a whole.

    Args:
        shapes: shapes of the model's tensors, by name.

    Raises:
        CheckpointError: tensors are missing, unexpected, of another shape or not floating point;
            one message with the first tensor of each kind and the number of further tensors.
    """
    headers = reader.headers
    prefixed = any(name.startswith(LANGUAGE) for name in headers)
    absent = () if any(name.startswith(VISION) for name in headers) else VISION
    wanted = {name: shape for name, shape in shapes.items() if not name.startswith(absent)}
    sources = {
        name: _sources(name if prefixed else name.removeprefix(LANGUAGE), headers)
        for name in wanted
    }
    problems = [
        *_count("missing", (s[0] for s in sources.values() if s[0] not in headers)),
        *_count("unexpected", _unexpected(headers, sources.values())),
    ]
    wrong = [problem for name in wanted for problem in _wrong(sources[name], wanted[name], headers)]
    if wrong:
        problems.append(wrong[0] + and_more(len(wrong) - 1))
    if problems:
        hint = _hint(headers)
        raise CheckpointError(f"{reader.where} does not fit the model: {'; '.join(problems)}{hint}")
    parts = tuple(part.rstrip(".") for part in absent)
    return Weights(reader, sources, parts)


def _sources(name: str, headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
    base, _, last = name.rpartition(".")
    packed = tuple(f"{base}.{part}" for part in int4.PARTS)
    if name not in headers and last == "weight" and packed[0] in headers:
        return packed
    scale = f"{base}.{fp8.SCALE}"
    if name in headers and (headers[name].dtype == fp8.DTYPE or scale in headers):
        return name, scale
    return (name,)


def _unexpected(
    headers: Mapping[str, TensorHeader], sources: Iterable[tuple[str, ...]]
) -> Iterable[str]:
    known = {name for some in sources for name in some}
    for name in headers:
        other = name.startswith((OPTIMIZER, SIGLIP)) or name.endswith(DERIVED)
        if name not in known and not other:
            yield name


def _count(kind: str, names: Iterable[str]) -> list[str]:
    """Return ["3 tensors missing, first 'a'"], or [] if there are no names."""
    if not (found := list(names)):
        return []
    count = f"{len(found):,} tensors" if len(found) > 1 else "1 tensor"
    return [f"{count} {kind}, first {found[0]!r}"]


def _wrong(
    sources: tuple[str, ...], shape: tuple[int, ...], headers: Mapping[str, TensorHeader]
) -> Iterable[str]:
    """Yield the problems with the stored tensors of one model tensor."""
    try:
        shapes, types = _forms(len(sources), shape)
    except ValueError as error:
        yield f"{sources[0]!r}: {error}"
        return
    expected = dict(zip(sources, zip(shapes, types, strict=True), strict=True))
    for name, (wanted, types) in expected.items():
        header = headers.get(name)
        if header is None:
            if len(sources) > 1:
                yield f"{name!r} is missing beside {sources[0]!r}"
        elif header.shape != wanted:
            yield f"{name!r} has shape {list(header.shape)}, expected {list(wanted)}"
        elif header.dtype not in types:
            yield f"{name!r} is {_type(header.dtype)}, expected {' or '.join(map(_type, types))}"


def _forms(
    parts: int, shape: tuple[int, ...]
) -> tuple[Sequence[tuple[int, ...]], Sequence[tuple[torch.dtype, ...]]]:
    """Return shapes and allowed dtypes of the stored tensors that make up a tensor."""
    if parts == 1:
        return (shape,), (FLOATS,)
    if parts == 2:
        return (shape, fp8.scale_shape(shape)), ((fp8.DTYPE,), (torch.float32,))
    types = ((torch.int32,), FLOATS, (torch.int32, torch.int64))
    return tuple(int4.packed_shapes(shape).values()), types


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hint(headers: Mapping[str, TensorHeader]) -> str:
    if any("language_model.model.blocks." in name for name in headers):
        return (
            "; these are the names that save_pretrained of transformers' Kimi K2.5 class gets "
            "wrong: export it under the released names"
        )
    return ""
