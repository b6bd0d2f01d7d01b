"""Media decoded to patches: pixels against numpy arithmetic, frames against a plain full decode."""

import io

import av
import numpy as np
import pytest
from einops import rearrange
from PIL import Image

from data_pipeline.decode import decode_item, decode_items, verify
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits
from moonvit3d.media import MAX_PIXELS, MediaError, is_turned, probe
from tests.unit.data_pipeline.media import encoded, mp4, noise

LIMITS = PatchLimits()


def _pixels(data: bytes, height: int, width: int) -> np.ndarray:
    """Decode an image of whole 28-pixel tokens without scaling: uint8 [H, W, 3]."""
    h, w = height // 14, width // 14
    patches = decode_item(data, KIND_IMAGE, 0, LIMITS, (1, h, w))
    return rearrange(patches, "(h w) c y x -> (h y) (w x) c", h=h, w=w)


def test_png_is_exact():
    pixels = noise(56, 84)
    assert np.array_equal(_pixels(encoded(pixels), 56, 84), pixels)


def test_jpeg_is_what_pillow_reads():
    data = encoded(noise(28, 56), "JPEG", quality=80)
    assert np.array_equal(_pixels(data, 28, 56), np.asarray(Image.open(io.BytesIO(data))))


def test_grey_palette_and_bitmap_become_rgb():
    grey = noise(28, 28)[..., 0]
    assert np.array_equal(_pixels(encoded(grey), 28, 28), np.stack([grey] * 3, -1))
    palette = Image.fromarray(noise(28, 28)).quantize(16)
    rgb = np.asarray(palette.convert("RGB"))
    assert np.array_equal(_pixels(encoded(palette), 28, 28), rgb)
    bits = Image.fromarray(grey).convert("1")
    expected = np.stack([np.asarray(bits) * np.uint8(255)] * 3, -1)
    assert np.array_equal(_pixels(encoded(bits), 28, 28), expected)


def test_transparency_lies_over_white():
    pixels = np.concatenate([noise(28, 28), noise(28, 28, 1)[..., :1]], -1)
    pixels[:9, :9, 3], pixels[:9, 9:18, 3] = 0, 255
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    found = _pixels(encoded(pixels), 28, 28)
    assert np.abs(found - expected).max() <= 1
    assert (found[:9, :9] == 255).all()
    assert np.array_equal(found[:9, 9:18], pixels[:9, 9:18, :3])
    # grey with alpha, and one transparent palette entry
    layered = _pixels(encoded(pixels[..., 2:].copy()), 28, 28)
    assert np.abs(layered - (pixels[..., 2:3] * alpha + 255 * (1 - alpha))).max() <= 1
    palette = Image.fromarray(noise(28, 28)).quantize(8)
    rgb, clear = np.array(palette.convert("RGB")), np.asarray(palette) == 3
    rgb[clear] = 255
    assert np.array_equal(_pixels(encoded(palette, transparency=3), 28, 28), rgb)


def test_exif_orientation_is_reported_and_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("JPEG", "PNG"):
        plain, turned = encoded(noise(28, 56), kind), encoded(noise(28, 56), kind, exif=exif)
        assert (is_turned(plain), is_turned(turned)) == (False, True)
        assert np.array_equal(_pixels(plain, 28, 56), _pixels(turned, 28, 56))
        assert (verify(turned, KIND_IMAGE).height, probe(turned, KIND_IMAGE).width) == (28, 56)


def test_a_large_image_is_scaled_to_its_grid():
    data = encoded(noise(300, 200), "JPEG")
    tight = PatchLimits(image=64, frame=64, side=512)
    assert decode_item(data, KIND_IMAGE, 0, tight, (1, 10, 8)).shape == (80, 3, 14, 14)


def test_probe_reads_headers_and_verify_reads_all():
    whole = encoded(noise(64, 90), "JPEG")
    cut = whole[: len(whole) // 2]
    assert probe(cut, KIND_IMAGE) == probe(whole, KIND_IMAGE) == verify(whole, KIND_IMAGE)
    with pytest.raises(MediaError, match="truncated"):
        verify(cut, KIND_IMAGE)
    with pytest.raises(MediaError, match="truncated"):
        decode_item(cut, KIND_IMAGE, 0, LIMITS, (1, 6, 8))


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        encoded(noise(8, 8), "BMP"),
        encoded(np.zeros((8, 8), np.uint16)),
        _flip(encoded(noise(28, 28)), 400),
    ],
    ids=["empty", "text", "bmp", "16-bit", "damaged"],
)
def test_what_is_no_plain_image_is_refused(data):
    with pytest.raises(MediaError) as error:
        verify(data, KIND_IMAGE)
    assert " at 0x" not in str(error.value)  # the reason is stored: it must not differ between runs


def test_too_many_pixels_are_refused_before_decoding():
    side = int(MAX_PIXELS**0.5) + 1
    data = encoded(Image.new("1", (side, side)))
    with pytest.raises(MediaError, match=f"{side} x {side} pixels"):
        verify(data, KIND_IMAGE)


def test_another_grid_than_planned_is_refused():
    with pytest.raises(MediaError, match=r"\(2, 2\) patches.*promises \(2, 4\)"):
        decode_item(encoded(noise(28, 28)), KIND_IMAGE, 0, LIMITS, (1, 2, 4))


def _plain_frames(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_video_chunks_hold_the_sampled_frames():
    data = mp4(22, fps=4, height=56, width=84)
    assert probe(data, KIND_VIDEO) == verify(data, KIND_VIDEO)
    assert (probe(data, KIND_VIDEO).frames, probe(data, KIND_VIDEO).fps) == (22, 4.0)
    frames = _plain_frames(data)
    # 5.5 s at 2 per second: 11 frames spread over 0 ... 21, in chunks of 4, 4, 3
    sampled = np.linspace(0, 21, 11).round().astype(int)
    for chunk, wanted in enumerate((sampled[:4], sampled[4:8], sampled[8:])):
        patches = decode_item(data, KIND_VIDEO, chunk, LIMITS, (len(wanted), 4, 6))
        found = rearrange(patches, "(t h w) c y x -> t (h y) (w x) c", h=4, w=6)
        assert np.array_equal(found, np.stack([frames[i] for i in wanted]))
        assert np.abs(found.mean((1, 2, 3)) - 8 * wanted).max() < 4  # half a grey step


def test_several_chunks_from_one_pass_equal_single_ones():
    data = mp4(22)
    grids = [(4, 4, 6), (3, 4, 6), (4, 4, 6)]
    together = decode_items(data, KIND_VIDEO, [1, 2, 0], LIMITS, grids)
    for chunk, grid, patches in zip([1, 2, 0], grids, together, strict=True):
        assert np.array_equal(decode_item(data, KIND_VIDEO, chunk, LIMITS, grid), patches)


def test_bad_videos_are_refused():
    data = mp4(22)
    with pytest.raises(MediaError, match="the video has 3"):
        decode_item(data, KIND_VIDEO, 3, LIMITS, (1, 4, 6))
    for bad in (b"", b"no video", data[: len(data) // 2], encoded(noise(8, 8))):
        with pytest.raises(MediaError):
            verify(bad, KIND_VIDEO)
        with pytest.raises(MediaError):
            decode_item(bad, KIND_VIDEO, 0, LIMITS, (4, 4, 6))


def test_a_video_with_broken_frames_is_refused():
    data = bytearray(mp4(30))
    start = data.index(b"mdat") + 4
    data[start : start + 4000] = bytes(4000)
    with pytest.raises(MediaError):
        verify(bytes(data), KIND_VIDEO)
