"""The example of docs/moonvit3d.md runs and gives the shapes that its comments state."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "moonvit3d.md"


def test_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    scope = {}
    exec(code, scope)
    assert scope["grids"] == [(1, 10, 16), (4, 8, 12), (2, 8, 12)]
    assert scope["tokens"].shape == (40 + 24 + 24, 96)
