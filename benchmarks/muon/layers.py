"""Matrices of one mixture-of-experts layer that Muon trains, by name and shape. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kimi_pretrain.optim.groups import ModelShape, Rule

PREFIX = "language_model.model.layers.1."


@dataclass(frozen=True)
class Layer:
    """A layer of a published model with some of its experts.

    Attributes:
        title: title on the page.
        shapes: [rows, columns] by checkpoint name.
        model: head counts and widths, which determine how fused projections are split.
    """

    title: str
    shapes: dict[str, tuple[int, int]]
    model: ModelShape

    def rules(self) -> dict[str, Rule]:
        """Return the rule that splits each matrix."""
        return {name: self.model.rule_of(name, shape) for name, shape in self.shapes.items()}

    def pieces(self) -> list[tuple[int, int]]:
        """Return the shape of every matrix that is orthogonalised separately."""
        return [
            (piece.blocks * (piece.stop - piece.start), self.shapes[name][1])
            for name, rule in self.rules().items()
            for piece in rule.pieces
        ]

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(map(prod, self.shapes.values()))


def moonlight(experts: int, scale: int = 1) -> Layer:
    """Return a Moonlight-16B-A3B layer (arXiv:2502.16982, 64 experts), with sizes over `scale`."""
    hidden, heads = 2048 // scale, 16 // scale
    model = ModelShape(heads, 128, 64, 128, 512 // scale)
    attention = {
        "q_proj": (heads * 192, hidden),
        "kv_a_proj_with_mqa": (model.kv_lora_rank + 64, hidden),
        "kv_b_proj": (heads * 256, model.kv_lora_rank),
        "o_proj": (hidden, heads * 128),
    }
    mlp = _mlp(hidden, 1408 // scale, 2 * 1408 // scale, experts, router=64)
    return Layer(f"a Moonlight layer, {experts} of its 64 experts", _named(attention, mlp), model)


def k2(experts: int, scale: int = 1) -> Layer:
    """Return a Kimi K2 layer (arXiv:2507.20534, 384 experts), with sizes over `scale`."""
    hidden, heads, q_rank = 7168 // scale, 64 // scale, 1536 // scale
    model = ModelShape(heads, 128, 64, 128, 512 // scale)
    attention = {
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * 192, q_rank),
        "kv_a_proj_with_mqa": (model.kv_lora_rank + 64, hidden),
        "kv_b_proj": (heads * 256, model.kv_lora_rank),
        "o_proj": (hidden, heads * 128),
    }
    mlp = _mlp(hidden, 2048 // scale, 2048 // scale, experts, router=384)
    return Layer(f"a Kimi K2 layer, {experts} of its 384 experts", _named(attention, mlp), model)


def _mlp(
    hidden: int, expert: int, shared: int, experts: int, router: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "mlp.gate", (router, hidden)
    kinds = [(f"experts.{i}", expert) for i in range(experts)] + [("shared_experts", shared)]
    for kind, width in kinds:
        yield f"mlp.{kind}.gate_proj", (width, hidden)
        yield f"mlp.{kind}.up_proj", (width, hidden)
        yield f"mlp.{kind}.down_proj", (hidden, width)


def _named(
    attention: dict[str, tuple[int, int]], mlp: Iterator[tuple[str, tuple[int, int]]]
) -> dict[str, tuple[int, int]]:
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()} | dict(mlp)
    return {f"{PREFIX}{name}.weight": shape for name, shape in shapes.items()}
