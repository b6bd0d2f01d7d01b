from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.collate import rows_batch, sample_tokens
from data_pipeline.index import SourceIndex
from data_pipeline.plan import GlobalPlan, ItemTable, SampleTable
from data_pipeline.text import Tokenizer, train_ranks

WORDS = "the quick brown fox jumps over the lazy dog near 12 rivers, 345 boats and one image video "


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_ranks([WORDS * 3], 300), "test")


DOCUMENTS = [
    [
        {"kind": "text", "text": "the quick fox", "loss": True},
        {"kind": "image", "file": "0.png"},
        {"kind": "text", "text": " jumps over 12 boats", "loss": False},
    ],
    [
        {"kind": "video", "file": "0.mp4", "timestamps": ["00:00:00.000", "00:00:02.000"]},
        {"kind": "image", "file": "1.jpg"},
        {"kind": "text", "text": "one", "loss": True},
    ],
    [{"kind": "text", "text": "", "loss": True}, {"kind": "text", "text": "dog", "loss": False}],
]
PADS = [[5], [4, 2, 1], []]


def symbols_of(document, pads, tokenizer):
    """(token, may be predicted) one by one, spelled out from the format's description."""
    pads = list(pads)
    out = [(tokenizer.bos, False)]
    for segment in document:
        if segment["kind"] == "text":
            out += [(t, segment["loss"]) for t in tokenizer.encode(segment["text"])]
        for stamp in segment.get("timestamps", [""]) if segment["kind"] != "text" else []:
            word = "image" if segment["kind"] == "image" else "video"
            text = tokenizer.encode(stamp) if stamp else []
            before = [*text, tokenizer.media_begin, *tokenizer.encode(word)]
            out += [(t, True) for t in [*before, tokenizer.media_content]]
            out += [(tokenizer.media_pad, False)] * pads.pop(0)
            out.append((tokenizer.media_end, True))
    assert not pads
    return [*out, (tokenizer.eos, True)]


@pytest.mark.parametrize("number", range(3))
def test_a_sample_is_laid_out_as_described(tokenizer, number):
    expected = symbols_of(DOCUMENTS[number], PADS[number], tokenizer)
    tokens, loss, starts = sample_tokens(DOCUMENTS[number], tokenizer, PADS[number])
    assert tokens.tolist() == [token for token, _ in expected]
    assert loss.tolist() == [predicted for _, predicted in expected]
    is_pad = np.append(tokens, -1) == tokenizer.media_pad
    assert starts == np.flatnonzero(is_pad[:-1] & ~np.roll(is_pad, 1)[:-1]).tolist()
    assert tokens.dtype == np.int64
    assert loss.dtype == np.bool_


def made_plan(tokenizer, lengths=None, seq_len=64):
    """Row 0 holds samples 0 and 2, row 1 holds sample 1; the index says what the layout gives."""
    laid = [sample_tokens(d, tokenizer, p) for d, p in zip(DOCUMENTS, PADS)]
    order, rows = [0, 2, 1], [0, 0, 1]
    length = [laid[i][0].size for i in order]
    start = [0, length[0], 0]
    samples = SampleTable(
        source=np.zeros(3, np.int16),
        index=np.array(order),
        position=np.array(order),
        epoch=np.zeros(3, np.int32),
        row=np.array(rows, np.int32),
        start=np.array(start, np.int32),
        length=np.array(length, np.int32),
    )
    item_sample = [0, 2, 2, 2]
    item_start = [laid[0][2][0], *laid[1][2]]
    nothing = np.zeros(4, np.int32)
    items = ItemTable(
        sample=np.array(item_sample, np.int32),
        item=np.arange(4),
        kind=np.array([0, 1, 1, 0], np.int8),
        media=nothing.astype(np.int16),
        chunk=nothing.astype(np.int16),
        frames=nothing,
        grid_h=nothing,
        grid_w=nothing,
        row=np.array([0, 1, 1, 1], np.int32),
        start=np.array(item_start, np.int32),
        tokens=np.array([5, 4, 2, 1], np.int32),
    )
    return GlobalPlan(step=0, seq_len=seq_len, num_rows=2, samples=samples, items=items)


@pytest.fixture
def index():
    return SourceIndex.from_columns("talks", [0, 0, 0], key=["a/0", "a/1", "a/2"])


def documents_of(plan):
    return {s: DOCUMENTS[plan.samples.index[s]] for s in range(3)}


def test_rows_labels_and_mask(tokenizer, index):
    plan = made_plan(tokenizer)
    batch = rows_batch(plan, [1, 0], documents_of(plan), tokenizer, [index])
    for place, members in enumerate([[1], [0, 2]]):
        tokens, labels, mask = [], [], []
        for member in members:
            symbols = symbols_of(DOCUMENTS[member], PADS[member], tokenizer)
            tokens += [token for token, _ in symbols]
            for i in range(len(symbols)):
                following = symbols[i + 1] if i + 1 < len(symbols) else (tokenizer.pad, False)
                labels.append(following[0])
                mask.append(following[1] and following[0] != tokenizer.media_pad)
        filling = 64 - len(tokens)
        assert batch.tokens[place].tolist() == tokens + [tokenizer.pad] * filling
        assert batch.labels[place].tolist() == labels + [tokenizer.pad] * filling
        assert batch.loss_mask[place].tolist() == mask + [False] * filling
    assert not batch.loss_mask[batch.labels == tokenizer.media_pad].any()
    assert batch.loss_mask.any()
    assert batch.tokens.dtype == batch.labels.dtype == np.int64


def test_a_row_of_media_stands_where_the_plan_says(tokenizer, index):
    plan = made_plan(tokenizer)
    batch = rows_batch(plan, [0, 1], documents_of(plan), tokenizer, [index])
    for item in range(4):
        row, start = plan.items.row[item], plan.items.start[item]
        pads = batch.tokens[row, start : start + plan.items.tokens[item]]
        assert (pads == tokenizer.media_pad).all()
    assert (batch.tokens == tokenizer.media_pad).sum() == plan.vision_tokens


def test_other_tokens_than_the_index_are_refused(tokenizer, index):
    plan = made_plan(tokenizer)
    right = plan.samples.length.copy()
    wrong = right + np.array([0, 0, 1], np.int32)
    changed = replace(plan, samples=replace(plan.samples, length=wrong))
    with pytest.raises(
        ValueError,
        match=rf"source 'talks', sample 'a/1': {right[2]} tokens, the index says {wrong[2]}",
    ):
        rows_batch(changed, [0, 1], documents_of(plan), tokenizer, [index])
    moved = replace(plan, items=replace(plan.items, start=plan.items.start + np.int32(1)))
    with pytest.raises(ValueError, match=r"sample 'a/0': media pads begin at \[\d+\], the index"):
        rows_batch(moved, [0], documents_of(plan), tokenizer, [index])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:1], r"0 media items, but the index has 1"),
        (lambda d: [*d, d[1]], r"more media items than the 1 of the index"),
        (lambda d: [*d, {"kind": "sound"}], r"unknown segment kind 'sound'"),
        (lambda d: [*d, {"kind": "video", "file": "9.mp4"}], r"'9.mp4' has no 'timestamps'"),
        (lambda d: [{"kind": "text", "text": "x"}], r"KeyError\('loss'\)"),
    ],
)
def test_broken_documents_name_source_and_sample(tokenizer, index, change, message):
    plan = made_plan(tokenizer)
    documents = documents_of(plan) | {0: change(DOCUMENTS[0])}
    with pytest.raises(ValueError, match=rf"source 'talks', sample 'a/0': .*{message}"):
        rows_batch(plan, [0], documents, tokenizer, [index])
