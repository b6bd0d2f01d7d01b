"""Draws the augmentation of samples from metadata only: sizes, text variants, visible regions.

The draws are a function of (seed, source, sample, epoch) and the index. The planner computes them
for thousands of samples at once to get their lengths. The fetcher computes them again for the few
samples it reads, to augment their pixels and write their regions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.augment.config import AugmentConfig
from data_pipeline.augment.draws import Draw, Draws, choose_variants, draw, media_keys, sample_keys
from data_pipeline.augment.regions import survivors, written
from data_pipeline.index.columns import PIECE_REGION, SourceIndex
from data_pipeline.plan.csr import gather_rows, row_sums
from data_pipeline.plan.layout import Changes
from moonvit3d.geometry import KIND_IMAGE


@dataclass(frozen=True, eq=False)
class Chance:
    """Random draws of n samples.

    Attributes:
        variant: int64 [pieces] index of the chosen text of each piece.
        image: int64 [k] positions of the images among the samples' items.
        draws: draws of those images.
        keep: bool [regions] the region is still in view.
        points: float64 [points, 2] the regions' points in the augmented image.
        lost: bool [n] the sample had regions, and none of them is still in view.
    """

    variant: NDArray[np.int64]
    image: NDArray[np.int64]
    draws: Draws
    keep: NDArray[np.bool_]
    points: NDArray[np.float64]
    lost: NDArray[np.bool_]


@dataclass(frozen=True)
class Detail:
    """Random draws of one sample.

    Attributes:
        variants: index of the chosen text of each piece, in order.
        draws: number of a media file -> draw of that image; unchanged images are absent.
        regions: numbers to write for each region, in order; None for a region outside the frame.
    """

    variants: tuple[int, ...]
    draws: Mapping[int, Draw]
    regions: tuple[tuple[int, ...] | None, ...]


class Variation:
    """Random draws for the samples of one source.

    Args:
        index: index of the source.
        config: augmentation settings.
        seed: data seed of the run.
    """

    def __init__(self, index: SourceIndex, config: AugmentConfig, seed: int):
        self._index, self._config, self._seed = index, config, seed
        has_variants = config.variants and bool(index.variant_tokens.size)
        has_images = config.changes_images and bool((index.item_kind == KIND_IMAGE).any())
        self.active = has_variants or has_images

    def chance(
        self,
        samples: NDArray[np.integer],
        epochs: NDArray[np.integer],
        applied: NDArray[np.bool_] | None = None,
    ) -> Chance:
        """Return the draws of samples [n] in epochs [n]; False in `applied` disables them."""
        index, config = self._index, self._config
        applied = np.ones(len(samples), np.bool_) if applied is None else applied
        keys = sample_keys(self._seed, index.name, samples, epochs)
        pieces, piece_ptr = gather_rows(index.piece_ptr, samples)
        variant = np.zeros(pieces.size, np.int64)
        if config.variants:
            place = np.arange(pieces.size) - np.repeat(piece_ptr[:-1], np.diff(piece_ptr))
            piece_keys = media_keys(np.repeat(keys, np.diff(piece_ptr)), place)
            chosen = choose_variants(piece_keys, index.piece_variants[pieces])
            variant = np.where(np.repeat(applied, np.diff(piece_ptr)), chosen, 0)

        items, item_ptr = gather_rows(index.item_ptr, samples)
        image = np.flatnonzero(index.item_kind[items] == KIND_IMAGE)
        owner = np.repeat(np.arange(len(samples)), np.diff(item_ptr))[image]
        at = items[image]
        draws = draw(
            config,
            media_keys(keys[owner], index.item_media[at]),
            index.item_height[at],
            index.item_width[at],
            index.flip_ok[samples][owner],
            index.turn_ok[samples][owner],
        )
        draws = _only(draws, applied[owner])
        keep, points, lost = self._regions(samples, image, draws, applied)
        return Chance(variant, image, draws, keep, points, lost)

    def _regions(
        self,
        samples: NDArray[np.integer],
        image: NDArray[np.int64],
        draws: Draws,
        applied: NDArray[np.bool_],
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.bool_]]:
        """Move regions with their images; samples without augmentation keep all regions."""
        index = self._index
        regions, region_ptr = gather_rows(index.region_ptr, samples)
        points, _ = gather_rows(index.point_ptr, samples)
        places = np.stack([index.point_x[points], index.point_y[points]], axis=1).astype(np.float64)
        if not regions.size:
            return np.ones(0, np.bool_), places, np.zeros(len(samples), np.bool_)
        which = self._picture(samples, regions, region_ptr, image)
        count = index.region_points[regions].astype(np.int64)
        keep, moved = survivors(
            index.region_shape[regions],
            np.concatenate([[0], np.cumsum(count)]),
            places,
            draws.matrices()[which],
            draws.out_width[which],
            draws.out_height[which],
            self._config.min_visible,
        )
        still = ~np.repeat(applied, np.diff(region_ptr))
        keep = keep | still
        moved = np.where(np.repeat(still, count)[:, None], places, moved)
        lost = (np.diff(region_ptr) > 0) & (row_sums(keep.astype(np.int64), region_ptr) == 0)
        return keep, moved, lost

    def changes(self, samples: NDArray[np.integer], chance: Chance) -> Changes:
        """Return the piece and item sizes of those samples after the draws."""
        index = self._index
        pieces, piece_ptr = gather_rows(index.piece_ptr, samples)
        items, _ = gather_rows(index.item_ptr, samples)
        tokens = index.piece_tokens[pieces].astype(np.int64)
        other = np.flatnonzero(chance.variant)
        if other.size:
            before = np.concatenate([[0], np.cumsum(index.piece_variants[pieces] - np.int64(1))])
            first = np.repeat(
                index.variant_ptr[samples] - before[piece_ptr[:-1]], np.diff(piece_ptr)
            )
            at = first[other] + before[other] + chance.variant[other] - 1
            tokens[other] = index.variant_tokens[at]
        written = np.flatnonzero(index.piece_kind[pieces] == PIECE_REGION)
        tokens[written[~chance.keep]] = 0
        height = index.item_height[items].astype(np.int64)
        width = index.item_width[items].astype(np.int64)
        height[chance.image] = chance.draws.out_height
        width[chance.image] = chance.draws.out_width
        return Changes(tokens, height, width)

    def details(
        self,
        samples: NDArray[np.integer],
        epochs: NDArray[np.integer],
        applied: NDArray[np.bool_],
    ) -> list[Detail]:
        """Return the draws of each of samples [n]; `applied` [n] comes from the plan."""
        index = self._index
        chance = self.chance(samples, epochs, applied)
        items, item_ptr = gather_rows(index.item_ptr, samples)
        owner = np.searchsorted(item_ptr, chance.image, side="right") - 1
        media = index.item_media[items[chance.image]]
        draws: list[dict[int, Draw]] = [{} for _ in samples]
        for number, (sample, file) in enumerate(zip(owner.tolist(), media.tolist())):
            one = chance.draws.one(number)
            if not one.is_nothing:
                draws[sample][file] = one
        variants = np.split(chance.variant, gather_rows(index.piece_ptr, samples)[1][1:-1])
        return [
            Detail(tuple(chosen.tolist()), found, numbers)
            for chosen, found, numbers in zip(variants, draws, self._numbers(samples, chance))
        ]

    def _numbers(
        self, samples: NDArray[np.integer], chance: Chance
    ) -> list[tuple[tuple[int, ...] | None, ...]]:
        """Return the numbers to write for each region of each sample."""
        index = self._index
        regions, region_ptr = gather_rows(index.region_ptr, samples)
        numbers: list[tuple[int, ...] | None] = []
        if regions.size:
            which = self._picture(samples, regions, region_ptr, chance.image)
            end = np.cumsum(index.region_points[regions].astype(np.int64))
            for place, shape in enumerate(index.region_shape[regions].tolist()):
                points = chance.points[end[place - 1] if place else 0 : end[place]]
                width = int(chance.draws.out_width[which[place]])
                height = int(chance.draws.out_height[which[place]])
                kept = chance.keep[place]
                numbers.append(written(shape, points, width, height) if kept else None)
        return [tuple(numbers[begin:end]) for begin, end in zip(region_ptr[:-1], region_ptr[1:])]

    def _picture(
        self,
        samples: NDArray[np.integer],
        regions: NDArray[np.int64],
        region_ptr: NDArray[np.int64],
        image: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return, for each region, which of the samples' images contains it."""
        _, item_ptr = gather_rows(self._index.item_ptr, samples)
        owner = np.repeat(np.arange(len(samples)), np.diff(region_ptr))
        # Only images have regions, so the search always finds the item.
        return np.searchsorted(image, item_ptr[owner] + self._index.region_item[regions])


def _only(draws: Draws, applied: NDArray[np.bool_]) -> Draws:
    """Return the draws with identity draws for images that must stay unchanged."""
    no = np.zeros_like(applied)
    left = draw(AugmentConfig(), no.astype(np.uint64), draws.height, draws.width, no, no)
    return Draws(*(
        np.where(applied if column.ndim == 1 else applied[:, None], column, getattr(left, name))
        for name, column in vars(draws).items()
    ))  # fmt: skip
