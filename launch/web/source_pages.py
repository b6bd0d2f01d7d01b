"""Pages of sources, of their samples as a grid, and of single samples with their media.

A page of samples and the part of it that htmx requests share one address; the answer sets the
address that the browser shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from data_pipeline.govern.holds import read_holds
from data_pipeline.inspect.find import HOLDS, STRETCH, Wanted, count, find, longest, number_of
from launch.pages import html
from launch.pages.pictures import overlay
from launch.pages.samples_page import Medium, StoredSample, samples_body
from launch.web.corpus import Corpus, NotHere, ShownSource
from launch.web.media import file_answer
from launch.web.site import html_answer, page, ready, site_of, whole

PAGE = 60  # samples loaded at first, and at each scroll to the end
_LARGE = 896  # pixels of the longer side of a sample's pictures
_WORDS = 280  # characters of a text in the grid


def sources(request: Request) -> Response:
    """Show all sources."""
    site = site_of(request)
    corpus, known = site.corpus, {}
    if site.records is not None:
        known = site.records.lying_at(corpus.store.uri, corpus.endpoint)
    rows = [
        {
            "name": source.name,
            **{key: source.manifest[key] for key in ("category", "samples", "items")},
            "shards": len(source.manifest["shards"]),
            "bytes": sum(shard["size"] for shard in source.manifest["shards"]),
            "tokenizer": source.manifest["tokenizer"]["name"],
            "redacted": source.num_redacted,
            "version": known.get(source.name),
            "same": known.get(source.name, {}).get("content_hash")
            == source.manifest["content_hash"],
        }
        for source in corpus.every()
    ]
    return page(request, "sources.html", rows=rows)


def source(request: Request) -> Response:
    """Show one source."""
    site = site_of(request)
    shown = site.corpus.source(request.path_params["name"])
    known = None
    if site.records is not None:
        places = site.records.lying_at(site.corpus.store.uri, site.corpus.endpoint)
        known = places.get(shown.name)
    return page(
        request,
        "source.html",
        source=shown,
        manifest=shown.manifest,
        provenance=shown.provenance(),
        version=known,
        holds=read_holds(site.corpus.store, [shown.name]),
        trained=site.trains_on(shown),
    )


# Samples ----------------------------------------------------------------------------------------

_NUMBERS = tuple(one.name for one in fields(Wanted) if one.name not in ("key", "holds"))


@dataclass(frozen=True)
class Asked:
    """Request for a page of samples."""

    source: str
    category: str
    order: str
    wanted: Wanted

    @property
    def query(self) -> str:
        """Canonical query string of the request."""
        given = {"source": self.source, "category": self.category, **self.wanted.asks}
        if self.order != "stored":
            given["order"] = self.order
        return urlencode({key: value for key, value in given.items() if value != ""})

    @property
    def values(self) -> dict[str, Any]:
        """Values of the form's fields."""
        empty = dict.fromkeys((one.name for one in fields(Wanted)), "")
        chosen = {"source": self.source, "category": self.category, "order": self.order}
        return empty | self.wanted.asks | chosen


def _asked(request: Request) -> Asked:
    given = request.query_params
    order = given.get("order", "stored") or "stored"
    if order not in ("stored", "longest"):
        raise ValueError(f"order={order[:40]!r}: expected stored or longest")
    numbers = {name: whole(given.get(name, ""), name) for name in _NUMBERS}
    key, holds = given.get("key", "")[:200], given.get("holds", "")
    if holds not in HOLDS:
        raise ValueError(f"holds={holds[:40]!r}: expected one of {', '.join(HOLDS)}")
    wanted = Wanted(key=key, holds=holds, **numbers)
    return Asked(given.get("source", ""), given.get("category", ""), order, wanted)


def samples(request: Request) -> Response:
    """Show samples as a grid: the whole page, only the grid after a filter, or further samples."""
    site, asked = site_of(request), _asked(request)
    chosen = site.corpus.chosen(asked.source, asked.category)
    after = request.query_params.get("after", "")
    cards, following = _cards(site.corpus, asked, chosen, after)
    values: dict[str, Any] = {"cards": cards, "following": following, "query": asked.query}
    address = f"/samples?{asked.query}" if asked.query else "/samples"
    if "hx-request" not in request.headers or "hx-history-restore-request" in request.headers:
        answer = page(
            request,
            "samples.html",
            **values,
            values=asked.values,
            names=site.corpus.names,
            categories=site.corpus.categories,
            holds=[name for name in HOLDS if name],
        )
    elif after:
        answer = page(request, "cards.html", **values)
    else:
        answer = page(request, "grid.html", **values)
        answer.headers["HX-Push-Url"] = address
    answer.headers["Vary"] = "HX-Request"
    return answer


def _cards(
    corpus: Corpus, asked: Asked, chosen: Sequence[ShownSource], after: str
) -> tuple[list[tuple[str, Any]], str | None]:
    """Return samples with their sources, and the position of the next one, "SOURCE:NUMBER"."""
    if asked.order == "longest":
        found = [
            (shown.name, one)
            for shown in chosen
            for one in longest(corpus.facts(shown), asked.wanted, PAGE)
        ]
        return sorted(found, key=lambda one: -one[1].tokens)[:PAGE], None
    left, first = list(chosen), 0
    if after:
        name, _, given = after.rpartition(":")
        names = [shown.name for shown in chosen]
        if name not in names or (place := whole(given, "after")) is None:
            raise ValueError(f"after={after[:80]!r}: expected SOURCE:NUMBER")
        left, first = left[names.index(name) :], place
    cards: list[tuple[str, Any]] = []
    looked = 0
    while left and len(cards) < PAGE and looked < STRETCH:
        shown = left[0]
        total = shown.cut.num_samples
        found = find(corpus.facts(shown), asked.wanted, first, PAGE - len(cards))
        cards += [(shown.name, one) for one in found.samples]
        looked += (total if found.after is None else found.after) - first
        if found.after is not None:
            first = found.after
        else:
            left, first = left[1:], 0
    return cards, f"{left[0].name}:{first}" if left else None


def how_many(request: Request) -> Response:
    """Show how many samples match the request."""
    site, asked = site_of(request), _asked(request)
    corpus = site.corpus
    chosen = corpus.chosen(asked.source, asked.category)
    found = sum(count(corpus.facts(shown), asked.wanted) for shown in chosen)
    total = sum(shown.cut.num_samples for shown in chosen)
    return html_answer(f"{found:,} of {total:,} samples")


def words(request: Request) -> Response:
    """Show the first words of a sample."""
    shown = site_of(request).corpus.source(request.path_params["name"])
    document = shown.document(request.path_params["number"])
    texts = (
        (one.get("texts") or [one["text"]])[0]
        for one in document["segments"]
        if one["kind"] == "text"
    )
    return html_answer(html.text(" ".join(texts)[:_WORDS]))


def sample(request: Request) -> Response:
    """Show one sample: its texts, its media with regions on them, and its metadata."""
    site, at = site_of(request), request.path_params["number"]
    shown = site.corpus.source(request.path_params["name"])
    index, first = shown.around(at)
    stored = StoredSample(at - first, shown.document(at), before=first)

    def show(_: StoredSample, medium: Medium) -> str:
        return _shown_medium(shown.name, at, medium)

    return page(
        request,
        "sample.html",
        source=shown.name,
        number=at,
        key=index.key_of(at - first),
        last=shown.cut.num_samples - 1,
        body=ready(samples_body(index, [stored], show)),
        trained=site.trains_on(shown),
    )


def _shown_medium(source: str, sample: int, medium: Medium) -> str:
    """Return HTML that shows the stored media file itself."""
    href = f"/media/{quote(source, safe='')}/{sample}/{quote(medium.name, safe='')}"
    if medium.name.endswith(".mp4"):
        return f'<video controls muted preload="metadata" src="{html.text(href)}"></video>'
    return overlay(href, medium.size, medium.size, medium.shapes, _LARGE)


def by_key(request: Request) -> Response:
    """Redirect to a sample by its key."""
    corpus, name = site_of(request).corpus, request.path_params["name"]
    key = request.path_params["key"]
    found = number_of(corpus.facts(corpus.source(name)), key)
    if found is None:
        raise NotHere(f"source {name!r}: no sample {key!r}")
    return RedirectResponse(f"/sources/{quote(name, safe='')}/samples/{found}", 303)


def medium(request: Request) -> Response:
    """Send a media file or a part of it."""
    site, at = site_of(request), request.path_params
    return site.media.file(request, site.corpus.source(at["name"]), at["number"], at["file"])


def thumbnail(request: Request) -> Response:
    """Send a thumbnail of a sample's first media file."""
    site, at = site_of(request), request.path_params
    found = site.media.small(site.corpus.source(at["name"]), at["number"])
    if found is None:
        raise NotHere(f"source {at['name']!r}: sample {at['number']} has no media")
    return file_answer(found)


def picture(request: Request) -> Response:
    """Send a picture that a page rendered."""
    return site_of(request).media.picture(request.path_params["name"])
