"""The page in a real browser, offline: Debian's Chromium, one server and browser for all tests."""

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

import pytest

pytest.importorskip(
    "playwright", reason="playwright is not installed: no browser looks at the page"
)
pytest.importorskip("starlette", reason="the extra platform is not installed")
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from starlette.requests import Request

from data_pipeline.catalog.engine import Catalog
from data_pipeline.catalog.register import look, register
from launch.pages.turns import ComeAgain
from launch.web.site import told_again
from tests.unit.launch.served import (
    BOX,
    PAYLOADS,
    POINT,
    POLYGON,
    SIDES,
    build_served,
    config_file,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="Chromium is not installed (apt-get install chromium): no browser looks at the page",
)
WAIT_MS = 20_000


@contextmanager
def served(root: Path, folder: Path, *options: str) -> Iterator[str]:
    """Run the command and yield the address it prints."""
    env = os.environ | {"KIMI_PRETRAIN_FACTS": str(folder / "facts")}
    words = [sys.executable, "-m", "launch.cli", "data", "serve", str(root), *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("open "), (folder / "log").read_text()
            yield line.split()[1]
        finally:
            process.terminate()
            process.wait(60)


NOWHERE = f"/sources/{quote(PAYLOADS[0], safe='')}"  # no source has this name


@pytest.fixture(scope="module")
def visit(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A signed-in page, with its requests and console messages."""
    folder = tmp_path_factory.mktemp("served")
    store = build_served(folder / "corpus")
    config = config_file(store.root, folder / "my.yaml")
    where = str(folder / "catalog.sqlite")
    catalog = Catalog(where)
    for name in ("digits", "hostile"):
        register(catalog, look(store, None, name), owner=PAYLOADS[0], tags=[PAYLOADS[1]])
    catalog.close()
    options = ("--config", str(config), "--catalog", where, "--role", "admin")
    with served(store.root, folder, *options) as address, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.set_default_timeout(WAIT_MS)
        found = SimpleNamespace(page=page, address=address, asked=[], said=[], answers=[])
        page.on("request", lambda one: found.asked.append(one.url))
        page.on("response", lambda one: found.answers.append((one.url, one.status)))
        page.on(
            "console",
            lambda one: found.said.append(f"{one.type}: {one.text} at {one.location['url']}"),
        )
        page.on("pageerror", lambda one: found.said.append(f"error: {one}"))
        page.goto(address)
        page.wait_for_url("**/")
        found.base = "{0.scheme}://{0.netloc}".format(urlsplit(address))
        yield found
        browser.close()


@pytest.fixture(autouse=True)
def _nothing_else(visit) -> Iterator[None]:
    """No test may send a request to another site, run a payload, or violate the policy."""
    yield
    assert [url for url in visit.asked if not url.startswith(visit.base + "/")] == []
    assert visit.page.evaluate("window.evil") is None
    # The browser reports the 404 for this path.
    said = [line for line in visit.said if not line.endswith(NOWHERE)]
    assert [line for line in said if line.startswith("error")] == []


def goto(visit, path: str) -> Page:
    visit.page.goto(visit.base + path)
    return visit.page


def test_the_printed_address_signs_in_once(visit):
    assert visit.page.locator("h1").inner_text().startswith("Sources at ")
    names = visit.page.locator("tbody tr td:first-child").all_inner_texts()
    assert names == ["digits", "hostile", "mixed", "prose"]
    other = visit.page.context.browser.new_context().new_page()
    other.goto(visit.address)
    assert "was used before" in other.locator("[role=alert]").inner_text()
    other.goto(visit.base + "/samples")
    assert urlsplit(other.url).path == "/login"
    other.context.close()


def test_a_filter_is_kept_by_a_reload(visit):
    page = goto(visit, "/samples")
    page.fill("input[name=key]", "EVIL")
    page.wait_for_url("**/samples?key=EVIL")
    page.wait_for_function("n => document.querySelectorAll('.card').length == n", arg=len(PAYLOADS))
    keys = page.locator(".card b")
    assert keys.all_inner_texts() == [f"evil/{n:02d}" for n in range(len(PAYLOADS))]
    page.select_option("select[name=holds]", "points")
    page.fill("input[name=tokens_to]", "100000")
    page.wait_for_url("**tokens_to=100000")
    page.reload()
    assert page.input_value("input[name=key]") == "EVIL"
    assert page.input_value("select[name=holds]") == "points"
    assert page.input_value("input[name=tokens_to]") == "100000"
    assert keys.count() == len(PAYLOADS)
    page.wait_for_function("() => document.querySelector('#how-many').textContent.includes(' of ')")
    assert page.locator("#how-many").inner_text() == f"{len(PAYLOADS)} of 100 samples"
    page.fill("input[name=tokens_to]", "many")
    page.wait_for_function("() => document.querySelector('[role=alert]')")
    assert "tokens_to='many': expected a whole number" in page.inner_text("#grid")
    visit.said.clear()  # the browser reports the status 400


def test_the_grid_goes_on_when_it_is_scrolled_and_has_pictures_and_words(visit):
    page = goto(visit, "/samples")
    page.wait_for_function("() => document.querySelector('.card img').naturalWidth > 10")
    first = page.locator(".card").count()
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.wait_for_function("n => document.querySelectorAll('.card').length > n", arg=first)
    page.goto(visit.base + "/samples?source=prose")
    page.wait_for_function("() => document.querySelector('.card .words').textContent.length > 20")
    assert "quick brown fox" in page.locator(".card .words").first.inner_text()


def test_payloads_are_text_wherever_they_stand(visit):
    page = goto(visit, "/sources/hostile/samples/0")
    for number, payload in enumerate(PAYLOADS):
        page.goto(f"{visit.base}/sources/hostile/samples/{number}")
        shown = page.locator(".words").all_inner_texts()
        assert shown[0] == payload
        assert sum(text.startswith(payload) for text in shown[1:]) == 3  # labels
        page.locator("summary").click()
        assert payload in page.inner_text("pre").replace('\\"', '"')
    for path in (
        "/sources/hostile/rejected", "/sources/hostile", "/versions", "/versions/hostile@1",
        "/audit", "/rows?step=2&rows=16", "/sources/hostile/samples/1/draws", "/governance",
        f"/samples?key={quote(PAYLOADS[2])}", NOWHERE,
    ):  # fmt: skip
        text = goto(visit, path).content()
        assert "<script>" not in text, path
    page.goto(visit.base + "/sources/hostile/rejected?reason=bad%20key")
    keys = page.locator("tbody td:first-child").all_inner_texts()
    assert keys == [f"{payload}{number}" for number, payload in enumerate(PAYLOADS)]
    page.goto(visit.base + "/words/hostile/1")
    assert page.inner_text("body") == PAYLOADS[1]


# Screen coordinates of the shapes' corners and of the picture, as computed by the browser.
PLACES = """() => {
  const svg = document.querySelector('figure svg');
  const onScreen = (shape) => {
    const box = shape.getBBox(), matrix = shape.getScreenCTM();
    const corner = (x, y) => { const p = new DOMPoint(x, y).matrixTransform(matrix);
                               return [p.x, p.y]; };
    return [...corner(box.x, box.y), ...corner(box.x + box.width, box.y + box.height)];
  };
  const picture = svg.querySelector('image').getBoundingClientRect();
  return {picture: [picture.left, picture.top, picture.width, picture.height],
          box: onScreen(svg.querySelector('rect')),
          point: onScreen(svg.querySelector('circle')),
          polygon: onScreen(svg.querySelector('polygon'))};
}"""


@pytest.mark.parametrize("path", ["/sources/hostile/samples/0"])
def test_overlays_lie_on_the_stored_pixels_of_a_turned_picture(visit, path):
    page = goto(visit, path)
    page.locator("figure svg").first.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    found = page.evaluate(PLACES)
    left, top, width, height = found["picture"]
    assert width / height == pytest.approx(SIDES[0] / SIDES[1], abs=0.01)

    def on_screen(x: float, y: float) -> list[float]:
        return [left + x * width / SIDES[0], top + y * height / SIDES[1]]

    corners = {
        "box": [*on_screen(*BOX[0]), *on_screen(*BOX[1])],
        "polygon": [
            *on_screen(min(x for x, _ in POLYGON), min(y for _, y in POLYGON)),
            *on_screen(max(x for x, _ in POLYGON), max(y for _, y in POLYGON)),
        ],
    }
    for name, expected in corners.items():
        assert found[name] == pytest.approx(expected, abs=0.5), name
    middle = [sum(found["point"][at::2]) / 2 for at in (0, 1)]
    assert middle == pytest.approx(on_screen(*POINT), abs=0.5)
    # The picture is shown as stored, with its red corner at the top left, not rotated by EXIF.
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    scale = width / SIDES[0]
    for x, y, red in ((8, 5, True), (190, 5, False), (8, 95, False), (190, 95, False)):
        pixel = shot.getpixel((round(left + x * scale), round(top + y * scale)))
        assert (pixel[0] > 200 and pixel[2] < 60) == red, (x, y, pixel)


def test_a_video_plays_and_seeks(visit):
    page = goto(visit, f"/sources/hostile/samples/{len(PAYLOADS)}")
    page.wait_for_function("() => document.querySelector('video').readyState >= 2")
    page.evaluate("document.querySelector('video').play()")
    page.wait_for_function("() => document.querySelector('video').currentTime > 0.2")
    page.evaluate("document.querySelector('video').currentTime = 12")
    page.wait_for_function(
        "() => { const v = document.querySelector('video');"
        " return !v.seeking && v.readyState >= 2 && v.currentTime >= 12; }"
    )
    assert page.evaluate("document.querySelector('video').error") is None
    assert any(status == 206 for url, status in visit.answers if url.endswith(".mp4"))


def test_rows_blend_draws_and_statistics(visit):
    page = goto(visit, "/rows?step=3&row=1&rows=2")
    assert page.locator("h1").inner_text() == "Step 3, rows 1 to 2"
    assert page.locator(".t.l").count() > 20
    assert page.locator("svg.row rect").first.bounding_box()["width"] > 1
    page.fill("input[name=step]", "4")
    page.click("text=Show")
    page.wait_for_url("**step=4**")
    assert page.locator("h2").first.inner_text() == "Row 1 of step 4"
    goto(visit, "/blend?steps=20")
    assert page.locator("svg.blend rect").count() > 20
    shares = [float(cell.split()[0]) for cell in
              page.locator("tbody tr td:nth-child(4)").all_inner_texts()]  # fmt: skip
    assert sum(shares) == pytest.approx(100, abs=0.5)
    goto(visit, "/sources/hostile/samples/0/draws")
    assert page.locator(".draws article").count() == 6
    pictures = page.locator(".draws image").evaluate_all("all => all.map(one => one.href.baseVal)")
    assert len({*pictures}) > 1
    goto(visit, "/statistics?source=digits")
    page.wait_for_selector("#counted svg")
    assert page.locator("#counted svg").count() > 5
    fills = page.locator("#counted svg path").evaluate_all(
        "all => [...new Set(all.map(one => getComputedStyle(one).fill))]"
    )
    assert len(fills) > 1  # the policy lets the plots keep their colours


def test_what_is_not_ready_comes_again_by_itself(visit):
    """A whole page reloads by its header, a part by htmx; each first request is answered 503."""
    path, query = "/statistics/counted", "source=prose"
    headers = [(b"hx-request", b"true"), (b"host", b"testserver")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode()}
    part = told_again(Request({**scope, "headers": headers}), ComeAgain(PAYLOADS[0]))
    seen: list[str] = []

    def answer_by(body: str, **more: str):
        def answer(route):
            seen.append(urlsplit(route.request.url).path)
            route.fulfill(status=503, headers={"content-type": "text/html", **more}, body=body)

        return answer

    visit.page.route(f"{visit.base}{path}?{query}", answer_by(part.body.decode()), times=1)
    goto(visit, f"/statistics?{query}")
    visit.page.wait_for_selector("#counted svg")
    assert PAYLOADS[0] not in visit.page.inner_text("#counted")
    whole = answer_by("<h1>In a moment</h1>", refresh="1")
    visit.page.route(f"{visit.base}/rows?step=2", whole, times=1)
    goto(visit, "/rows?step=2")
    visit.page.wait_for_selector("text=Row 0 of step 2")
    assert seen == [path, "/rows"]
    visit.said.clear()  # the browser reports the status 503


def test_a_state_is_changed_by_a_button_as_it_was_seen(visit):
    page = goto(visit, "/versions/digits@1")
    assert "staged, revision 1" in page.inner_text("table.facts")
    page.click("text=Make it archived")
    page.wait_for_selector("text=archived, revision 2")
    assert "state: staged -> archived" in page.inner_text("body")
    goto(visit, "/audit")
    assert re.search(r'"by": "\S+ \(admin, by the page\)"', page.inner_text("tbody"))
    goto(visit, "/sources/digits")
    page.fill("input[name=hold]", PAYLOADS[0])
    page.click("button:text('Put')")
    page.wait_for_selector("button:text('End')")
    assert page.inner_text("tbody tr:has(button) td") == PAYLOADS[0]
    page.click("button:text('End')")
    page.wait_for_selector("button:text('End')", state="detached")
