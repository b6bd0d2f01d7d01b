"""Small corpus with every kind of content that the pages show, from the demo's generators."""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, RegionSegment, TextSegment, VideoSegment
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from launch.demo import digits
from launch.demo.rendered_text import rendered_pages
from tests.unit.data_pipeline.media import mp4

TOKENIZER_KEY = "tokenizer/tiny.tiktoken"
HOSTILE = "</span><script>alert(\"1\")</script> & 'quoted' \N{SNOWMAN}\n"


def located_digits(count: int) -> Iterator[CrudeSample]:
    """Yield pages of digits; the text of each digit carries its box."""
    for page in digits.pages(digits.load_scans(), 0, purpose="digits", count=count, most=6):
        boxes = [
            RegionSegment("box", [[x1, y1], [x2, y2]], f" {digit}")
            for digit, (x1, y1, x2, y2) in zip(page.meta["digits"], page.meta["boxes"])
        ]
        yield CrudeSample(page.key, [*page.segments[:2], *boxes], page.meta)


def mixed() -> Iterator[CrudeSample]:
    """Yield samples with caption variants, points, polygons, turns, videos and hostile texts."""
    (page,) = rendered_pages(0, count=1)
    picture = page.segments[0]
    hostile = TextSegment(HOSTILE, False)
    corners = [[0, 0], [30, 0], [30, 20], [0, 20]]
    for number in range(6):
        yield CrudeSample(
            f"page-{number}",
            [
                RegionSegment("point", [[10 + number, 12]], HOSTILE),
                hostile,
                picture,
                RegionSegment("polygon", corners, " corner"),
                RegionSegment("turn", degrees=0, label=" turned"),
                TextSegment(texts=["a page", "one page of text", "Seite <b>"]),
            ],
            {"from": HOSTILE},
        )
        yield CrudeSample(f"clip-{number}", [TextSegment("See:"), VideoSegment(mp4(10))])


def prose() -> Iterator[CrudeSample]:
    """Yield texts: two are longer than a row of 256 tokens, and two are equal."""
    for number in range(12):
        words = f"Text {number}: the quick brown fox, 中文字符. " * (40 if number < 2 else 2)
        yield CrudeSample(f"text-{number:02d}", [TextSegment(words)])
    yield CrudeSample("again", [TextSegment(words)])


def build(root: Path) -> FolderStore:
    """Write the sources digits, mixed and prose, and their tokenizer."""
    store = FolderStore(root)
    texts = [HOSTILE + f"Text {i}: the quick brown fox, digits: image video 00:00:0{i}.500 page "
             for i in range(10)]  # fmt: skip
    ranks = train_ranks(texts, 320)
    store.put(TOKENIZER_KEY, ranks)
    tokenizer = Tokenizer(ranks, "tiny")
    sources = {"digits": (located_digits(60), "grounding"), "mixed": (mixed(), "ocr"),
               "prose": (prose(), "text")}  # fmt: skip
    for name, (samples, category) in sources.items():
        rejected = []
        ingest(samples, store, name, tokenizer, 1 << 16, category=category,
               rejected=rejected.append)  # fmt: skip
        assert not rejected, rejected
    return store
