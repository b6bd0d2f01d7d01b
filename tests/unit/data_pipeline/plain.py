"""Synthetic indices, and slow token-by-token references for layout, packing and planning."""

import numpy as np

from benchmarks.synthetic_index import synthetic_index
from data_pipeline.index.columns import PIECE_ITEM, PIECE_TEXT
from data_pipeline.plan.blend import append_segment, blend
from data_pipeline.plan.order import ShardOrder
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, grid


def made_index(name, shard_sizes, seed=0, *, text=(3, 120), media=0.0, video=0.2, side=400):
    """Return an index of random samples; `media` is the probability of another item in a sample."""
    rng = np.random.default_rng(seed)
    num_samples = sum(shard_sizes)
    text_tokens = rng.integers(*text, num_samples)
    items, item_ptr = [], [0]
    for total in text_tokens:
        number, before = 0, 0
        while rng.random() < media:
            before = int(rng.integers(before, total + 1))
            height, width = rng.integers(20, side, 2)
            is_video = rng.random() < video
            for chunk in range(rng.integers(1, 4) if is_video else 1):
                frames = rng.integers(1, 5) if is_video else 1
                prefix = 11 if is_video else 3
                kind = KIND_VIDEO if is_video else KIND_IMAGE
                items.append((kind, number, chunk, frames, height, width, before, prefix))
            number += 1
        item_ptr.append(len(items))
    names = ["kind", "media", "chunk", "frames", "height", "width", "text_before", "prefix"]
    columns = np.array(items, np.int64).reshape(-1, len(names)).T
    return synthetic_index(
        name,
        text_tokens,
        item_ptr=item_ptr,
        shard=np.repeat(np.arange(len(shard_sizes)), shard_sizes),
        **{f"item_{n}": column for n, column in zip(names, columns)},
    )


def slow_sample(index, sample, limits):
    """Return the symbols of a sample, and (item, first pad, pads, grid) of its items."""
    symbols, items = ["bos"], []
    item = int(index.item_ptr[sample])
    for piece in range(index.piece_ptr[sample], index.piece_ptr[sample + 1]):
        tokens = int(index.piece_tokens[piece])
        if index.piece_kind[piece] != PIECE_ITEM:
            kind = "text" if index.piece_kind[piece] == PIECE_TEXT else "region"
            symbols += [kind] * tokens
            continue
        symbols += ["prefix"] * tokens
        shape = grid(
            *(
                int(getattr(index, f"item_{n}")[item])
                for n in ("kind", "frames", "height", "width")
            ),
            limits,
        )
        pads = (shape[1] // 2) * (shape[2] // 2)
        items.append((item, len(symbols), pads, shape))
        symbols += ["pad"] * pads + ["end"]
        item += 1
    return [*symbols, "eos"], items


def slow_best_fit(lengths, seq_len):
    """Pack by best fit over all rows; among equal fits use the row touched last."""
    free, touched, rows = [], [], []
    for clock, length in enumerate(lengths):
        fitting = [(free[r], -touched[r], r) for r in range(len(free)) if free[r] >= length]
        if fitting:
            row = min(fitting)[2]
        else:
            row = len(free)
            free.append(seq_len)
            touched.append(0)
        free[row] -= length
        touched[row] = clock
        rows.append(row)
    return rows


def slow_substitute(index, sample, lengths, seq_len):
    """Return the sample that replaces `sample`.

    The k-th usable sample (from 0) after it, cyclically in the shard, replaces the k-th unusable
    sample of the shard. If the shard has no usable sample, those of the source serve.
    """
    if lengths[sample] <= seq_len:
        return sample
    inside = [i for i in range(index.num_samples) if index.shard[i] == index.shard[sample]]
    k = sum(lengths[i] > seq_len for i in inside if i < sample)
    usable = [i for i in inside if lengths[i] <= seq_len]
    usable = usable or [i for i in range(index.num_samples) if lengths[i] <= seq_len]
    after = sum(i < sample for i in usable)
    return usable[(after + k) % len(usable)]


def slow_window(indices, config, weights, window):
    """Return the rows of a window: lists of (source, index, position, epoch, start, length)."""
    lengths = [
        [len(slow_sample(index, i, config.limits)[0]) for i in range(index.num_samples)]
        for index in indices
    ]
    orders = [
        ShardOrder(np.bincount(index.shard).tolist(), config.shard_window, config.seed, index.name)
        for index in indices
    ]
    segments = append_segment((), 0, weights)
    drawn = []
    for position in range(window * config.pack_window, (window + 1) * config.pack_window):
        [source], [draw] = blend([position], segments)
        [sample], [epoch] = orders[source].samples([draw])
        sample = slow_substitute(indices[source], sample, lengths[source], config.seq_len)
        drawn.append((int(source), int(sample), position, int(epoch), lengths[source][sample]))
    longest_first = sorted(drawn, key=lambda d: (-d[4], d[2]))
    packed = {}
    for sample, row in zip(
        longest_first, slow_best_fit([d[4] for d in longest_first], config.seq_len)
    ):
        packed.setdefault(row, []).append(sample)
    rows = []
    for members in sorted(packed.values(), key=lambda members: members[0][2]):
        start, row = 0, []
        for source, sample, position, epoch, length in sorted(members, key=lambda d: d[2]):
            row.append((source, sample, position, epoch, start, length))
            start += length
        rows.append(row)
    return rows


def part_of(plan, sample):
    """Return the slice of its row that a sample of a plan occupies."""
    start = int(plan.samples.start[sample])
    return slice(start, start + int(plan.samples.length[sample]))
