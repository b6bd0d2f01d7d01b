"""Measures the device-host copies of `train.offload`: bandwidth, and overlap with compute.

Uses the streams, events and pinned slabs of `kimi_pretrain/memory/host_memory.py`. Copies as many
bytes as a Kimi K2 layer keeps for 4,096 tokens to the host, back, and in both directions at once.
Then repeats the copies during matrix products that take about as long. `hidden` is the share of the
shorter activity that overlaps with the longer one. Checks that the copies come back unchanged.
Without CUDA the copies are synchronous and hide nothing.

    python -m benchmarks.bench_offload                 # writes offload_cpu.*
    python -m benchmarks.bench_offload --device cuda   # offload_cuda.*
    python -m benchmarks.bench_offload --quick         # figures not to quote
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import device as where
from benchmarks.result import table, verdicts, write
from kimi_pretrain.memory.host_memory import SLAB_BYTES, Copies, Pool, StreamCopies

STORAGE = 64 * 2**20  # bytes per tensor; dispatched tokens in FP8 take 59 KB x 4,096 / 4
STORAGES = 10
SIDE = 8192  # side of the square matrix products
AT_LEAST = 40e9  # bytes per second; docs/MEMORY.md assumes 50 GB/s
HIDDEN = 0.9

Found = Mapping[str, Any]


Started = list[tuple[Tensor | None, torch.cuda.Event | None]]
"""Target tensor of each copy to the device (None for a copy to the host), and the event of its end.
"""


class Traffic:
    """Tensors on a device that are copied to the host, and host copies that are copied back."""

    def __init__(self, device: torch.device, storages: int, size: int, slab: int):
        self._copies = StreamCopies(device) if device.type == "cuda" else Copies()
        pool = Pool(self._copies, slab)
        draw = torch.Generator(device).manual_seed(0)
        self.sources = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=draw)
            for _ in range(storages)
        ]
        self.bytes = storages * size
        self._leaving = [pool.take(size) for _ in self.sources]
        away = [pool.take(size) for _ in self.sources]
        self._away = [(one, self._copies.out(x, one)) for x, one in zip(self.sources, away)]

    def out(self) -> Started:
        """Start copying all tensors to the host."""
        return self._start(leave=True, come=False)

    def back(self) -> Started:
        """Start copying all host copies back to the device."""
        return self._start(leave=False, come=True)

    def both(self) -> Started:
        """Start the copies of both directions at the same time."""
        return self._start(leave=True, come=True)

    def _start(self, leave: bool, come: bool) -> Started:
        started: Started = []
        for x, leaving, away in zip(self.sources, self._leaving, self._away, strict=True):
            if leave:
                started.append((None, self._copies.out(x, leaving)))
            if come:
                started.append(self._copies.back(len(x), *away))
        return started

    def finish(self, started: Started) -> list[Tensor]:
        """Make the current stream wait for the copies; return the tensors that came back."""
        came = []
        for target, event in started:
            self._copies.wait(event, *([] if target is None else [target]))
            came += [] if target is None else [target]
        return came


class Products:
    """Square matrix products that take about a given time."""

    def __init__(self, device: torch.device, side: int, dtype: torch.dtype):
        draw = torch.Generator(device).manual_seed(0)
        self._x = torch.randn(side, side, device=device, generator=draw).to(dtype)
        self._out = torch.empty_like(self._x)
        self.count = 1

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self._x, self._x, out=self._out)

    def fill(self, seconds: float, device: torch.device) -> None:
        """Set the number of products so that they last about `seconds`."""
        one = where.timed(self, device, 3)["median"]
        self.count = max(1, round(seconds / one))


def main() -> None:
    arguments = where.parser(__doc__, "offload").parse_args()
    device = where.device_of(arguments)
    found: dict[str, Any] = {"about": where.about(arguments, device)}
    storages, size, side, repeats = (3, 2**20, 128, 1) if arguments.quick else (
        STORAGES, STORAGE, SIDE if device.type == "cuda" else 1024, 10
    )  # fmt: skip
    slab = min(SLAB_BYTES, size)
    traffic = Traffic(device, storages, size, slab)
    came = traffic.finish(traffic.both())
    came_back = [torch.equal(x, y) for x, y in zip(came, traffic.sources, strict=True)]
    found |= {"bytes": traffic.bytes, "slab_bytes": slab, "came_back": all(came_back)}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    products = Products(device, side, dtype)
    ways = {"out": traffic.out, "back": traffic.back, "both": traffic.both}
    found["ways"] = {
        name: measure(traffic, start, products, device, repeats) for name, start in ways.items()
    }
    found["targets"] = targets(found)
    write(found, arguments.out, page(found))
    if not found["came_back"]:
        sys.exit("error: what came back differs from what went out")


def measure(
    traffic: Traffic,
    start: Callable[[], Started],
    products: Products,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """Return the seconds of the copies, of products that last as long, and of both together."""

    def copies() -> None:
        traffic.finish(start())

    def together() -> None:
        started = start()
        products()
        traffic.finish(started)

    alone = where.timed(copies, device, repeats)
    products.fill(alone["median"], device)
    compute = where.timed(products, device, repeats)
    return {
        "copies": alone,
        "products": compute,
        "together": where.timed(together, device, repeats),
    }


def bandwidth(found: Found, way: str) -> float:
    """Return bytes per second, added up over both directions."""
    count = found["bytes"] * (2 if way == "both" else 1)
    return count / found["ways"][way]["copies"]["median"]


def hidden(one: Found) -> float:
    """Return the share of the shorter of copies and products that the longer one hides, 0 to 1."""
    parts = [one["copies"]["median"], one["products"]["median"]]
    return (sum(parts) - one["together"]["median"]) / min(parts)


def targets(found: Found) -> list[dict[str, Any]]:
    """Return the targets of docs/MEMORY.md with the measured values; speeds count only on CUDA."""
    rows = [("what came back is what went out", found["came_back"], found["came_back"])]
    if found["about"]["device"] == "cuda":
        for way in ("out", "back"):
            speed = bandwidth(found, way) / 1e9
            rows.append((f"{way}: at least {AT_LEAST / 1e9:.0f} GB/s", f"{speed:.1f}",
                         speed * 1e9 >= AT_LEAST))  # fmt: skip
        share = hidden(found["ways"]["both"])
        rows.append((f"both ways beside products: at least {HIDDEN:.0%} hidden", f"{share:.0%}",
                     share >= HIDDEN))  # fmt: skip
    return [{"target": what, "found": got, "met": met} for what, got, met in rows]


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    rows = [
        [
            way, f"{one['copies']['median'] * 1e3:.2f}", f"{bandwidth(found, way) / 1e9:.1f}",
            f"{one['products']['median'] * 1e3:.2f}", f"{one['together']['median'] * 1e3:.2f}",
            f"{hidden(one):.0%}",
        ]
        for way, one in found["ways"].items()
    ]  # fmt: skip
    lines = [
        *where.heading("Copies between device and host", found),
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"{found['bytes'] / 2**20:,.0f} MiB each way, in slabs of "
        f"{found['slab_bytes'] / 2**20:,.0f} MiB; bytes of both directions add up.",
        "",
        *table(["way", "copies, ms", "GB/s", "products, ms", "together, ms", "hidden"], rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
