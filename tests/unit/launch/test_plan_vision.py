"""Tests of the encoder's memory settings in `plan --step` against loops over ranks and chunks."""

import numpy as np
import pytest

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.vision_plan import grids_of
from moonvit3d.memory import activation_bytes
from moonvit3d.packing import chunks
from tests.unit.launch.plan_command import RANKS, SMALL, STAGES_OF_TWO, cost, found_by, plans_of

STEP = ("--step", "--steps", "2", "--network=1e6", "--host=1e5", "checkpoint.every=null")
GIVEN = (*STAGES_OF_TWO, "dep.flops_per_second=1e9", "dep.max_patches_per_chunk=300",
         "dep.cost.per_chunk=0.003")  # fmt: skip


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("gib", [0.01, 0.016, 1.0])
def test_chunks_that_are_kept_are_not_encoded_again(root, gib, split):
    """Each kept chunk fits next to the other kept chunks and the largest remaining one."""
    own = (*GIVEN, f"dep.max_split={split}", f"data.rows_per_step={64 if split == 1 else 4}")
    config = load_config("tiny_cpu", [*SMALL, *own])
    before = found_by(root, *STEP, *own)["steps"]
    kept = ("dep.keep_activations=auto", f"dep.memory_limit_gib={gib}")
    after = found_by(root, *STEP, *own, *kept)["steps"]
    counts, shared_items = [], 0
    for (plan, vision), one, other in zip(plans_of(root, 2, *own), before, after, strict=True):
        sizes = activation_bytes(grids_of(plan), config.model.vision, 4)
        held = vision.tokens_held() * config.model.vision.out_width * 4
        seconds, spared = np.zeros(RANKS), np.zeros(RANKS)
        for rank in range(RANKS):
            shares = vision.encoded_by(rank)
            alone = [item for item, parts in zip(shares.item, shares.parts) if parts == 1]
            shared = [(item, parts) for item, parts in zip(shares.item, shares.parts) if parts > 1]
            for item, parts in shared:
                seconds[rank] += cost(vision.patches[item]) / parts / 0.85
            cuts = [alone[part] for part in chunks(vision.patches[alone].tolist(), 300)]
            patches = sum(vision.patches[alone]) + sum(vision.patches[i] / n for i, n in shared)
            seconds[rank] += sum(cost(vision.patches[item]) for item in alone)
            seconds[rank] += 0.003 * np.ceil(patches / 300)
            # Each split item is a separate chunk, which is never kept.
            taken = [sizes[part].sum() for part in cuts]
            others, room = [int(sizes[i] / n) for i, n in shared], int(gib * 2**30) - held[rank]
            keeps: list[int] = []
            while True:
                for number in range(len(cuts)):
                    rest = [taken[n] for n in range(len(cuts)) if n not in (number, *keeps)]
                    most = max([*rest, *others], default=0)
                    if (
                        number not in keeps
                        and sum(taken[n] for n in keeps) + taken[number] + most <= room
                    ):
                        keeps.append(number)
                        break
                else:
                    break
            for number in keeps:
                spared[rank] += sum(cost(vision.patches[item]) for item in cuts[number]) + 0.003
            counts.append((len(keeps), len(cuts)))
        shared_items += int((vision.parts > 1).sum())
        assert one["vision"] == pytest.approx(seconds.max())
        assert other["vision"] == pytest.approx((seconds - spared / 4).max())
        assert other["passes"] == one["passes"]
    assert (shared_items > 0) == (split > 1)
    if gib < 0.1 and split == 1:
        assert any(0 < some < whole for some, whole in counts)
    if gib == 1.0:
        assert all(some == whole for some, whole in counts)
        assert split > 1 or any(whole > 1 for _, whole in counts)


@pytest.mark.parametrize("frozen", ["[]", "[vision_tower, projector]"])
def test_embeddings_that_wait_on_the_host_go_there_and_back(root, frozen):
    own = (*GIVEN, f"train.frozen={frozen}")
    width = load_config("tiny_cpu", [*SMALL, *own]).model.vision.out_width
    before = found_by(root, *STEP, *own)["steps"]
    after = found_by(root, *STEP, *own, "dep.offload_outputs=true")["steps"]
    for (_, vision), one, other in zip(plans_of(root, 2, *own), before, after, strict=True):
        received = [0] * RANKS
        for dest, count in zip(vision.spans.dest, vision.spans.count, strict=True):
            received[dest] += int(count)
        ways = 4 if frozen == "[]" else 2  # the backward pass moves gradients, too
        more = ways * max(received) * width * 4 / 1e5
        assert other["exchange"] - one["exchange"] == pytest.approx(more)
        assert other["total"] - one["total"] == pytest.approx(more)
