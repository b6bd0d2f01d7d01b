"""The example of docs/alone/moonvit3d.md runs on files with the names that it uses."""

import pytest

from tests import docs
from tests.unit.data_pipeline.media import encoded, noise, video


@pytest.mark.parametrize(
    ("size", "grid"),
    # 1,400 x 1,400 gives 10,000 patches, more than the first version of the example could hold.
    [((200, 120), (1, 10, 16)), ((1400, 1400), (1, 100, 100))],
    ids=["small", "photo"],
)
def test_example_runs(tmp_path, monkeypatch, size, grid):
    (tmp_path / "photo.png").write_bytes(encoded(noise(*size[::-1])))
    clip = video([noise(90, 160, second) for second in range(3) for _ in range(24)], 24)
    (tmp_path / "clip.mp4").write_bytes(clip)
    monkeypatch.chdir(tmp_path)
    scope = docs.run("docs/alone/moonvit3d.md")
    assert scope["grids"] == [grid, (4, 8, 12), (2, 8, 12)]
    assert scope["tokens"].shape == (grid[1] * grid[2] // 4 + 24 + 24, 96)
