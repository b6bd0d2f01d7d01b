"""Counts the useful floating-point operations of a step and the peak rate of a device.

Useful operations are the matrix products that the mathematics requires, each counted once.
Recompute and padding do not count. Causal attention counts only the pairs below the diagonal inside
each document: half of its square.

A product of activations with a weight is computed once forward, once for the weight's gradient if
the weight is trained, and once for the input's gradient if anything before it is trained. It
usually costs three forwards in all.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kimi_pretrain.dep.pass_costs import active_parameters
from kimi_pretrain.weights.model_config import LanguageConfig, ModelConfig
from moonvit3d.config import MoonViTConfig
from moonvit3d.flops import flops
from moonvit3d.geometry import MERGE, PATCH, num_tokens

Ints = NDArray[np.int64]

# Dense (without sparsity) TFLOP/s of one GPU: bf16 and fp16, TF32, fp32, fp64 (tensor cores where
# they are faster). From NVIDIA's data sheets, which print the tensor cores' figures with sparsity,
# twice these: "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU" (2023: SXM, PCIe, NVL),
# "H200 Tensor Core GPU" (2024: SXM, NVL); and its "Blackwell Architecture Technical Brief" (2024:
# HGX B200, GB200). Keyed by the driver's full name of a whole device, without "NVIDIA ". A MIG
# slice ("H200 MIG 1g.18gb"), a virtual GPU ("A100-10C") and other products ("RTX A1000", "GH200
# 480GB") have other names, so their peak is measured.
_A100, _H100, _NVL = (312, 156, 19.5, 19.5), (989, 494, 67, 67), (835, 417, 60, 60)
KNOWN_GPUS: dict[str, tuple[float, float, float, float]] = {
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "H100 PCIe": (756, 378, 51, 51),
    "H100 NVL": _NVL,
    "H100 80GB HBM3": _H100,
    "H200 NVL": _NVL,
    "H200": _H100,
    "GB200": (2500, 1250, 90, 45),
    "B200": (2250, 1100, 80, 40),
}
MEASURED_SECONDS, MEASURED_TIMES = 0.1, 5


@dataclass(frozen=True)
class StepFlops:
    """Useful operations of one step on all ranks, in the forward and the backward pass."""

    encoder: float
    backbone: float

    @property
    def total(self) -> float:
        """Sum of encoder and backbone."""
        return self.encoder + self.backbone


@dataclass(frozen=True)
class Peak:
    """Peak rate of one rank for dense matrix products, and the source of the number."""

    flops_per_second: float
    source: str


def step_flops(
    grids: Ints,
    lengths: Ints,
    model: ModelConfig,
    frozen: Collection[str] = (),
    pairs: float = 0.0,
) -> StepFlops:
    """Return the useful operations of a step.

    Args:
        grids: patch grids (frames, height, width) of the step's media items, [items, 3].
        lengths: tokens of each document of the step, [documents].
        frozen: as in `train.frozen`; these parts get no gradients.
        pairs: forward operations of `train.siglip`'s heads.
    """
    tower, projector = "vision_tower" not in frozen, "projector" not in frozen
    vision = (tower or projector) and len(grids) > 0
    language = "language_model" not in frozen
    return StepFlops(
        encoder=encoder_flops(grids, model.vision, tower=tower, projector=projector)
        + _product(pairs, trained=True, upstream=True),
        backbone=backbone_flops(lengths, model.language, trained=language, upstream=vision),
    )


def encoder_flops(
    grids: Ints, config: MoonViTConfig, *, tower: bool = True, projector: bool = True
) -> float:
    """Return the operations of tower and projector for these items, forward and backward.

    Args:
        grids: patch grids (frames, height, width), [items, 3].
    """
    t, h, w = np.asarray(grids, dtype=np.int64).reshape(-1, 3).T
    linear, quadratic = flops(grids, config)
    embed = 2.0 * float((t * h * w).sum()) * 3 * PATCH * PATCH * config.width
    into, out = MERGE * MERGE * config.width, config.out_width
    joined = 2.0 * float(num_tokens(t, h, w).sum()) * config.projector_width * (into + out)
    blocks = float(linear.sum()) - embed - joined
    return (
        _product(embed, trained=tower, upstream=False)
        + _product(blocks, trained=tower, upstream=tower)
        + _activations(float(quadratic.sum()), upstream=tower)
        # The projector begins with a norm that has a gain, so a trained projector also needs the
        # gradients of its products' inputs.
        + _product(joined, trained=projector, upstream=tower or projector)
    )


def backbone_flops(
    lengths: Ints, config: LanguageConfig, *, trained: bool = True, upstream: bool = True
) -> float:
    """Return the operations of the language model for these documents, forward and backward.

    Args:
        lengths: tokens of each document, [documents].
        upstream: whether the encoder needs the gradients of the input.
    """
    size = np.asarray(lengths, dtype=np.float64)
    linear = 2.0 * float(size.sum()) * active_weights(config)
    width = config.qk_nope_dim + config.qk_rope_dim + config.v_dim
    attention = float((size * size).sum()) * config.num_layers * config.num_heads * width
    flows = trained or upstream
    return _product(linear, trained, flows) + _activations(attention, flows)


def active_weights(config: LanguageConfig) -> int:
    """Return the number of weights that one token is multiplied with, including only its experts.

    The head counts; the embedding, a lookup, and the norms do not.
    """
    dense, moe, head = active_parameters(config)
    num_dense = config.num_dense_layers
    return num_dense * dense + (config.num_layers - num_dense) * moe + head


def peak_flops(device: torch.device, dtype: torch.dtype, override: float | None = None) -> Peak:
    """Return the peak rate of one rank.

    Args:
        device: of the rank. The peak of a CPU, or of a GPU whose full name is not in the table, is
            measured by short matrix products: the best of this process, not of the hardware.
        dtype: of the model. fp32 on CUDA is TF32 if torch is allowed to use it.
        override: TFLOP/s from `train.peak_tflops`; used unchanged.
    """
    if override is not None:
        return Peak(override * 1e12, "train.peak_tflops")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
        if (known := KNOWN_GPUS.get(name)) is not None:
            kind = _kind(dtype)
            column = ("bf16", "TF32", "fp32", "fp64").index(kind)
            return Peak(known[column] * 1e12, f"{kind} data sheet of {name}")
    return Peak(measured_flops(device, dtype), f"measured, {str(dtype).removeprefix('torch.')}")


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of some square products, within about 0.1 s.

    The products are as small as full speed allows, about 0.3 ms each, so that on a busy machine at
    least one runs without interruption.
    """
    size = 4096 if device.type == "cuda" else 256 * math.isqrt(torch.get_num_threads())
    left, right = torch.rand(2, size, size, device=device).to(dtype)
    best, begin, times = math.inf, time.perf_counter(), 0
    while time.perf_counter() - begin < MEASURED_SECONDS or times < MEASURED_TIMES:
        start = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, times = min(best, time.perf_counter() - start), times + 1
    return 2 * size**3 / best


def utilisation(useful: float, seconds: float, world_size: int, peak: Peak) -> float:
    """Return MFU: useful operations over the peak operations of all ranks in this time."""
    return useful / (seconds * world_size * peak.flops_per_second)


def _product(forward: float, trained: bool, upstream: bool) -> float:
    """Return the forward and backward operations of a product of activations with weights."""
    return forward * (1 + trained + upstream)


def _activations(forward: float, upstream: bool) -> float:
    """Return the forward and backward operations of a product of activations, in attention."""
    return forward * (3 if upstream else 1)


def _kind(dtype: torch.dtype) -> str:
    if dtype in (torch.bfloat16, torch.float16):
        return "bf16"
    if dtype == torch.float64:
        return "fp64"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "TF32"
