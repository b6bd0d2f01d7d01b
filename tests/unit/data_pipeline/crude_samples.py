"""Samples with every kind of segment and medium that a document may hold."""

from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    RegionSegment,
    TextSegment,
    VideoSegment,
)
from tests.unit.data_pipeline.media import encoded, mp4, noise


def crude(count: int = 8) -> list[CrudeSample]:
    """Return samples of four forms that together have every kind of segment."""
    clip = mp4(22)
    made = []
    for i in range(count):
        picture = ImageSegment(encoded(noise(28 + i, 40, i)), "png")
        photo = ImageSegment(encoded(noise(33, 57 + i, i), "JPEG"), "jpg")
        drawing = ImageSegment(encoded(noise(20, 20 + i, i), "WEBP", lossless=True), "webp")
        segments = [
            [TextSegment(f"plain text number {i}"), TextSegment(texts=["one", "another", "third"])],
            [
                RegionSegment("point", [[3.5, 4]], "a speck"),
                picture,
                TextSegment("Where?", False),
                RegionSegment("box", [[1, 2], [20, 25.25]], " Here"),
                RegionSegment("polygon", [[0, 0], [40, 0], [40, 28]], " corner"),
                RegionSegment("turn", degrees=90, label=" turned"),
            ],
            [TextSegment("Look:"), VideoSegment(clip), TextSegment("gone"), photo],
            [photo, drawing, RegionSegment("box", [[0, 0], [20, 20]], " all", media=1)],
        ][i % 4]
        made.append(CrudeSample(f"s-{i:04d}", segments, {"number": i}))
    return made
