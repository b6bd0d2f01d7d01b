"""Which stored tensors make up which tensor of the model; everything checked by headers alone.

Known are checkpoints of ours, Kimi K2.5's names, and DeepSeek-V3's, which K2 and Moonlight have and
`save_pretrained` of transformers' `DeepseekV3ForCausalLM` writes: the same names without
`language_model.`, and no vision encoder. A matrix may be INT4 (`weights.int4`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.weights import int4
from kimi_pretrain.weights.shapes import LANGUAGE, VISION, Shapes
from kimi_pretrain.weights.stored import Header, StoredTensors, more

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPTIMIZER = "optim."
MASTER = "optim.master."
# Constants that some releases carry along: computed here.
DERIVED = (".rotary_emb.inv_freq",)
_PART = 1 << 22  # numbers that are looked at together


@dataclass(frozen=True)
class Weights:
    """Stored tensors matched with a model's.

    Attributes:
        stored: where they lie.
        sources: name in the model -> the stored tensor, or the three of an INT4 matrix.
        absent: parts of the model of which nothing is stored: the vision encoder's, or none.
    """

    stored: StoredTensors
    sources: Mapping[str, tuple[str, ...]]
    absent: tuple[str, ...]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a type, made from the most exact form that is stored.

        Where the wanted type is wider than the stored one, and an optimizer's master copy is there,
        that is taken; otherwise the weight itself, which the model computed with.

        Raises:
            CheckpointError: a number is not finite, or too large for the type; or an INT4 matrix
                states another shape.
        """
        sources = self.sources[name]
        if self.from_master(name, dtype):
            sources = (MASTER + name,)
        tensor = self._made(sources)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return tensor.to(dtype)  # widening changes no number
        return check_finite(tensor.to(dtype), self.stored.place(sources[0]))

    def from_master(self, name: str, dtype: torch.dtype) -> bool:
        """Whether `read` takes the optimizer's master copy of a tensor."""
        held = self.stored.headers.get(MASTER + name)
        now = self.stored.headers[self.sources[name][0]].dtype
        return held is not None and torch.promote_types(now, dtype) != now

    def _made(self, sources: tuple[str, ...]) -> Tensor:
        first = self.stored.read(sources[0])
        if len(sources) == 1:
            return check_finite(first, self.stored.place(sources[0]))
        scale, shape = map(self.stored.read, sources[1:])
        tensor = int4.dequantize(first, scale)
        if shape.tolist() != list(tensor.shape):
            raise CheckpointError(
                f"{self.stored.place(sources[2])} is {shape.tolist()}, {sources[0]} holds "
                f"{list(tensor.shape)}"
            )
        return check_finite(tensor, self.stored.place(sources[1]))

    @property
    def has_int4(self) -> bool:
        """Whether any matrix is INT4."""
        return any(len(sources) > 1 for sources in self.sources.values())


def check_finite(tensor: Tensor, where: str) -> Tensor:
    """Return the tensor.

    Raises:
        CheckpointError: a number in it is not finite.
    """
    for number, part in enumerate(tensor.reshape(-1).split(_PART)):  # the test makes copies
        finite = torch.isfinite(part)
        if finite.all():
            continue
        place = int((~finite).nonzero()[0])
        index = torch.unravel_index(torch.tensor(number * _PART + place), tensor.shape)
        raise CheckpointError(
            f"{where}{[int(i) for i in index]} is {part[place].item()}: expected finite numbers"
        )
    return tensor


def match(stored: StoredTensors, shapes: Shapes) -> Weights:
    """Find every tensor of a model among the stored ones.

    The vision encoder may be absent, but only whole.

    Args:
        shapes: the model's, by name.

    Raises:
        CheckpointError: tensors missing, unexpected, of another shape or no floats: one message,
            with the first of each kind and how many more there are.
    """
    headers = stored.headers
    prefixed = any(name.startswith(LANGUAGE) for name in headers)
    absent = () if any(name.startswith(VISION) for name in headers) else VISION
    wanted = {name: shape for name, shape in shapes.items() if not name.startswith(absent)}
    sources = {
        name: _sources(name if prefixed else name.removeprefix(LANGUAGE), headers)
        for name in wanted
    }
    problems = [
        *_told("missing", (s[0] for s in sources.values() if s[0] not in headers)),
        *_told("unexpected", _unexpected(headers, sources.values())),
    ]
    wrong = [told for name in wanted for told in _wrong(sources[name], wanted[name], headers)]
    if wrong:
        problems.append(wrong[0] + more(len(wrong) - 1))
    if problems:
        hint = _hint(headers)
        raise CheckpointError(f"{stored.where} does not fit the model: {'; '.join(problems)}{hint}")
    parts = tuple(part.rstrip(".") for part in absent)
    return Weights(stored, sources, parts)


def _sources(name: str, headers: Mapping[str, Header]) -> tuple[str, ...]:
    base, _, last = name.rpartition(".")
    packed = tuple(f"{base}.{part}" for part in int4.PARTS)
    if name not in headers and last == "weight" and packed[0] in headers:
        return packed
    return (name,)


def _unexpected(headers: Mapping[str, Header], sources: Iterable[tuple[str, ...]]) -> Iterable[str]:
    known = {name for some in sources for name in some}
    for name in headers:
        if name not in known and not name.startswith(OPTIMIZER) and not name.endswith(DERIVED):
            yield name


def _told(kind: str, names: Iterable[str]) -> list[str]:
    """ "3 tensors missing, first 'a'", or nothing."""
    if not (found := list(names)):
        return []
    count = f"{len(found):,} tensors" if len(found) > 1 else "1 tensor"
    return [f"{count} {kind}, first {found[0]!r}"]


def _wrong(
    sources: tuple[str, ...], shape: tuple[int, ...], headers: Mapping[str, Header]
) -> Iterable[str]:
    """Say what is wrong with the stored tensors of one of the model's."""
    if len(sources) == 1:
        expected = {sources[0]: (shape, FLOATS)}
    else:
        try:
            packed = int4.packed_shapes(shape)
        except ValueError as error:
            yield f"{sources[0]!r}: {error}"
            return
        types = ((torch.int32,), FLOATS, (torch.int32, torch.int64))
        expected = dict(zip(sources, zip(packed.values(), types, strict=True), strict=True))
    for name, (wanted, types) in expected.items():
        header = headers.get(name)
        if header is None:
            if len(sources) > 1:
                yield f"{name!r} is missing beside {sources[0]!r}"
        elif header.shape != wanted:
            yield f"{name!r} has shape {list(header.shape)}, expected {list(wanted)}"
        elif header.dtype not in types:
            yield f"{name!r} is {_type(header.dtype)}, expected {' or '.join(map(_type, types))}"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hint(headers: Mapping[str, Header]) -> str:
    if any("language_model.model.blocks." in name for name in headers):
        return (
            "; these are the names that save_pretrained of transformers' Kimi K2.5 class gets "
            "wrong: export it under the released names"
        )
    if any(name.endswith(".weight_scale_inv") for name in headers):
        return "; FP8 weights are not read: convert them to bfloat16 first"
    return ""
