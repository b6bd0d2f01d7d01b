"""Replaces media tokens with text, to measure the cost of a step without its encoder."""

from collections.abc import Sequence

import numpy as np
import torch

from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch, replica_rows
from kimi_pretrain.parallel.sequence import SequenceParts


def replace_media_tokens(
    plan: GlobalPlan,
    mesh: Mesh,
    parts: SequenceParts,
    vocab_size: int,
    microbatches: Sequence[Microbatch],
) -> None:
    """Replace every media token of a rank's microbatches with a text token.

    Args:
        plan: the plan of the step.
        mesh: the mesh of this rank.
        parts: distribution of a microbatch's tokens over the ranks of a stage.
        vocab_size: size of the vocabulary.
        microbatches: the microbatches of this rank; their `tokens` are replaced.
    """
    rows, items = replica_rows(plan, mesh), plan.items
    is_media = np.zeros((len(rows), plan.seq_len), dtype=bool)
    for item in np.flatnonzero((items.row >= rows.start) & (items.row < rows.stop)):
        start, count = int(items.start[item]), int(items.tokens[item])
        is_media[int(items.row[item]) - rows.start, start : start + count] = True
    held = parts.positions_cp(mesh.cp_rank)
    masks = is_media.reshape(len(microbatches), -1)
    for microbatch in microbatches:
        if microbatch.tokens is not None:
            inside = torch.from_numpy(masks[microbatch.number][held]).to(microbatch.tokens.device)
            text = torch.from_numpy(held * 7919 % (vocab_size // 2)).to(inside.device)
            # Do not write in place: on a CPU the tokens share memory with the loader's rows.
            microbatch.tokens = torch.where(inside, text, microbatch.tokens)
