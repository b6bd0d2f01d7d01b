"""Tests of the web page's image decoder: one bounded process, which ends when it is idle."""

import io
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette", reason="the extra platform is not installed")

from data_pipeline import decode
from launch.web.decoder import Bounds, Decoder, _decoded
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits, grid
from moonvit3d.media import MediaError
from tests.unit.launch.served import film

LIMITS = PatchLimits(image=196, frame=196)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), 1 if mode == "1" else (9, 8, 7)).save(out, "PNG")
    return out.getvalue()


def decoded(decoder: Decoder, data: bytes, width: int, height: int) -> np.ndarray:
    grids = [grid(KIND_IMAGE, 1, height, width, LIMITS)]
    return decoder.decode(data, KIND_IMAGE, [0], LIMITS, grids)[0]


@pytest.fixture
def decoder(request) -> Iterator[Decoder]:
    before = {*multiprocessing.active_children()}  # may belong to servers of other tests
    found = Decoder(getattr(request, "param", None))
    yield found
    found.close()
    assert {*multiprocessing.active_children()} <= before


def test_it_decodes_elsewhere_and_in_one_process(decoder, monkeypatch):
    data = png(90, 60)
    expected = decode.decode_items(
        data, KIND_IMAGE, [0], LIMITS, [grid(KIND_IMAGE, 1, 60, 90, LIMITS)]
    )
    before = {*multiprocessing.active_children()}
    monkeypatch.setattr(decode, "read_image", lambda *_: pytest.fail("decoded here"))
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: decoded(decoder, data, 90, 60), range(12)))
    assert all(np.array_equal(one, expected[0]) for one in found)
    assert {*multiprocessing.active_children()} - before == {decoder._process}
    with pytest.raises(MediaError):
        decoded(decoder, data[:60], 90, 60)
    assert np.array_equal(decoded(decoder, data, 90, 60), expected[0])


@pytest.mark.parametrize("decoder", [Bounds(kept=0), Bounds(idle_s=0.0)], indirect=True)
def test_a_process_that_holds_much_or_that_nobody_asks_is_given_back(decoder):
    for _ in range(2):
        decoded(decoder, png(90, 60), 90, 60)
        process = decoder._process
        process.join(60)
        assert process.exitcode == 0


def test_one_that_was_killed_begins_again(decoder):
    first = decoded(decoder, png(90, 60), 90, 60)
    decoder._process.kill()
    assert np.array_equal(decoded(decoder, png(90, 60), 90, 60), first)


@pytest.mark.parametrize("decoder", [Bounds(patience_s=0.0)], indirect=True)
def test_one_that_takes_too_long_is_ended(decoder):
    with pytest.raises(MediaError, match="does not decode within 0 s"):
        decoded(decoder, png(90, 60), 90, 60)
    assert decoder._process is None


def test_the_pixels_of_a_picture_are_bounded_whatever_the_index_says():
    """The index claims 640 x 640 pixels; the file has 100 times as many."""
    big = png(6_400, 6_400, "1")
    grids = [grid(KIND_IMAGE, 1, 640, 640, LIMITS)]
    found, error = _decoded(Bounds(), big, KIND_IMAGE, [0], LIMITS, grids)
    assert found is None
    assert "6400 x 6400 pixels; only pictures of up to 40,000,000 are decoded here" in str(error)
    found, error = _decoded(Bounds(frame=128 * 96 - 1), film(), KIND_VIDEO, [0], LIMITS, grids)
    assert "128 x 96 pixels; only pictures of up to 12,287" in str(error)


@pytest.mark.parametrize("decoder", [Bounds(memory=400 << 20)], indirect=True)
def test_memory_is_bounded_by_the_system(decoder):
    """An image that needs too much memory is an error; a smaller one still decodes afterwards."""
    with pytest.raises(MediaError, match=r"takes more than 419\.4 MB to decode"):
        decoded(decoder, png(6_300, 6_300, "1"), 6_300, 6_300)
    decoded(decoder, png(90, 60), 90, 60)
    status = Path(f"/proc/{decoder._process.pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    assert peak < 500 << 20
