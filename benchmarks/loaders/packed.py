"""Global steps of the training loader, blended and packed, across world sizes and a resume.

Two ranks are compared with four, and with four that resume from two. No peer has a comparable
loader. Each rank requests its share of a step's rows and their pictures, decoded to patches. The
comparison uses the digests of all rows in rank order: tokens, labels, loss mask and patches.
"""

import hashlib
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loaders.data import TOKENIZER
from benchmarks.loaders.job import PAIRS, PROSE
from data_pipeline.config import DataConfig
from data_pipeline.index.manifest import read_index
from data_pipeline.loader import Loader, Needs, StepBatch
from data_pipeline.plan.step_plan import GlobalPlan
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer

ROWS = 4  # rows of a global step, one for each of four ranks
SEQ_LEN = 1024
STEPS = 250


def elastic(root: Path, steps: int = STEPS) -> dict[str, Any]:
    """Return the results of `measure.elastic` for rows instead of samples."""
    stop = steps // 2
    states: list[str] = []
    two = _worlds(root, 2, steps, stop, states)
    four = _worlds(root, 4, steps)
    after = _worlds(root, 4, steps - stop, state=states[0])
    same = len(set(states)) == 1
    return {
        "steps": steps,
        "other_world_ordered": sum(a == b for a, b in zip(two, four)),
        "other_world_as_sets": sum(sorted(a) == sorted(b) for a, b in zip(two, four)),
        "resumed_steps": steps - stop,
        "resumed_ordered": sum(a == b for a, b in zip(two[stop:], after)),
        "resumed_as_sets": sum(sorted(a) == sorted(b) for a, b in zip(two[stop:], after)),
        "different_rows": len({row for step in two for row in step}),
        "state_bytes": len(states[0]),
        "error": "" if same else "the ranks' states differ",
    }


def _worlds(
    root: Path,
    world_size: int,
    steps: int,
    save_at: int = 0,
    states: list[str] | None = None,
    state: str = "",
) -> list[list[str]]:
    """Return the row digests of each global step, in rank order. The ranks run independently."""
    store = FolderStore(root / "ours")
    config = DataConfig(
        root=str(root / "ours"), sources={PAIRS: 1.0, PROSE: 1.0}, vision_token_ratio=0.4,
        seq_len=SEQ_LEN, rows_per_step=ROWS, tokenizer=TOKENIZER, seed=17, pack_window=2048,
    )  # fmt: skip
    indices = [read_index(store, name) for name in (PAIRS, PROSE)]
    tokenizer = Tokenizer.from_store(store, TOKENIZER)
    ranks: list[list[list[str]]] = []
    for rank in range(world_size):
        with Loader(config, store, indices, tokenizer, share(rank, world_size)) as loader:
            if state:
                loader.load_state_dict(json.loads(state))
            found = []
            for number, batch in enumerate(islice(loader, steps), 1):
                found.append(digests(batch))
                if number == save_at and states is not None:
                    states.append(json.dumps(loader.state_dict()))
            ranks.append(found)
    return [[row for rank in step for row in rank] for step in zip(*ranks, strict=True)]


def share(rank: int, world_size: int) -> Callable[[GlobalPlan], Needs]:
    """Return a function that gives a rank its contiguous rows and the items in them."""

    def needs(plan: GlobalPlan) -> Needs:
        begin, end = (r * plan.num_rows // world_size for r in (rank, rank + 1))
        mine = (plan.items.row >= begin) & (plan.items.row < end)
        return Needs(np.arange(begin, end), np.flatnonzero(mine))

    return needs


def digests(batch: StepBatch) -> list[str]:
    """Return the SHA-256 of each of the batch's rows with its pictures."""
    assert batch.rows is not None
    assert not batch.bad, batch.bad
    found = []
    for at, row in enumerate(batch.row_ids.tolist()):
        digest = hashlib.sha256()
        for column in (batch.rows.tokens, batch.rows.labels, batch.rows.loss_mask):
            digest.update(np.ascontiguousarray(column[at]).tobytes())
        for item in np.flatnonzero(batch.plan.items.row == row).tolist():
            digest.update(np.ascontiguousarray(batch.media[item]).tobytes())
        found.append(digest.hexdigest())
    return found
