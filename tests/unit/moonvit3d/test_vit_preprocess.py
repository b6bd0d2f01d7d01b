"""Patches against the released processor's frozen hashes and transformers' own steps."""

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moonvit3d.geometry import PatchLimits
from moonvit3d.model import normalise
from moonvit3d.preprocess import image_patches, video_patches
from tests.unit.data_pipeline.media import noise
from tests.unit.moonvit3d.plain import functions_of_transformers, plain_patches


def tensor_sha(tensor):
    """Hash like the frozen hashes: compact sorted JSON of dtype and shape, NUL, raw bytes."""
    facts = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    head = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(head + b"\0" + tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def gradient_image():
    y, x = np.mgrid[:48, :32]
    channels = [7 * x + 3 * y + 11, 5 * x + 13 * y + 29, 17 * x + 9 * y + 47]
    return (np.stack(channels, -1) % 256).astype(np.uint8)


def checkerboard_image():
    y, x = np.mgrid[:33, :57]
    return np.array([[20, 40, 220], [235, 190, 25]], np.uint8)[(x // 5 + y // 5) % 2]


@pytest.mark.parametrize(
    ("pixels", "grid", "sha"),
    [
        (
            gradient_image(),
            (1, 4, 4),
            "37ae1786eb941cb4b9695c9f78b71996cfdfbb34870b2269a9f2cee08d7b0c52",
        ),
        (
            checkerboard_image(),
            (1, 4, 6),
            "589f703f2e54ba8b231cb09347606dd2076f956533da9b6b27646ffe2ca86478",
        ),
    ],
)
def test_golden_hashes_of_the_released_processor(pixels, grid, sha):
    patches, got_grid = image_patches(pixels)
    assert got_grid == grid
    assert tensor_sha(normalise(torch.from_numpy(patches), torch.bfloat16)) == sha


@pytest.fixture(scope="module")
def processor():
    """Return transformers' Kimi_K25ImageProcessor without torchvision, as `run(pixels, limits)`.

    The processor's own methods run, extracted from the installed file. Substitutes replace its
    torchvision calls: Pillow's resize (as in the released processor), zero padding,
    subtract-and-divide.
    """
    pytest.importorskip("transformers")
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.image_processing_utils import BatchFeature
    from transformers.image_transforms import group_images_by_shape, reorder_images
    from transformers.image_utils import SizeDict

    scope = functions_of_transformers(
        "navit_resize", "patchify", "_preprocess", torch=torch, SizeDict=SizeDict,
        BatchFeature=BatchFeature, TensorType=Any, group_images_by_shape=group_images_by_shape,
        reorder_images=reorder_images,
    )  # fmt: skip

    def resize(stacked, size, resample):
        frames = stacked.permute(0, 2, 3, 1).numpy()
        out = [Image.fromarray(f).resize((size.width, size.height), resample) for f in frames]
        return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2)

    def pad(stacked, pad_size):
        extra = (0, pad_size.width - stacked.shape[3], 0, pad_size.height - stacked.shape[2])
        return torch.nn.functional.pad(stacked, extra)

    def normalize(images, mean, std, inplace):
        return (images - mean[:, None, None]) / std[:, None, None]

    me = SimpleNamespace(resize=resize, pad=pad, normalize=normalize)
    for name in ("rescale_and_normalize", "_fuse_mean_std_and_rescale_factor"):
        function = getattr(TorchvisionBackend, name)
        setattr(me, name, getattr(function, "__wrapped__", function).__get__(me))
    me.patchify = scope["patchify"].__get__(me)

    def run(pixels, limits):
        out = scope["_preprocess"](
            me, [torch.from_numpy(pixels).permute(2, 0, 1)], do_resize=True,
            size=SimpleNamespace(max_height=limits.side, max_width=limits.side),
            resample=Image.Resampling.BICUBIC, do_rescale=True, rescale_factor=1 / 255,
            do_normalize=True, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5), patch_size=14,
            merge_size=2, max_patches=limits.image, disable_grouping=False, return_tensors="pt",
        )  # fmt: skip
        return out["pixel_values"], tuple(out["image_grid_thw"][0].tolist())

    return run


@pytest.mark.parametrize(
    ("pixels", "limits"),
    [
        (gradient_image(), PatchLimits()),
        (checkerboard_image(), PatchLimits()),
        (noise(1, 1), PatchLimits()),
        (noise(56, 84), PatchLimits()),
        (noise(200, 131), PatchLimits(image=64)),
        (noise(15, 700), PatchLimits(side=16)),
        (noise(301, 299), PatchLimits(image=100, side=8)),
    ],
)
def test_equals_transformers(processor, pixels, limits):
    want, want_grid = processor(pixels, limits)
    patches, got_grid = image_patches(pixels, limits)
    got = torch.from_numpy(patches)
    assert got_grid == want_grid
    want = want.reshape(got.shape)
    # transformers folds the 1/255 into mean and std: equal bytes, one float32 rounding apart.
    assert torch.equal((want * 127.5 + 127.5).round().to(torch.uint8), got)
    torch.testing.assert_close(normalise(got), want, rtol=0, atol=1.2e-7)
    assert torch.equal(normalise(got, torch.bfloat16), want.to(torch.bfloat16))


def test_video_is_its_frames_one_after_the_other():
    frames = np.stack([noise(70, 45, seed) for seed in range(3)])
    limits = PatchLimits(image=12, frame=9, side=100)
    patches, grid = video_patches(frames, limits)
    single = [image_patches(f, PatchLimits(image=9, side=100)) for f in frames]
    assert grid == (3, *single[0][1][1:])
    assert np.array_equal(patches, np.concatenate([p for p, _ in single]))


def test_padding_is_minus_one_after_normalisation():
    patches, _ = image_patches(np.full((14, 14, 3), 255, np.uint8))
    values = normalise(torch.from_numpy(patches))
    assert values[0].unique().tolist() == [1.0]
    assert values[1:].unique().tolist() == [-1.0]
    assert normalise(torch.from_numpy(patches), torch.float64).dtype == torch.float64


def fuzz_sizes():
    rng = np.random.default_rng(5)
    sizes = np.exp(rng.uniform(0, np.log(900), (70, 2))).astype(int).tolist()
    edges = [1, 13, 14, 15, 27, 28, 29, 55, 56, 57]
    return sizes + [[1, 1], [1, 700], [700, 1]] + rng.choice(edges, (20, 2)).tolist()


@pytest.mark.parametrize("limits", [PatchLimits(), PatchLimits(image=200, frame=50, side=40)])
def test_any_size_equals_the_plain_rule(limits):
    whole = noise(900, 900)
    for height, width in fuzz_sizes():
        pixels = whole[:height, :width]  # a view: rows are not contiguous
        for cut, limit in (
            (image_patches, limits.image),
            (lambda p, limits: video_patches(p[None], limits), limits.frame),
        ):
            patches, grid = cut(pixels, limits)
            want, want_grid = plain_patches(np.ascontiguousarray(pixels), limit, limits.side)
            assert grid == want_grid, (height, width)
            assert np.array_equal(patches, want), (height, width)


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (896, 896, (1, 64, 64)),  # 64 x 64 patches, the native grid of positions, no padding
        (1, 7168, (1, 2, 512)),  # exactly 512 patches on a side
        (28, 7168, (1, 2, 512)),
        (28, 7169, (1, 2, 512)),  # one pixel more: shrunk
        (20000, 3, (1, 512, 2)),
        (14, 60000, (1, 2, 512)),
        (1792, 1792, (1, 128, 128)),  # exactly 16,384 patches
        (1806, 1806, (1, 128, 128)),  # one patch more on each side: shrunk
        (448, 7168, (1, 32, 512)),  # both limits at once
        (462, 7200, (1, 34, 506)),  # shrunk to 16,384 patches, then padded to 17,204
    ],
)
def test_largest_sizes_are_shrunk_by_the_plain_rule(height, width, grid):
    pixels = noise(height, width)
    patches, got_grid = image_patches(pixels)
    want, want_grid = plain_patches(pixels, 16384, 512)
    assert got_grid == want_grid == grid
    assert np.array_equal(patches, want)


def test_the_source_is_left_alone_and_views_equal_copies():
    frames = np.stack([noise(40, 60, seed) for seed in range(4)])
    kept = frames.copy()
    turned = frames[::-1, ::-1, ::2, ::-1]  # reversed in time, height and colour
    patches, grid = video_patches(turned)
    want, want_grid = video_patches(np.ascontiguousarray(turned))
    assert grid == want_grid == (4, 4, 4)
    assert np.array_equal(patches, want)
    assert np.array_equal(frames, kept)
    patches[:] = 0
    assert np.array_equal(frames, kept)


NAN = np.full((8, 8, 3), np.nan, np.float32)


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8, 1), np.uint8),
     np.zeros((3, 8, 8), np.uint8), np.zeros((1, 8, 8, 3), np.uint8), np.zeros((), np.uint8),
     np.zeros((8, 8, 3), np.float32), NAN, np.zeros((8, 8, 3), np.int64),
     np.zeros((8, 8, 3), np.uint16), np.zeros((8, 8, 3), bool), torch.zeros(8, 8, 3).byte(),
     [[[0, 0, 0]]], Image.new("RGB", (8, 8)), None],
    ids=lambda pixels: type(pixels).__name__ + str(getattr(pixels, "shape", "")),
)  # fmt: skip
def test_other_pixels_are_refused(pixels):
    with pytest.raises(ValueError, match=r"want (numpy )?uint8 \[height, width, 3\]") as error:
        image_patches(pixels)
    assert "\n" not in str(error.value)
    assert "nan" not in str(error.value)
    chunk = pixels[None] if isinstance(pixels, np.ndarray | torch.Tensor) else pixels
    with pytest.raises(ValueError, match=r"want (numpy )?uint8 \[frames, height, width, 3\]"):
        video_patches(chunk)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_a_side_of_0_is_refused(shape):
    with pytest.raises(ValueError, match=f"{shape[1]} x {shape[0]} pixels: each side must be at"):
        image_patches(np.zeros((*shape, 3), np.uint8))
    with pytest.raises(ValueError, match="each side must be at least 1"):
        video_patches(np.zeros((2, *shape, 3), np.uint8))


@pytest.mark.parametrize("frames", [0, 5, 100])
def test_chunks_of_no_or_too_many_frames_are_refused(frames):
    with pytest.raises(ValueError, match=f"{frames} frames; .* a video chunk 1 to 4"):
        video_patches(np.zeros((frames, 28, 28, 3), np.uint8))
