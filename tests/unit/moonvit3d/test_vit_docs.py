"""The example of docs/alone/moonvit3d.md runs, on files as it names them."""

import av
import numpy as np
import pytest
from PIL import Image

from tests import docs


@pytest.mark.parametrize(
    ("size", "grid"),
    # 1,400 x 1,400 is 10,000 patches, more than one chunk of the example once held.
    [((200, 120), (1, 10, 16)), ((1400, 1400), (1, 100, 100))],
    ids=["small", "photo"],
)
def test_example_runs(tmp_path, monkeypatch, size, grid):
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(
        tmp_path / "photo.png"
    )
    with av.open(tmp_path / "clip.mp4", "w") as file:
        stream = file.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 160, 90, "yuv420p"
        for _ in range(72):  # three seconds
            frame = av.VideoFrame.from_ndarray(
                draw.integers(0, 256, (90, 160, 3), dtype=np.uint8), format="rgb24"
            )
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    monkeypatch.chdir(tmp_path)
    scope = docs.run("docs/alone/moonvit3d.md")
    assert scope["grids"] == [grid, (4, 8, 12), (2, 8, 12)]
    assert scope["tokens"].shape == (grid[1] * grid[2] // 4 + 24 + 24, 96)
