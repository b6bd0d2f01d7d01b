"""Faults that once survived every test, each with the tests that must notice it.

(file, text that stands there once, text in its place, files of tests).
"""

_DATA, _OURS = "tests/unit/data_pipeline", "tests/unit/kimi_pretrain"

NAMED: list[tuple[str, str, str, tuple[str, ...]]] = [
    (
        "kimi_pretrain/engine/microbatch.py",
        "cells = np.where(loss_mask, cells_of(plan, rows), -1)",
        "cells = np.where(batch.rows.loss_mask[local], cells_of(plan, rows), -1)",
        ("tests/dist/test_positions.py",),
    ),
    (
        "kimi_pretrain/dep/bubble_run.py",
        "shared.grad = leaf.grad[:start]",
        "pass",
        ("tests/dist/test_positions.py",),
    ),
    (
        "kimi_pretrain/memory/saved.py",
        "return output if _place(output) == self.place else output.as_strided(*self.place)",
        "return output if _place(output) == self.place else output.reshape(self.place[0])",
        (f"{_OURS}/memory/test_saved.py",),
    ),
    (
        "kimi_pretrain/memory/fp8_tiles.py",
        "clamp(min=_SMALLEST_SCALE)",
        "clamp(min=_SMALLEST_SCALE, max=torch.finfo(torch.float32).max)",
        (f"{_OURS}/memory/test_fp8_tiles.py",),
    ),
    (
        "kimi_pretrain/memory/saved.py",
        "whole = torch.empty(0, dtype=self.dtype, device=tensor.device)\n"
        "        whole.set_(tensor.untyped_storage(), 0, self.shape)",
        "whole = tensor.reshape(self.shape)",
        (f"{_OURS}/memory/test_saved.py",),
    ),
]
