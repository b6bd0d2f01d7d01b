"""Slow references for sizes and patches, and functions extracted from transformers' source file."""

import ast
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def plain_patches(pixels, patch_limit, side_limit):
    """Apply the sizing rule, written from the released processor's description only."""
    height, width, _ = pixels.shape
    cells = max(1, width // 14) * max(1, height // 14)
    sides = (side_limit * 14 / width, side_limit * 14 / height)
    scale = min(1, math.sqrt(patch_limit / cells), *sides)
    new_w = min(max(1, int(width * scale)), side_limit * 14)
    new_h = min(max(1, int(height * scale)), side_limit * 14)
    small = Image.fromarray(pixels).resize((new_w, new_h), Image.Resampling.BICUBIC)
    rows, columns = 2 * math.ceil(new_h / 28), 2 * math.ceil(new_w / 28)
    canvas = np.zeros((rows * 14, columns * 14, 3), np.uint8)
    canvas[:new_h, :new_w] = np.asarray(small)
    cells = [canvas[14 * r : 14 * r + 14, 14 * c : 14 * c + 14] for r in range(rows)
             for c in range(columns)]  # fmt: skip
    return np.stack([cell.transpose(2, 0, 1) for cell in cells]), (1, rows, columns)


def functions_of_transformers(*names, **scope):
    """Extract functions by name from its image processor's file: the module needs torchvision."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    file = Path(spec.origin).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    nodes = ast.walk(ast.parse(file.read_text()))
    found = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name in names]
    exec(compile(ast.Module(found, []), str(file), "exec"), scope := {"math": math, **scope})
    return scope
