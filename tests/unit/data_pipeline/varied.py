"""Indices with variants, regions and images, and a slow reference of their augmented lengths."""

import numpy as np

from data_pipeline.augment.draws import choose_variants, draw, media_keys, sample_keys
from data_pipeline.augment.regions import BOX, POINT, POINT_SLACK, POLYGON, POLYGON_SLACK, TURN
from data_pipeline.index.columns import (
    GROUPS,
    PIECE_ITEM,
    PIECE_REGION,
    PIECE_TEXT,
    ShardInfo,
    SourceIndex,
)
from data_pipeline.plan.layout import limits_at
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, grid


def varied_index(name, shard_sizes, seed=0, *, pictures=0.7, regions=0.6, side=600):
    """Return an index of random samples: texts with variants, images, videos, regions in images."""
    rng = np.random.default_rng(seed)
    num_samples = sum(shard_sizes)
    columns = {column: [] for group in GROUPS.values() for column in group}
    pointers = {f"{group}_ptr": [0] for group in GROUPS}
    for _ in range(num_samples):
        _append_sample(columns, rng, pictures, regions, side)
        for group, names in GROUPS.items():
            pointers[f"{group}_ptr"].append(len(columns[next(iter(names))]))
    kinds = {column: kind for group in GROUPS.values() for column, kind in group.items()}
    shard = np.repeat(np.arange(len(shard_sizes)), shard_sizes)
    return SourceIndex(
        name=name,
        category="grounding",
        shards=tuple(ShardInfo(f"{name}/{i}.tar", 0, "", n) for i, n in enumerate(shard_sizes)),
        key=[f"{i:05d}" for i in range(num_samples)],
        shard=shard.astype(np.int32),
        json_offset=np.zeros(num_samples, np.int64),
        json_length=np.zeros(num_samples, np.int64),
        json_crc=np.zeros(num_samples, np.uint32),
        flip_ok=rng.random(num_samples) < 0.5,
        turn_ok=rng.random(num_samples) < 0.5,
        tokenizer_name="none",
        tokenizer_hash="",
        **{column: np.array(values, kinds[column]) for column, values in columns.items()},
        **{pointer: np.array(values, np.int64) for pointer, values in pointers.items()},
    )


def _append_sample(columns, rng, pictures, regions, side):
    items = 0
    for media in range(int(rng.random() < pictures) + int(rng.random() < pictures / 3)):
        _text(columns, rng)
        is_video = rng.random() < 0.2
        height, width = (int(n) for n in rng.integers(20, side, 2))
        for chunk in range(int(rng.integers(1, 3)) if is_video else 1):
            kind = KIND_VIDEO if is_video else KIND_IMAGE
            values = (kind, media, chunk, rng.integers(1, 5) if is_video else 1, height, width)
            names = ("kind", "media", "chunk", "frames", "height", "width")
            for name, value in zip(names, values):
                columns[f"item_{name}"].append(value)
            for name in ("offset", "length", "crc"):
                columns[f"item_{name}"].append(0)
            _piece(columns, PIECE_ITEM, 11 if is_video else 3)
        while not is_video and rng.random() < regions:
            _region(columns, rng, items, height, width)
        items += chunk + 1
    _text(columns, rng)


def _text(columns, rng):
    others = rng.integers(0, 4)
    _piece(columns, PIECE_TEXT, rng.integers(0, 60), 1 + others)
    columns["variant_tokens"] += rng.integers(0, 90, others).tolist()


def _piece(columns, kind, tokens, variants=1):
    for name, value in zip(("kind", "tokens", "variants"), (kind, tokens, variants)):
        columns[f"piece_{name}"].append(value)


def _region(columns, rng, item, height, width):
    shape = int(rng.integers(0, 3))
    x, y = rng.random() * width, rng.random() * height
    points = {
        POINT: [(x, y)],
        BOX: [(x * 0.7, y * 0.7), (x * 0.7 + 4, y * 0.7 + 5)],
        POLYGON: [(x * 0.5, y * 0.5), (x * 0.5 + 3, y * 0.5), (x * 0.5, y * 0.5 + 4)],
    }[shape]
    columns["region_item"].append(item)
    columns["region_shape"].append(shape)
    columns["region_points"].append(len(points))
    columns["point_x"] += [px for px, _ in points]
    columns["point_y"] += [py for _, py in points]
    _piece(columns, PIECE_REGION, 5 + 4 * 2 * len(points))


def move(points, matrix):
    """Map points [k, 2] with a 3x3 matrix; a matrix product may round differently."""
    x, y = np.asarray(points, float).reshape(-1, 2).T
    (a, b, c), (d, e, f), _ = np.asarray(matrix)
    return np.stack([a * x + b * y + c, d * x + e * y + f], axis=1)


def slow_survivor(shape, points, matrix, out_w, out_h, min_visible):
    """Return `regions.survivors` for one region: [k, 2], or None if it is dropped."""
    given = np.asarray(points, float).tolist()
    if shape == TURN:
        (a, b, _), (d, e, _), _ = matrix.tolist()
        assert a * e - b * d > 0
        quarters = (0 if a > 0 else 2) if abs(a) >= abs(d) else (1 if d > 0 else 3)
        return np.array([[(given[0][0] + 90.0 * quarters) % 360.0, 0.0]])
    if shape == BOX:
        (x0, y0), (x1, y1) = given
        given = [[x0, y0], [x1, y0], [x0, y1], [x1, y1]]
    moved = move(given, matrix).tolist()
    if shape == BOX:
        xs, ys = zip(*moved)
        area = (max(xs) - min(xs)) * (max(ys) - min(ys))
        left, right = _inside(min(xs), out_w), _inside(max(xs), out_w)
        top, bottom = _inside(min(ys), out_h), _inside(max(ys), out_h)
        seen = (right - left) * (bottom - top)
        return np.array([[left, top], [right, bottom]]) if 0 < seen >= min_visible * area else None
    slack = POINT_SLACK if shape == POINT else POLYGON_SLACK
    if not all(-slack <= x <= out_w + slack and -slack <= y <= out_h + slack for x, y in moved):
        return None
    return np.array([[_inside(x, out_w), _inside(y, out_h)] for x, y in moved])


def _inside(value, end):
    return min(max(value, 0.0), float(end)) + 0.0


def slow_varied(index, config, seed, sample, epoch, limits, level=0, applied=True):
    """Lay out a sample in an epoch, piece by piece: (length, [(first pad, pads, grid)], lost).

    `lost` is true if the sample had regions and none is in view.
    """
    [key] = sample_keys(seed, index.name, [sample], [epoch])
    keys = np.array([key])
    begin, end = index.piece_ptr[sample], index.piece_ptr[sample + 1]
    item = int(index.item_ptr[sample])
    region = int(index.region_ptr[sample])
    variant = int(index.variant_ptr[sample])
    point = int(index.point_ptr[sample])
    draws = {}
    for line in range(index.item_ptr[sample], index.item_ptr[sample + 1]):
        if index.item_kind[line] == KIND_IMAGE and applied:
            draws[line] = draw(
                config,
                media_keys(keys, [index.item_media[line]]),
                [index.item_height[line]],
                [index.item_width[line]],
                [index.flip_ok[sample]],
                [index.turn_ok[sample]],
            )
    length, items, kept, seen = 1, [], 0, 0
    for place, piece in enumerate(range(begin, end)):
        kind, tokens = index.piece_kind[piece], int(index.piece_tokens[piece])
        if kind == PIECE_TEXT:
            number = int(index.piece_variants[piece])
            chosen = 0
            if config.variants and applied:
                [chosen] = choose_variants(media_keys(keys, [place]), [number])
            length += tokens if chosen == 0 else int(index.variant_tokens[variant + chosen - 1])
            variant += number - 1
        elif kind == PIECE_REGION:
            count = int(index.region_points[region])
            points = [
                (float(index.point_x[p]), float(index.point_y[p]))
                for p in range(point, point + count)
            ]
            line = int(index.item_ptr[sample]) + int(index.region_item[region])
            found = True
            if line in draws:
                d = draws[line]
                found = slow_survivor(
                    int(index.region_shape[region]), points, d.matrices()[0],
                    int(d.out_width[0]), int(d.out_height[0]), config.min_visible,
                ) is not None  # fmt: skip
            length += tokens if found else 0
            kept, seen, region, point = kept + found, seen + 1, region + 1, point + count
        else:
            height, width = int(index.item_height[item]), int(index.item_width[item])
            if item in draws:
                height, width = int(draws[item].out_height[0]), int(draws[item].out_width[0])
            shape = grid(
                int(index.item_kind[item]), int(index.item_frames[item]), height, width,
                limits_at(limits, level),
            )  # fmt: skip
            pads = shape[1] * shape[2] // 4
            items.append((length + tokens, pads, shape))
            length += tokens + pads + 1
            item += 1
    return length + 1, items, seen > 0 and kept == 0
