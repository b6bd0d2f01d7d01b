"""`layout` section of the configuration: arrangement of the processes, and layers of each stage."""

import re

from pydantic import Field

from typed_config.section import Section


class LayoutConfig(Section):
    """Arrangement of the processes: pp stages x dp replicas x cp x tp ranks of a row.

    `cp` ranks share the tokens of a row, `tp` ranks the heads and widths of a layer. Experts are
    spread over `ep` of the dp x cp x tp ranks of a stage.
    """

    pp: int = Field(default=1, gt=0)
    """Pipeline stages. [stages; kimi_pretrain/engine/mesh.py]"""
    vpp: int = Field(default=1, gt=0)
    """Virtual stages per pipeline stage (interleaved 1F1B).
    [chunks; kimi_pretrain/engine/model_builder.py]"""
    dp: int = Field(default=1, gt=0)
    """Data-parallel replicas. [replicas; kimi_pretrain/engine/mesh.py]"""
    ep: int = Field(default=1, gt=0)
    """Ranks that the experts of a layer are spread over; divides dp x cp x tp.
    [ranks; kimi_pretrain/engine/mesh.py]"""
    cp: int = Field(default=1, gt=0)
    """Context-parallel ranks, which share the tokens of a row.
    [ranks; kimi_pretrain/engine/mesh.py]"""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks, which share the heads and widths of a layer.
    [ranks; kimi_pretrain/engine/mesh.py]"""
    overlap_experts: bool = False
    """Overlap the all-to-alls of the experts with the computation of another microbatch
    (Megatron-Core's combined 1F1B). Needs ep > 1, and vpp > 1 if pp > 1; a rank holds one more
    microbatch of a virtual stage. [-; kimi_pretrain/engine/model_builder.py]"""
    stages: str | None = None
    """Megatron-Core's layout string ("E" embedding, "t" a layer, "L" the loss, "|" between chunks,
    "(tt|)*3" repeats), needed if the layers do not divide evenly over pp x vpp chunks.
    [-; kimi_pretrain/engine/model_builder.py]"""

    def world_size(self) -> int:
        """Return the number of processes, one per GPU."""
        return self.pp * self.dp * self.cp * self.tp


def expand_stages(stages: str) -> list[str]:
    """Return the chunks of a layout string: "Et|(tt|)*2tL" -> ["Et", "tt", "tt", "tL"]."""
    repeated = re.compile(r"\(([^()]*)\)\*(\d+)|([Et|L])\*(\d+)")
    text = stages.replace(" ", "").replace(",", "")
    while match := repeated.search(text):
        group, times, single, many = match.groups()
        piece = group * int(times) if times else single * int(many)
        text = text[: match.start()] + piece + text[match.end() :]
    return text.split("|")


def chunks_of(layout: LayoutConfig, num_layers: int) -> list[tuple[range, bool]]:
    """Return the layers of each of the pp x vpp chunks, in model order, and whether the chunk
    computes the loss.
    """
    count = layout.pp * layout.vpp
    if layout.stages is None:
        sizes = [num_layers // count] * count
    else:
        sizes = [chunk.count("t") for chunk in expand_stages(layout.stages)]
    ends = [sum(sizes[: n + 1]) for n in range(count)]
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [(layers, n == count - 1) for n, layers in enumerate(ranges)]


def even_stages(num_layers: int, chunks: int) -> str | None:
    """Return a layout string with equal chunks, except for the last (its loss costs about two
    layers) and then the first (it has the embedding); None if the layers divide evenly.

    Raises:
        ValueError: other chunks would need fewer layers, too.
    """
    each, rest = -(-num_layers // chunks), -num_layers % chunks
    if not rest:
        return None
    last = min(each, rest)
    first = min(each, rest - last)
    if chunks < 3 or rest > last + first:
        raise ValueError(f"{num_layers} layers do not divide over {chunks} chunks")
    middle = f"({'t' * each}|)*{chunks - 2}"
    return f"E{'t' * (each - first)}|{middle}{'t' * (each - last)}L"


def check_stages(stages: str, chunks: int, num_layers: int) -> None:
    """Refuse a layout string with other numbers of chunks or layers.

    Raises:
        ValueError: the message says what the string has.
    """
    found = expand_stages(stages)
    where = f'layout.stages="{stages}"'
    if len(found) != chunks:
        raise ValueError(f"{where} has {len(found)} chunks; layout.pp x layout.vpp is {chunks}")
    if (layers := "".join(found).count("t")) != num_layers:
        raise ValueError(f"{where} has {layers} layers; model.language.num_layers is {num_layers}")
    if not re.fullmatch("Et*L", "".join(found)):
        raise ValueError(
            f'{where}: expected "E" (embedding) first, "L" (loss) last and "t" (layers) between'
        )
