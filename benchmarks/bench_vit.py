"""Compares MoonViT-3D with transformers' Kimi_K25VisionModel in speed and memory.

Both use the same weights and items in one process and take turns. Each figure is the best of its
repeats. transformers cannot process several frame counts in one call, so it gets one call for each.
Outputs are compared before anything is timed. Writes a result file with versions and date.

    python benchmarks/bench_vit.py                     # 3 of 27 layers on CPU, all layers on CUDA
    python benchmarks/bench_vit.py --mix icons --dtype bfloat16
    python benchmarks/bench_vit.py --layers 27 --repeats 1
"""

import argparse
import math
import platform
import random
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

from benchmarks.device import peak_bytes, wall_seconds
from benchmarks.result import RESULTS, processor, write
from moonvit3d.attention import choose
from moonvit3d.config import MoonViTConfig
from moonvit3d.flops import flops
from moonvit3d.layouts import to_transformers
from moonvit3d.model import VisionEncoder, initialise, normalise

Grid = tuple[int, int, int]


# The items ----------------------------------------------------------------------------------------


def heavy_tailed(patches: int, largest: int) -> list[Grid]:
    """Return grids with the sizes of a real mixture, cut off at `largest` patches.

    The distribution is log-normal with a median of 1,660 patches; a tenth of the items exceed
    18,500. Half of the items above 64 patches are video chunks of 2 to 4 frames.
    """
    draw = random.Random(0)
    grids: list[Grid] = []
    while sum(math.prod(grid) for grid in grids) < patches:
        size = min(float(largest), math.exp(draw.gauss(math.log(1660), 1.88)))
        frames = draw.choice([1, 1, 1, 1, 2, 3, 4, 4]) if size > 64 else 1
        ratio = math.exp(draw.gauss(0, 0.4))
        side = math.sqrt(size / frames)
        height, width = (max(2, 2 * round(side * r / 2)) for r in (ratio, 1 / ratio))
        grids.append((frames, min(height, 512), min(width, 512)))
    return grids


def icons(patches: int, _largest: int) -> list[Grid]:
    """Return grids of small pictures, 28 to 56 pixels a side: 4 to 16 patches."""
    draw = random.Random(0)
    return [(1, draw.choice([2, 2, 4]), draw.choice([2, 4, 4])) for _ in range(patches // 9)]


def digits(patches: int, _largest: int) -> list[Grid]:
    """Return grids of one size, 56 x 56 pixels: 16 patches."""
    return [(1, 4, 4)] * (patches // 16)


MIXES = {"heavy_tailed": heavy_tailed, "icons": icons, "digits": digits}


# The two sides ------------------------------------------------------------------------------------


def peer(encoder: VisionEncoder) -> torch.nn.ModuleDict:
    """Return transformers' tower and projector with the weights of `encoder`."""
    config, weight = encoder.config, next(encoder.parameters())
    vision = kimi.Kimi_K25VisionConfig(
        pos_emb_height=config.pos_grid, pos_emb_width=config.pos_grid,
        num_attention_heads=config.heads, num_hidden_layers=config.depth,
        hidden_size=config.width, intermediate_size=config.mlp_width,
        rope_parameters={"rope_type": "axial", "rope_theta": config.rope_theta},
    )  # fmt: skip
    # Use the fastest attention of transformers: flash-attn if installed, otherwise torch's fused
    # attention item by item.
    flash = weight.is_cuda and transformers.utils.is_flash_attn_2_available()
    vision._attn_implementation = "flash_attention_2" if flash else "sdpa"
    sizes = SimpleNamespace(
        vision_config=vision, projection_hidden_size=config.width,
        projection_layer_norm_eps=config.norm_eps,
        text_config=SimpleNamespace(hidden_size=config.out_width),
    )  # fmt: skip
    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {
                "vision_tower": kimi.Kimi_K25VisionModel(vision),
                "mm_projector": kimi.Kimi_K25MultimodalProjection(sizes),
            }
        )
    buffers = {name: b for name, b in _fresh_buffers(vision).items()}
    model.to_empty(device=weight.device).to(weight.dtype)
    model.load_state_dict(to_transformers(encoder.state_dict(), config), strict=True)
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        getattr(model["vision_tower"].get_submodule(owner), leaf).data = value.to(weight.device)
    return model.train()


def _fresh_buffers(vision: Any) -> dict[str, Tensor]:
    """Return non-weight tables (frequencies, temporal code), which meta construction loses."""
    small = kimi.Kimi_K25VisionConfig(**{**vision.to_dict(), "num_hidden_layers": 0})
    return dict(kimi.Kimi_K25VisionModel(small).named_buffers())


def calls(encoder: VisionEncoder, other: torch.nn.ModuleDict, grids: list[Grid], chunk: int):
    """Return the two functions to compare. Both start from pixels on the device."""
    weight = next(encoder.parameters())
    sizes = [math.prod(grid) for grid in grids]
    generator = torch.Generator().manual_seed(0)
    shape = (sum(sizes), 3, 14, 14)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    ready = normalise(raw, weight.dtype).to(weight.device)
    groups = []
    for frames in sorted({grid[0] for grid in grids}):
        mine = [i for i, grid in enumerate(grids) if grid[0] == frames]
        pieces = ready.split(sizes)
        table = torch.tensor([grids[i] for i in mine], device=weight.device)
        groups.append((torch.cat([pieces[i] for i in mine]), table))

    def ours() -> list[Tensor]:
        # Chunks bound the memory when no graph is kept. With a graph they have no benefit.
        return [encoder(ready, grids, None if torch.is_grad_enabled() else chunk)]

    def theirs() -> list[Tensor]:
        merged = [other["vision_tower"](*group).pooler_output for group in groups]
        return [other["mm_projector"](each).flatten(0, 1) for each in merged]

    return ours, theirs


def difference(ours: list[Tensor], theirs: list[Tensor], grids: list[Grid]) -> float:
    """Return the relative distance of the outputs; `theirs` is sorted by frame count."""
    order = sorted(range(len(grids)), key=lambda i: grids[i][0])
    pieces = ours[0].split([h * w // 4 for _, h, w in grids])
    one, other = torch.cat([pieces[i] for i in order]).double(), torch.cat(theirs).double()
    return float((one - other).norm() / other.norm())


# Measuring ----------------------------------------------------------------------------------------


def run(call: Callable[[], list[Tensor]], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        out = call()
        if backward:
            torch.autograd.backward(out, [torch.ones_like(each) for each in out])


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a square matrix product, the best of six."""
    side = 8192 if device.type == "cuda" else 3072
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best = min(wall_seconds(lambda: a @ b, device) for _ in range(6))
    return 2 * side**3 / best


def measure(args: argparse.Namespace, mix: str, encoder: VisionEncoder, other: Any) -> list[dict]:
    weight = next(encoder.parameters())
    grids = MIXES[mix](args.patches, args.largest)
    patches = sum(math.prod(grid) for grid in grids)
    operations = float(sum(part.sum() for part in flops(grids, encoder.config)))
    both = calls(encoder, other, grids, max(args.chunk, max(math.prod(g) for g in grids)))
    with torch.no_grad():
        apart = difference(both[0](), both[1](), grids)
    rows = []
    for backward in (False, True):
        memory = [peak_bytes(partial(run, call, backward), weight.device) for call in both]
        peak, times = 0.0, [math.inf, math.inf]
        for _ in range(args.repeats):  # interleaved, so that a load spike affects both
            peak = max(peak, matmul_peak(weight.dtype, weight.device))
            for side, call in enumerate(both):
                once = wall_seconds(partial(run, call, backward), weight.device)
                times[side] = min(times[side], once)
        work = operations * (3 if backward else 1)
        sides = {
            name: {
                "seconds": round(times[i], 4),
                "items_per_s": round(len(grids) / times[i], 2),
                "patches_per_s": round(patches / times[i], 1),
                "tflop_per_s": round(work / times[i] / 1e12, 4),
                "of_matmul_peak": round(work / times[i] / peak, 3),
                "peak_MiB": round(memory[i] / 2**20, 1),
            }
            for i, name in enumerate(("moonvit3d", "transformers"))
        }
        row = {
            "mix": mix, "items": len(grids), "patches": patches,
            "pass": "forward+backward" if backward else "forward",
            "speed_ratio": round(times[1] / times[0], 3),
            "memory_ratio": round(memory[0] / memory[1], 3),
            "outputs_apart": float(f"{apart:.1e}"),
            "matmul_peak_tflop_per_s": round(peak / 1e12, 4), **sides,
        }  # fmt: skip
        rows.append(row)
        ours, theirs = sides["moonvit3d"], sides["transformers"]
        print(
            f"{mix:13}{len(grids):6} items {patches:8} patches  {row['pass']:17}"
            f" x{row['speed_ratio']:<6} of peak {ours['of_matmul_peak']:.2f} against"
            f" {theirs['of_matmul_peak']:.2f}; memory x{row['memory_ratio']}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--mix", choices=[*MIXES, "all"], default="all")
    parser.add_argument("--patches", type=int, default=200_000 if cuda else 4_000)
    parser.add_argument("--largest", type=int, default=16_384 if cuda else 2_048)
    parser.add_argument("--layers", type=int, default=27 if cuda else 3)
    parser.add_argument("--width", choices=["full", "tiny"], default="full")
    parser.add_argument("--chunk", type=int, default=65_536 if cuda else 1_792)
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/vit_<device>.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    tiny = {"width": 128, "heads": 4, "mlp_width": 256, "out_width": 256}
    config = MoonViTConfig(depth=args.layers, **(tiny if args.width == "tiny" else {}))
    encoder = VisionEncoder(config)
    initialise(encoder, 0)
    encoder.to(device=device, dtype=dtype)
    other = peer(encoder)
    mixes = list(MIXES) if args.mix == "all" else [args.mix]
    rows = [row for mix in mixes for row in measure(args, mix, encoder, other)]
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
    cpu = f"{processor()}, {platform.machine()}"
    report = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        "threads": args.threads, "dtype": args.dtype, "width": config.width,
        "layers": args.layers, "largest_item": args.largest,
        "max_patches_per_chunk": args.chunk, "repeats": args.repeats,
        "attention": {
            "moonvit3d": choose(device.type, dtype, config.head_dim, capability)[0].__name__,
            "transformers": other["vision_tower"].config._attn_implementation,
        },
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "results": rows,
    }  # fmt: skip
    out = args.out or RESULTS / f"vit_{device.type}.json"
    write(report, out)


if __name__ == "__main__":
    main()
