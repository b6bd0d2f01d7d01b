"""Pages of a run's steps (rows, blends, draws of a sample) and of statistics."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from launch.pages.turns import ComeAgain
from launch.web.corpus import Corpus, NotHere
from launch.web.site import html_answer, number, page, ready, site_of
from launch.web.steps import MOST_EPOCHS, MOST_ROWS, MOST_STEPS


def _few_at_once(handler: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Limit concurrent slow requests; refuse the rest with a retry hint."""

    @wraps(handler)
    def gated(request: Request) -> Response:
        working = site_of(request).working
        if not working.acquire(blocking=False):
            raise ComeAgain("others are having steps planned or sources counted")
        try:
            return handler(request)
        finally:
            working.release()

    return gated


@_few_at_once
def rows(request: Request) -> Response:
    """Show rows of a step as the model gets them."""
    site = site_of(request)
    steps = site.needs_steps()
    step = number(request, "step", steps.first, 1, 10**12)
    first = number(request, "row", 0, 0, 10**9)
    chosen = number(request, "rows", 4, 1, MOST_ROWS)
    src = site.media.made(lambda: site.needs_steps() is steps)
    body = ready(steps.rows(step, first, chosen, src, site.media.decoder.decode))
    values = {"step": step, "row": first, "rows": chosen, "most": MOST_ROWS}
    total = steps.config.rows_per_step
    return page(request, "rows.html", **values, steps=steps, total=total, body=body)


@_few_at_once
def blend(request: Request) -> Response:
    """Show the mixture of sources in some steps."""
    steps = site_of(request).needs_steps()
    step = number(request, "step", steps.first, 1, 10**12)
    left = max(1, min(MOST_STEPS, steps.last - step + 1))
    chosen = number(request, "steps", min(50, left), 1, MOST_STEPS)
    body = ready(steps.blend(step, chosen))
    return page(request, "blend.html", step=step, count=chosen, most=left, steps=steps, body=body)


@_few_at_once
def draws(request: Request) -> Response:
    """Show a sample in several epochs of a run."""
    site, at = site_of(request), request.path_params["number"]
    shown, steps = site.corpus.source(request.path_params["name"]), site.needs_steps()
    first = number(request, "first", 0, 0, 10**6)
    epochs = range(first, first + number(request, "epochs", 6, 1, MOST_EPOCHS))
    index, before = shown.around(at)

    def still() -> bool:
        return site.corpus.source(shown.name) is shown and site.needs_steps() is steps

    media = site.media
    body = steps.draws(shown, at, epochs, media.whole, media.made(still), media.decoder.decode)
    return page(
        request,
        "draws.html",
        source=shown.name,
        number=at,
        key=index.key_of(at - before),
        first=first,
        epochs=len(epochs),
        most=MOST_EPOCHS,
        title=steps.title,
        body=ready(body),
    )


# Statistics -------------------------------------------------------------------------------------


def statistics(request: Request) -> Response:
    """Show the page of statistics, which loads the figures later."""
    site, given = site_of(request), request.query_params
    asked = {key: given.get(key, "") for key in ("source", "category", "against")}
    _counted_files(site.corpus, asked)
    query = urlencode({key: value for key, value in asked.items() if value})
    names, categories = site.corpus.names, site.corpus.categories
    return page(
        request, "statistics.html", names=names, categories=categories, query=query, asked=asked
    )


@_few_at_once
def counted(request: Request) -> Response:
    """Send the figures of the statistics page."""
    site, given = site_of(request), request.query_params
    asked = {key: given.get(key, "") for key in ("source", "category", "against")}
    files, against = _counted_files(site.corpus, asked)
    return html_answer(site.statistics.page(files, against))


def _counted_files(corpus: Corpus, asked: Mapping[str, str]) -> tuple[list[Any], Any]:
    chosen = corpus.chosen(asked["source"], asked["category"])
    if not chosen:
        raise NotHere(f"source {asked['source']!r} is not of category {asked['category']!r}")
    if asked["against"] and not asked["source"]:
        raise ValueError("against: choose the one source to compare with it")
    against = corpus.source(asked["against"]).facts_file if asked["against"] else None
    return [shown.facts_file for shown in chosen], against
