"""Tests of the commands `data verify`, `data stats` and `data show` on a small real corpus."""

import base64
import html
import io
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from data_pipeline.collate import RowBatch
from data_pipeline.index.manifest import IndexMismatch, read_index
from data_pipeline.loader import Loader
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.anomaly_guard import Verdict, anomaly
from kimi_pretrain.tools.held_out import Example, read_examples, swap_images
from launch.cli.data_show import find_anomaly, show_rows
from launch.cli.main import app
from launch.pages import tokens
from launch.pages.pictures import unpatchify
from launch.pages.svg_plots import shares
from moonvit3d.geometry import PatchLimits
from moonvit3d.preprocess import image_patches, video_patches
from tests.unit.data_pipeline.media import noise
from tests.unit.launch.inspected import HOSTILE, TOKENIZER_KEY, build

runner = CliRunner()
NAMES = ["digits", "mixed", "prose"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    build(root)
    return root


@pytest.fixture
def damaged(corpus, tmp_path) -> Path:
    """Return a copy of the corpus in which one bit of an image of `digits` is flipped."""
    shutil.copytree(corpus, tmp_path / "copy")
    store = FolderStore(tmp_path / "copy")
    index = read_index(store, "digits")
    data = bytearray(store.get(index.shards[0].key))
    data[int(index.item_offset[0]) + 20] ^= 1
    store.put(index.shards[0].key, bytes(data))
    return tmp_path / "copy"


def run(*arguments: object, code: int = 0):
    result = runner.invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


class Page(HTMLParser):
    """HTML elements of a page in order, and the text of the token spans."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[tuple[str, dict]] = []
        self.spans: list[tuple[list[str], str]] = []  # (classes, text) of each token
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and "t" in (self.open[-1][1].get("class") or "").split():
            self.spans.append((self.open[-1][1]["class"].split(), data))

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_self_contained(text: str) -> Page:
    page = Page(text)
    assert not page.all("script")
    assert not page.all("link")
    for _, attributes in page.elements:
        for name in ("href", "src", "xlink:href"):
            assert str(attributes.get(name, "data:")).startswith(("data:", "#"))
        assert not any(name.startswith("on") for name in attributes)
    assert "prefers-color-scheme: dark" in text
    return page


# verify -----------------------------------------------------------------------------------------


def test_verify_of_sound_sources(corpus):
    result = run("verify", corpus, "--decode", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["problems"] == 0
    assert sorted(found["sources"]) == NAMES
    assert found["sources"]["digits"]["samples"] == 60
    assert "sound" in result.stdout
    assert result.stderr == ""


def test_verify_tells_problems_and_writes_them_all(damaged, tmp_path):
    report = tmp_path / "out" / "problems.jsonl"
    result = run("verify", damaged, "--source", "all", "--report", report, "--json", code=1)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted(line["kind"] for line in lines) == ["media crc", "shard hash"]
    assert {line["source"] for line in lines} == {"digits"}
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["problems"] == 2
    assert found["sources"]["digits"]["problems"] == {"shard hash": 1, "media crc": 1}
    assert "digits-000000" in result.stdout
    assert "prose: 13 samples" in result.stdout


def test_verify_lists_only_the_first_of_a_kind(damaged):
    store = FolderStore(damaged)
    for shard in read_index(store, "digits").shards:
        (damaged / shard.key).unlink()
    result = run("verify", damaged, "--source", "digits", "--first", 1, code=1)
    assert "shard missing: 3" in result.stdout
    assert result.stdout.count("no such object") == 1
    assert "... and 2 more" in result.stdout


def test_verify_goes_on_after_an_index_that_cannot_be_read(damaged):
    (damaged / "mixed" / "index.parquet").write_bytes(b"nothing")
    result = run("verify", damaged, code=1)
    assert "index: 1" in result.stdout
    assert "prose: 13 samples" in result.stdout


def test_verify_of_one_source_by_its_own_uri(corpus):
    result = run("verify", corpus / "prose", "--json")
    assert list(json.loads(result.stdout.splitlines()[-1])["sources"]) == ["prose"]


def test_verify_says_when_tokens_are_not_counted(damaged, corpus):
    (damaged / TOKENIZER_KEY).unlink()
    assert "tokens are not counted" in run("verify", damaged, "--source", "prose").stderr
    given = run("verify", damaged, "--source", "prose", "--tokenizer", corpus / TOKENIZER_KEY)
    assert given.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source", "digts"], "did you mean 'digits'? there are: digits, mixed, prose"),
        (["--sample-share", "0"], "sample share is 0"),
        (["--tokenizer", "tokenizer/none.tiktoken"], "no rank file 'tokenizer/none.tiktoken'"),
    ],
)
def test_what_verify_cannot_do(corpus, arguments, said):
    result = run("verify", corpus, *arguments, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_verify_where_there_is_nothing(tmp_path):
    assert "no finished source" in run("verify", tmp_path, code=2).stderr
    assert "no such folder" in run("verify", tmp_path / "none", code=2).stderr


# stats ------------------------------------------------------------------------------------------


def test_stats_page_and_json(corpus, tmp_path):
    out = tmp_path / "pages" / "stats.html"
    result = run("stats", corpus, "--out", out, "--config", "tiny_cpu", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["limits"] == {"image": 576, "frame": 256, "side": 512}
    assert found["seq_len"] == 256
    prose = found["sources"][2]
    assert prose["over_seq_len"]["samples"] == 2
    assert found["totals"]["all"]["samples"] == 60 + 12 + 13
    assert found["duplicates"]["samples"]["groups"] == 2  # the clips, and one pair of texts
    text = out.read_text()
    page = check_self_contained(text)
    assert len(page.all("svg")) >= 6
    assert "#010203" not in text  # plot colours become page colours
    for name in NAMES:
        assert f"<h2>{name}</h2>" in text


def test_stats_by_options_without_reading_data(corpus):
    options = ("--image-patches", 4, "--seq-len", 10, "--no-duplicates", "--json")
    result = run("stats", corpus, "--source", "digits", *options)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["duplicates"] is None
    (digits,) = found["sources"]
    assert digits["tokens_per_item"]["max"] < 9
    assert digits["over_seq_len"]["share"] == 1.0


# show -------------------------------------------------------------------------------------------


def overrides(root: Path, **more: str) -> tuple[str, ...]:
    settings = {
        "root": str(root),
        "tokenizer": TOKENIZER_KEY,
        "vision_token_ratio": "null",
        "sources": "{digits: 1.0, mixed: 1.0, prose: 1.0}",
        "pack_window": "64",
        "schedule": "[]",
        "max_epochs": "{}",
        "augment": "{}",
    }
    return tuple(f"data.{key}={value}" for key, value in (settings | more).items())


def show(root: Path, out: Path, *options: object, **more: str) -> Page:
    config = overrides(root, **more)
    run("show", "--config", "tiny_cpu", *config, "--out", out, *options)
    return check_self_contained(out.read_text())


def test_rows_are_those_of_the_loader(corpus, tmp_path):
    data = load_config("tiny_cpu", overrides(corpus)).data
    store = FolderStore(corpus)
    tokenizer = Tokenizer.from_store(store, TOKENIZER_KEY)
    indices = [read_index(store, name) for name in NAMES]
    with Loader(data, store, indices, tokenizer) as loader:
        next(loader)
        batch = next(loader)
    page = show(corpus, tmp_path / "show.html", "--step", 2, "--rows", 3, "--first-row", 2)
    assert "Row 4 of step 2<" in (tmp_path / "show.html").read_text()  # steps as in metrics.jsonl
    learnt = sum("l" in classes for classes, _ in page.spans)
    assert batch.rows is not None
    masks = batch.rows.loss_mask[2:5]
    titles = [a for a in page.all("span") if "t" in (a.get("class") or "").split()]
    ids = [int(i) for a in titles if "title" in a for i in a["title"].split()]
    rows = batch.rows.tokens[2:5]
    special = {tokenizer.pad, tokenizer.media_pad}
    assert ids == [i for row in rows.tolist() for i in row if i not in special]
    split = sum(len(a["title"].split()) - 1 for a in titles
                if "title" in a and "l" in a["class"].split())  # fmt: skip
    assert learnt - 1 + split == masks.sum()  # the legend holds one span
    assert not any("w" in classes for classes, _ in page.spans)
    items = np.isin(batch.plan.items.row, (2, 3, 4))
    assert len(page.all("image")) == int(batch.plan.items.frames[items].sum())


def test_steps_that_count_on_from_another_stage_are_not_guessed(corpus):
    kept = [*overrides(corpus), "train.start_from=runs/before", "train.start_optimizer=keep"]
    with pytest.raises(ValueError, match="start_optimizer=keep steps and data count on"):
        show_rows("tiny_cpu", kept, 1, range(1))


def test_a_label_that_is_not_the_next_token_is_marked(corpus, monkeypatch):
    place = RowBatch.place

    def shifted(self, row, start, ids, loss):
        place(self, row, start, ids, loss)
        self.labels[row, start : start + len(ids) - 2] = ids[2:]

    monkeypatch.setattr(RowBatch, "place", shifted)
    page = Page(show_rows("tiny_cpu", overrides(corpus), 1, range(1)))
    assert any("w" in classes for classes, _ in page.spans)


AUGMENT = (
    "{digits: {turn: 0.6, flip: 0.5, affine: {degrees: 12, scale: [0.7, 1.0], shear: 0.1},"
    " crop: {area: [0.6, 1.0], rescale: [0.5, 1.0]}}}"
)


def test_boxes_are_drawn_where_the_digits_are_after_augmentation(corpus, tmp_path):
    """Digits are white on black, so bright pixels must lie in the boxes read from the tokens."""
    show(corpus, tmp_path / "show.html", "--rows", 16, sources="{digits: 1.0}", augment=AUGMENT)
    figures = (tmp_path / "show.html").read_text().split("<figure>")[1:]
    ink = inside = drawn = augmented = 0
    for figure in figures:
        svg = figure[: figure.index("</svg>")]
        width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
        data = base64.b64decode(re.search(r"base64,([^\"]+)", svg)[1])
        pixels = np.asarray(Image.open(io.BytesIO(data)).resize((width, height)).convert("L"))
        covered = np.zeros_like(pixels, bool)
        pattern = r'<rect x="([-\d.e]+)" y="([-\d.e]+)" width="([\d.e]+)" height="([\d.e]+)" '
        for x, y, w, h in re.findall(pattern + 'fill="none" stroke="#[^8]', svg):
            left, top, right, bottom = float(x), float(y), float(x) + float(w), float(y) + float(h)
            # The margin covers half a thousandth of the frame and the spread of resampling.
            rows, cols = (slice(int(max(0, a - 1.5)), int(b + 2.5))
                          for a, b in ((top, bottom), (left, right)))  # fmt: skip
            covered[rows, cols] = True
            drawn += 1
        if "left the frame" in figure:
            continue  # the rest of a digit that left the frame has no box
        bright = pixels > 96
        ink += bright.sum()
        inside += (bright & covered).sum()
        augmented += "turned by" in figure or "warped" in figure
    assert drawn > 60
    assert augmented > 20
    assert ink > 3000
    assert inside / ink > 0.995


def test_wordings_points_polygons_turns_and_dropped_regions_are_told(corpus, tmp_path):
    augment = "{mixed: {variants: true, turn: 1.0, crop: {area: [0.4, 0.9]}}}"
    page = show(corpus, tmp_path / "s.html", "--rows", 16, sources="{mixed: 1.0}", augment=augment)
    text = (tmp_path / "s.html").read_text()
    assert "left the frame, not written" in text
    assert re.search(r"turn:  turned\[(090|180|270)\]", text)
    assert re.search(r"turned by (90|180|270) degrees", text)
    assert {t for t in re.findall(r"wording \d of 3", text)} == {
        f"wording {i} of 3" for i in (1, 2, 3)
    }
    assert page.all("circle")
    assert page.all("polygon")
    assert "Seite &lt;b&gt;" in "".join(html.escape(t) for _, t in page.spans)


def test_texts_that_spell_markup_stay_text(corpus, tmp_path):
    page = show(corpus, tmp_path / "s.html", "--rows", 16, sources="{mixed: 1.0}")
    spelled = "".join(text for _, text in page.spans)
    assert HOSTILE.replace("\n", "\u21b5\n") in spelled
    run("show", corpus, "--source", "mixed", "--first", 4, "--out", tmp_path / "raw.html")
    raw = (tmp_path / "raw.html").read_text()
    check_self_contained(raw)
    assert html.escape(HOSTILE) in raw
    assert html.escape(json.dumps(HOSTILE, ensure_ascii=False)) in raw  # in the metadata


def test_a_split_text_and_a_damaged_sample_are_told(damaged, tmp_path):
    show(damaged, tmp_path / "s.html", "--rows", 16, sources="{digits: 1.0, prose: 9.0}")
    text = (tmp_path / "s.html").read_text()
    assert "part 1 of a split text" in text
    everything = show_rows("tiny_cpu", overrides(damaged, sources="{digits: 1.0}"), 1, range(16))
    assert "CRC-32 is" in everything
    assert "file 0 could not be used" in everything


class Unsteady(FolderStore):
    """Store in which the first, third, fifth... read of a shard's range has every byte wrong."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.reads: Counter[tuple[object, ...]] = Counter()

    def get(self, key, offset=0, length=None, *, etag=None):
        data = super().get(key, offset, length, etag=etag)
        if not key.endswith(".tar"):
            return data
        self.reads[key, offset, length] += 1
        return data.translate(WRONG) if self.reads[key, offset, length] % 2 else data


WRONG = bytes(value ^ 1 for value in range(256))


def test_a_page_of_rows_reads_documents_by_their_checksum(corpus, monkeypatch):
    """The page reads documents again after the loader, so it has to check and retry, too."""
    given = overrides(corpus, sources="{mixed: 1.0}")
    expected = show_rows("tiny_cpu", given, 1, range(2))
    stores = []
    monkeypatch.setattr(
        "launch.cli.data_show.open_data", lambda data: stores.append(Unsteady(corpus)) or stores[0]
    )
    assert show_rows("tiny_cpu", given, 1, range(2)) == expected
    assert max(stores[0].reads.values()) > 1


@pytest.mark.parametrize("what", ["json", "item"])
def test_an_evaluation_reads_nothing_that_is_not_of_the_index(corpus, tmp_path, what):
    """A changed bit in a text or an image is found, even if the file still decodes."""
    shutil.copytree(corpus, tmp_path / "copy")
    store, config = FolderStore(tmp_path / "copy"), load_config("tiny_cpu", ())
    index = read_index(store, "digits")
    assert len(read_examples(store, index, config, range(3))) == 3
    shard = index.shards[index.shard[2]].key
    data = bytearray(store.get(shard))
    start = int(getattr(index, f"{what}_offset")[2])
    length = int(getattr(index, f"{what}_length")[2])
    body = data[start : start + length]
    data[start + (body.index(b"digits:") if what == "json" else length // 2)] ^= 1
    store.put(shard, bytes(data))
    assert len(read_examples(store, index, config, range(2))) == 2
    with pytest.raises(IndexMismatch, match=rf"sample {index.key_of(2)!r}.* CRC-32 is"):
        read_examples(store, index, config, range(3))


def test_a_swapped_image_is_the_next_one_that_fits():
    def example(around, side):
        return Example([], np.zeros(side), (1, side, 2), around)

    def swapped(*examples, room):
        return [e.pads for e in swap_images([example(*e) for e in examples], room)]

    sizes = (10, 4), (10, 6), (10, 40)  # images of 2, 3 and 20 tokens
    assert swapped(*sizes, room=30) == [3, 20, 2]
    assert swapped(*sizes, room=29) == [3, 2, 2]
    assert swapped((10, 4), (27, 6), room=29) == [3, 2]
    assert swapped((10, 4), (28, 6), room=29) == [3]
    assert swapped((10, 4), room=29) == []


def test_the_same_page_twice(corpus):
    pages = {show_rows("tiny_cpu", overrides(corpus, augment=AUGMENT), 4, range(2)) for _ in "ab"}
    assert len(pages) == 1


def test_samples_by_key(corpus, tmp_path):
    out = tmp_path / "one.html"
    run("show", corpus, "--source", "digits", "--sample", "digits-000007", "--out", out)
    page = check_self_contained(out.read_text())
    index = read_index(FolderStore(corpus), "digits")
    boxes = int(index.region_ptr[8] - index.region_ptr[7])
    assert len(page.all("rect")) == boxes
    assert len(page.all("image")) == 1
    assert len(page.all("article")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source", "digits", "--sample", "digit-000007"], "did you mean 'digits-000007'?"),
        (["--source", "pros"], "did you mean 'prose'?"),
        ([], "give --config CONFIG to show rows, or a URI and --source NAME"),
    ],
)
def test_samples_that_are_not_there(corpus, tmp_path, arguments, said):
    result = run("show", corpus, *arguments, "--out", tmp_path / "x.html", code=2)
    assert said in result.stderr
    assert not (tmp_path / "x.html").exists()


def test_rows_that_are_not_there(corpus, tmp_path):
    given = ("--config", "tiny_cpu", *overrides(corpus), "--out", tmp_path / "x.html")
    assert "a step has 16 rows" in run("show", *given, "--first-row", 16, code=2).stderr
    assert "'--step'" in run("show", *given, "--step", 0, code=2).stderr  # steps count from 1
    assert "leave out --config" in run("show", *given, "--source", "digits", code=2).stderr


def test_rows_of_an_anomaly_are_those_that_the_run_had(corpus, tmp_path):
    """The page applies the run's quarantine, which changes the rows of its steps."""
    given = overrides(corpus)
    data = load_config("tiny_cpu", given).data
    store = FolderStore(corpus)
    indices = [read_index(store, name) for name in NAMES]
    tokenizer = Tokenizer.from_store(store, TOKENIZER_KEY)
    with Loader(data, store, indices, tokenizer) as loader:
        for sample in range(0, 60, 2):
            loader.planner.quarantine(0, sample, -100)
        loader.load_state_dict(loader.planner.with_quarantine(loader.planner.state_at(2)))
        state = loader.state_dict()
        batch = next(loader)
    verdict = Verdict("nonfinite", "skip")
    line = anomaly(3, verdict, float("nan"), 1.0, batch.plan, loader.indices, state)
    lines = [json.dumps({**line, "step": step}) + "\n" for step in (1, 3)]
    (tmp_path / "anomalies.jsonl").write_text("".join(lines))
    shown = ("--anomaly", tmp_path / "anomalies.jsonl", "--rows", 16)
    page = show(corpus, tmp_path / "show.html", *shown)
    text = (tmp_path / "show.html").read_text()
    assert "Step 3 of metrics.jsonl: nonfinite, loss None" in text
    special = {tokenizer.pad, tokenizer.media_pad}
    titles = [a for a in page.all("span") if "t" in (a.get("class") or "").split()]
    ids = [int(i) for a in titles if "title" in a for i in a["title"].split()]
    assert batch.rows is not None
    assert ids == [i for i in batch.rows.tokens.flatten().tolist() if i not in special]
    plain = show(corpus, tmp_path / "plain.html", "--step", 3, "--rows", 16)
    assert plain.spans != page.spans  # the plain page ignores the quarantine
    other = ("show", "--config", "tiny_cpu", *given, "--out", tmp_path / "x.html", *shown)
    assert "it has steps 1, 3" in run(*other, "--step", 2, code=2).stderr
    assert "give the run's own config.yaml" in run(*other, "data.rows_per_step=32", code=2).stderr
    assert "--anomaly needs --config" in run("show", corpus, *shown, code=2).stderr


def test_a_torn_anomaly_is_none_and_a_damaged_one_is_told(tmp_path):
    """A run that is killed while it writes leaves a torn last line."""
    file = tmp_path / "anomalies.jsonl"
    file.write_text('{"step": 3}\n{"step": 4, "ki')
    assert find_anomaly(file, None) == {"step": 3}
    for line in ("{", "3", "[]", "{}"):
        file.write_text(f'{{"step": 3}}\n{line}\n')
        with pytest.raises(ValueError, match=r"anomalies\.jsonl: expected the anomalies of a run"):
            find_anomaly(file, 3)


# Page parts -------------------------------------------------------------------------------------


def test_unpatchify_undoes_the_cut():
    pixels = noise(40, 75)
    patches, grid = image_patches(pixels)
    (back,) = unpatchify(patches, grid)
    np.testing.assert_array_equal(back[:40, :75], pixels)
    assert not back[40:].any()
    assert not back[:, 75:].any()
    frames = np.stack([noise(30, 30, seed) for seed in range(3)])
    patches, grid = video_patches(frames, PatchLimits())
    np.testing.assert_array_equal(unpatchify(patches, grid)[:, :30, :30], frames)


def test_tokens_of_one_character_are_shown_as_one(corpus):
    tokenizer = Tokenizer.from_store(FolderStore(corpus), TOKENIZER_KEY)
    text = "a\U0001f600\N{CJK UNIFIED IDEOGRAPH-6F22}\x00<\n"
    broken = next(i for i in range(256) if tokenizer.decode([i]) == "\ufffd")
    ids = np.array([*tokenizer.encode(text), broken])
    no = np.zeros(len(ids), bool)
    page = Page(f"<div>{tokens.spans(ids, no, no, tokenizer)}</div>")
    shown = "".join(text for _, text in page.spans)
    assert shown == "a\U0001f600\N{CJK UNIFIED IDEOGRAPH-6F22}\u2400<\u21b5\n\ufffd"
    assert sum(len(a["title"].split()) for a in page.all("span")) == len(ids)


@pytest.mark.parametrize(
    ("text", "numbers"), [(" cat[012,999]", [12, 999]), (" [1,2]", None), ("[007] ", None)]
)
def test_numbers_are_read_from_the_tokens(corpus, text, numbers):
    tokenizer = Tokenizer.from_store(FolderStore(corpus), TOKENIZER_KEY)
    assert tokens.written_numbers(tokenizer.encode(text), tokenizer) == numbers


def test_a_name_with_dollar_signs_is_drawn_as_it_is():
    assert r"$\frac{$" in shares([(r"$\frac{$", [1.0])], ["text"], r"$\frac{$")
