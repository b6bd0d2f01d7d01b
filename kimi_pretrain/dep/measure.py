"""Times the encoder on this machine: what `kimi-pretrain plan --calibrate` fits its model to.

Single items of many sizes show how cost grows with patches; packs of many small ones show what an
item costs by itself, which a pack of one hides behind the cost of starting a pack. The work of a
step is a forward without graph, then the forward again with graph and its backward.
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

SMALLEST = 4  # patches: one token
PACKED_SIZES = (4, 16, 64, 256, 1024)  # patches of the items of a pack
PACKED_ITEMS = (32, 512)  # so many of them, as far as the chunk allows
FRAMES = 4  # of a video chunk
REPEATS = 5

# (forward, total) seconds of one run of a pack.
Run = Callable[[Pack], tuple[float, float]]
Progress = Callable[[float, str], None]
Result = TypeVar("Result")


def packs_of(image: int, frame: int, side: int, budget: int) -> list[Pack]:
    """Return what is measured: single images, video chunks of 4 frames, and packs of small images.

    Args:
        image, frame, side: most patches of an image, of a video frame, and on a side.
        budget: most patches of a pack; also of an item.
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
    """Return smallest, twice that, ... and the largest itself."""
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return [*sizes, largest] if largest > sizes[-1] else sizes


def _images(count: int, patches: int, side: int) -> Pack:
    return Pack((_grid(1, patches, side),) * count)


def _grid(frames: int, patches: int, side: int) -> Grid:
    """Return even sides as near a square as they come, with at most `patches` a frame."""
    height = min(side, max(2, 2 * int(patches**0.5 / 2)))
    return frames, height, min(side, max(2, 2 * (patches // height // 2)))


@dataclass
class Measured:
    """What was timed, and what was not.

    Attributes:
        timings: by rising cost.
        left_out: packs that were not measured, and why.
        repeats: timed runs behind each median.
        seconds: spent on all of it, but for building the encoder and its very first run.
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
    """Time packs within a bound on seconds, from cheap to costly, each after a warm-up.

    A pack is tried only if its warm-up and one timed run of everything still fit, by the time of
    the pack before and the ratio of their FLOPs. Repeats go round all packs, so that a machine
    that becomes slower for a while does so for all of them.

    Args:
        run: runs a pack once and returns its seconds, (forward, total).
        config: sizes of the encoder, for the order and the guesses.
        progress: called with the share done and what is being timed.
        filled: patches of a pack -> empty ones that the encoder adds to it.

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
    """Return (FLOPs, pack) by rising FLOPs."""
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
    """Run each pack that fits once; returns its seconds and adds to `found`."""
    warm: dict[Pack, float] = {}
    if costs:
        run(costs[0][1])  # the very first run of all starts the libraries: not counted
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
        frozen: parts that are not trained, "vision_tower" and "projector". A frozen tower is not
            run again for the backward pass; with both frozen a step is one forward.
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
        """Return how many empty patches are added to a pack of `patches`."""
        return rows.padding(patches, self.device)

    def _forward(self, pixels: np.ndarray, grids: list[Grid]) -> Tensor | None:
        """Encode without a graph; returns the features of a tower that is not run again."""
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
        """Return noise: what is in the pictures costs nothing."""
        if len(self._pixels) < patches:
            generator = np.random.Generator(np.random.Philox(key=0))
            self._pixels = generator.integers(0, 256, (patches, 3, 14, 14), np.uint8)
        return self._pixels[:patches]


def _forget(param: Tensor) -> None:
    """Free a gradient as soon as it is whole, as training does once it is added up elsewhere."""
    param.grad = None
