"""Times the encoder on this machine, as input for `kimi-pretrain plan --calibrate`.

Single items of many sizes show how the cost grows with patches. Packs of many small items show the
cost per item, which is hidden in a pack of one by the cost of starting a pack. The work of a step
is a forward pass without graph, then a forward pass with graph and its backward pass.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kimi_pretrain.dep.cost import CostModel
from kimi_pretrain.dep.cost_fit import Grid, Pack, Timing
from moonvit3d import rows
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise

SMALLEST = 4  # patches of one token
PACKED_SIZES = (4, 16, 64, 256, 1024)  # patches of the items of a pack
PACKED_ITEMS = (32, 512)  # items per pack, as far as the chunk budget allows
FRAMES = 4  # frames of a video chunk
REPEATS = 5

# Runs a pack once and returns its (forward, total) seconds.
Run = Callable[[Pack], tuple[float, float]]
Progress = Callable[[float, str], None]
Result = TypeVar("Result")


def packs_of(image: int, frame: int, side: int, budget: int) -> list[Pack]:
    """Return the packs to measure: single images, video chunks of 4 frames, packs of small images.

    Args:
        image, frame, side: most patches of an image, of a video frame, and along a side.
        budget: most patches of a pack or an item.
    """
    image = max(SMALLEST, min(image, budget))
    singles = [_images(1, size, side) for size in _doubling(SMALLEST, image)]
    frame = min(frame, budget // FRAMES)
    chunks = [
        Pack((_grid(FRAMES, size, side),))
        for size in _doubling(SMALLEST, frame)[::2]
        if frame >= SMALLEST
    ]
    packs = [
        _images(min(items, budget // size), size, side)
        for size in PACKED_SIZES
        for items in PACKED_ITEMS
        if size <= image and budget // size > 1
    ]
    return list(dict.fromkeys([*singles, *chunks, *packs]))


def _doubling(smallest: int, largest: int) -> list[int]:
    """Return `smallest` and its doublings below `largest`, then `largest`."""
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return [*sizes, largest] if largest > sizes[-1] else sizes


def _images(count: int, patches: int, side: int) -> Pack:
    return Pack((_grid(1, patches, side),) * count)


def _grid(frames: int, patches: int, side: int) -> Grid:
    """Return a nearly square grid with even sides and at most `patches` patches per frame."""
    height = min(side, max(2, 2 * int(patches**0.5 / 2)))
    return frames, height, min(side, max(2, 2 * (patches // height // 2)))


@dataclass
class Measured:
    """Results of a measurement.

    Attributes:
        timings: in order of rising cost.
        left_out: packs that were not measured, with reasons.
        repeats: timed runs behind each median.
        seconds: total time, except for building the encoder and its very first run.
    """

    timings: list[Timing] = field(default_factory=list)
    left_out: list[tuple[Pack, str]] = field(default_factory=list)
    repeats: int = 0
    seconds: float = 0.0


def measure(
    packs: Sequence[Pack],
    run: Run,
    config: MoonViTConfig,
    max_seconds: float,
    repeats: int = REPEATS,
    progress: Progress = lambda share, what: None,
    filled: Callable[[int], int] = lambda patches: 0,
) -> Measured:
    """Time packs within a time limit, from cheap to expensive, each after a warm-up.

    A pack is tried only if its warm-up and one timed run of all packs still fit, estimated from the
    previous pack and the ratio of FLOPs. Each repeat visits all packs, so that a temporary slowdown
    of the machine affects all of them.

    Args:
        run: runs a pack once and returns its seconds, (forward, total).
        config: sizes of the encoder, for the order and the estimates.
        progress: called with the fraction done and the current activity.
        filled: returns the empty patches that the encoder adds to a pack of that many patches.

    Returns:
        medians over `repeats` runs, or over fewer if time was short.
    """
    found = Measured()
    warm = _warm_up(_by_cost(packs, config), run, max_seconds, found, progress)
    kept = list(warm)
    runs: dict[Pack, list[tuple[float, float]]] = {pack: [] for pack in kept}
    round_seconds = sum(warm.values())
    while kept and found.repeats < repeats:
        if found.repeats and found.seconds + round_seconds > max_seconds:
            break
        for number, pack in enumerate(kept):
            done = (1 + found.repeats + number / len(kept)) / (1 + repeats)
            progress(done, f"timing {pack.name}")
            runs[pack].append(run(pack))
            found.seconds += runs[pack][-1][1]
        found.repeats += 1
        round_seconds = sum(runs[pack][-1][1] for pack in kept)
    progress(1.0, "done")
    found.timings = [
        Timing(pack, median(f for f, _ in seen), median(t for _, t in seen), filled(pack.patches))
        for pack, seen in runs.items()
    ]
    return found


def _by_cost(packs: Sequence[Pack], config: MoonViTConfig) -> list[tuple[float, Pack]]:
    """Return (FLOPs, pack) in order of rising FLOPs."""
    flops = CostModel.from_flops(config, 1.0)
    costs = [(float(flops.seconds(pack.sizes).sum()), pack) for pack in packs]
    return sorted(costs, key=lambda pair: pair[0])


def _warm_up(
    costs: Sequence[tuple[float, Pack]],
    run: Run,
    max_seconds: float,
    found: Measured,
    progress: Progress,
) -> dict[Pack, float]:
    """Run each pack that fits once; return its seconds and add to `found`."""
    warm: dict[Pack, float] = {}
    if costs:
        run(costs[0][1])  # the very first run initialises libraries and is not counted
    last = (0.0, 0.0)
    for number, (work, pack) in enumerate(costs):
        progress(number / len(costs) / (1 + REPEATS), f"warming up {pack.name}")
        guess = last[1] * max(1.0, work / last[0]) if last[0] else 0.0
        if found.seconds + sum(warm.values()) + 2 * guess > max_seconds:
            found.left_out.append((pack, f"would take about {guess:.2g} s a run"))
            continue
        try:
            warm[pack] = run(pack)[1]
        except torch.OutOfMemoryError:
            found.left_out.append((pack, "does not fit into the memory of the device"))
            continue
        found.seconds += warm[pack]
        last = (work, warm[pack])
    return warm


class EncoderRun:
    """Runs packs through an encoder as a training step does; a `Run`.

    Args:
        frozen: parts that are not trained, "vision_tower" and "projector". A frozen tower does not
            run again for the backward pass; if both are frozen, a step is one forward pass.
    """

    def __init__(
        self,
        config: MoonViTConfig,
        dtype: torch.dtype,
        device: torch.device,
        frozen: Collection[str] = (),
    ):
        self.device = device
        self.encoder = VisionEncoder(config)
        initialise(self.encoder, 0)
        self.encoder.to(device=device, dtype=dtype)
        self._trains_tower = "vision_tower" not in frozen
        self._trains = self._trains_tower or "projector" not in frozen
        self.encoder.vision_tower.requires_grad_(self._trains_tower)
        self.encoder.mm_projector.requires_grad_("projector" not in frozen)
        for param in self.encoder.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_forget)
        self._pixels = np.zeros((0, 3, 14, 14), np.uint8)

    def __call__(self, pack: Pack) -> tuple[float, float]:
        """Return (forward, total) seconds of one run."""
        pixels, grids = self._images(pack.patches), list(pack.grids)
        forward, features = self._timed(lambda: self._forward(pixels, grids))
        if not self._trains:
            return forward, forward
        again, _ = self._timed(lambda: self._backward(pixels, grids, features))
        return forward, forward + again

    def filled(self, patches: int) -> int:
        """Return the number of empty patches that the encoder adds to a pack of `patches`."""
        return rows.padding(patches, self.device)

    def _forward(self, pixels: np.ndarray, grids: list[Grid]) -> Tensor | None:
        """Encode without a graph; return the features if the tower does not run again."""
        with torch.no_grad():
            features = self.encoder.vision_tower(self._on_device(pixels), grids)
            self.encoder.mm_projector(features, [h * w // 4 for _, h, w in grids])
        return None if self._trains_tower else features

    def _backward(self, pixels: np.ndarray, grids: list[Grid], features: Tensor | None) -> None:
        if features is None:
            features = self.encoder.vision_tower(self._on_device(pixels), grids)
        outputs = self.encoder.mm_projector(features, [h * w // 4 for _, h, w in grids])
        torch.autograd.backward(outputs, torch.ones_like(outputs))

    def _on_device(self, pixels: np.ndarray) -> Tensor:
        return torch.from_numpy(pixels).to(self.device)

    def _timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        self._wait()
        start = time.perf_counter()
        result = work()
        self._wait()
        return time.perf_counter() - start, result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _images(self, patches: int) -> np.ndarray:
        """Return noise; the content of the images does not affect the cost."""
        if len(self._pixels) < patches:
            generator = np.random.Generator(np.random.Philox(key=0))
            self._pixels = generator.integers(0, 256, (patches, 3, 14, 14), np.uint8)
        return self._pixels[:patches]


def _forget(param: Tensor) -> None:
    """Free a gradient once it is complete, as training does after adding it to its buffer."""
    param.grad = None
