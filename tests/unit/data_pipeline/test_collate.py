import numpy as np
import pytest

from data_pipeline.collate import RowBatch, SampleLayout, laid_out, sample_tokens, segments_of
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
PADS = [(5,), (4, 2, 1), ()]
SEQ_LEN = 64


def symbols_of(document, pads, tokenizer):
    """Return (token, may be predicted) pairs, built from the description of the format."""
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


def layout_of(number, tokenizer, **changes):
    """Return the layout that a correct plan has for a document."""
    symbols = symbols_of(DOCUMENTS[number], PADS[number], tokenizer)
    is_pad = [token == tokenizer.media_pad for token, _ in symbols]
    starts = [i for i, pad in enumerate(is_pad) if pad and not is_pad[i - 1]]
    known = {"length": len(symbols), "pads": PADS[number], "starts": tuple(starts)}
    return SampleLayout(**known | changes)


@pytest.mark.parametrize("number", range(3))
def test_a_sample_is_laid_out_as_described(tokenizer, number):
    expected = symbols_of(DOCUMENTS[number], PADS[number], tokenizer)
    layout = layout_of(number, tokenizer)
    tokens, loss = sample_tokens(laid_out(DOCUMENTS[number], tokenizer, layout), layout, SEQ_LEN)
    assert tokens.tolist() == [token for token, _ in expected]
    assert loss.tolist() == [predicted for _, predicted in expected]
    assert laid_out(DOCUMENTS[number], tokenizer, layout)[2] == list(layout.starts)
    assert tokens.dtype == np.int64
    assert loss.dtype == np.bool_


def test_rows_labels_and_mask(tokenizer):
    batch = RowBatch.empty(2, SEQ_LEN, tokenizer.pad)
    for row, members in enumerate([[1], [0, 2]]):
        start = 0
        for member in members:
            layout = layout_of(member, tokenizer)
            batch.place(
                row,
                start,
                *sample_tokens(laid_out(DOCUMENTS[member], tokenizer, layout), layout, SEQ_LEN),
            )
            start += layout.length
    for row, members in enumerate([[1], [0, 2]]):
        tokens, labels, mask = [], [], []
        for member in members:
            symbols = symbols_of(DOCUMENTS[member], PADS[member], tokenizer)
            tokens += [token for token, _ in symbols]
            for i in range(len(symbols)):
                following = symbols[i + 1] if i + 1 < len(symbols) else (tokenizer.pad, False)
                labels.append(following[0])
                mask.append(following[1] and following[0] != tokenizer.media_pad)
        filling = SEQ_LEN - len(tokens)
        assert batch.tokens[row].tolist() == tokens + [tokenizer.pad] * filling
        assert batch.labels[row].tolist() == labels + [tokenizer.pad] * filling
        assert batch.loss_mask[row].tolist() == mask + [False] * filling
    assert not batch.loss_mask[batch.labels == tokenizer.media_pad].any()
    assert batch.loss_mask.any()
    assert batch.tokens.dtype == batch.labels.dtype == np.int64


def test_a_variant_is_chosen_by_number(tokenizer):
    document = [
        {"kind": "text", "text": "the ", "loss": True},
        {"kind": "text", "texts": ["dog", "quick brown fox", "boats"], "loss": True},
    ]
    for chosen, text in enumerate(document[1]["texts"]):
        expected = [
            *(tokenizer.bos, *tokenizer.encode("the "), *tokenizer.encode(text), tokenizer.eos)
        ]
        layout = SampleLayout(len(expected), variants=(0, chosen))
        assert (
            sample_tokens(laid_out(document, tokenizer, layout), layout, SEQ_LEN)[0].tolist()
            == expected
        )
    first = SampleLayout(2 + len(tokenizer.encode("the ")) + len(tokenizer.encode("dog")))
    assert tokenizer.decode(
        sample_tokens(laid_out(document, tokenizer, first), first, SEQ_LEN)[0][1:-1]
    ) == ("the dog")


def test_regions_are_written_and_lost_ones_left_out(tokenizer):
    document = [
        {"kind": "region", "label": "dog", "shape": "box", "media": 0, "loss": True},
        {"kind": "image", "file": "0.png"},
        {"kind": "region", "label": " fox", "shape": "point", "media": 0, "loss": False},
    ]
    layout = SampleLayout(0, (2,), regions=((1, 20, 300, 999), (7, 0)))
    tokens, loss, starts = laid_out(document, tokenizer, layout)
    text = tokenizer.decode(tokens)
    assert text.startswith("[BOS]dog[001,020,300,999]<|media_begin|>image")
    assert text.endswith("<|media_end|> fox[007,000][EOS]")
    assert tokens[starts[0]] == tokenizer.media_pad
    written = tokenizer.region_length(" fox", 2)
    assert loss[-1 - written : -1].tolist() == [False] * written
    without = laid_out(document, tokenizer, SampleLayout(0, (2,), regions=(None, (7, 0))))
    assert without[0].size == tokens.size - tokenizer.region_length("dog", 4)
    assert tokenizer.decode(without[0]).startswith("[BOS]<|media_begin|>")


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_parts_of_a_split_text_are_the_text(tokenizer, extra):
    """Each part begins with bos and ends with eos; only the last part's eos may be predicted."""
    words = " ".join(WORDS.split() * 8)
    room = 30
    ids = tokenizer.encode(words)[: 3 * room + extra] if extra else None
    words = tokenizer.decode(ids) if extra else words
    ids = tokenizer.encode(words)
    document = [{"kind": "text", "text": words, "loss": True}]
    parts = -(-len(ids) // room)
    assert parts > 2
    joined = []
    for part in range(parts):
        length = 2 + min(room, len(ids) - part * room)
        layout = SampleLayout(length, part=part)
        tokens, loss = sample_tokens(laid_out(document, tokenizer, layout), layout, room + 2)
        assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)
        assert loss.tolist() == [False, *[True] * (length - 2), part == parts - 1]
        joined += tokens[1:-1].tolist()
    assert joined == ids


def test_other_tokens_than_the_index_are_refused(tokenizer):
    right = layout_of(1, tokenizer)
    wrong = layout_of(1, tokenizer, length=right.length + 1)
    with pytest.raises(ValueError, match=f"{right.length} tokens, the index says {wrong.length}"):
        sample_tokens(laid_out(DOCUMENTS[1], tokenizer, wrong), wrong, SEQ_LEN)
    moved = layout_of(1, tokenizer, starts=tuple(start + 1 for start in right.starts))
    with pytest.raises(ValueError, match=r"media pads begin at \[\d+, \d+, \d+\], the index"):
        sample_tokens(laid_out(DOCUMENTS[1], tokenizer, moved), moved, SEQ_LEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:1], r"0 media items, but the index has 1"),
        (lambda d: [*d, d[1]], r"more media items than the 1 of the index"),
        (lambda d: [*d, {"kind": "sound"}], r"unknown segment kind 'sound'"),
        (
            lambda d: [*d, {"kind": "region", "label": "x", "loss": True}],
            r"more regions than the 0 of the index",
        ),
        (lambda d: [*d, {"text": "no kind"}], r"of another form: KeyError\('kind'\)"),
        (lambda d: [*d, {"kind": "text"}], r"of another form: KeyError\('text'\)"),
        (lambda d: [*d, {"kind": "text", "text": 7}], r"of another form: .*a text, found 7"),
        (lambda d: [*d, {"kind": "video", "timestamps": 7}], r"of another form: TypeError"),
    ],
)
def test_broken_documents_are_refused(tokenizer, change, message):
    document = change(DOCUMENTS[0])
    for segment in document:
        segment.setdefault("loss", True)
    with pytest.raises(ValueError, match=message):
        sample_tokens(
            laid_out(document, tokenizer, layout_of(0, tokenizer)), layout_of(0, tokenizer), SEQ_LEN
        )


@pytest.mark.parametrize("document", [b"{", b"\xff", b"[]", b"7", b'{"meta": {}}'])
def test_what_is_no_json_of_a_sample_is_refused(document):
    with pytest.raises(ValueError, match=r"."):
        segments_of(document)


@pytest.mark.parametrize("variants", [(0,), (0, 2)])
def test_fewer_wordings_than_the_index_has_are_refused(tokenizer, variants):
    document = [
        {"kind": "text", "text": "a", "loss": True},
        {"kind": "text", "texts": ["b", "c"], "loss": True},
    ]
    layout = SampleLayout(4, variants=variants)
    with pytest.raises(ValueError, match="other wordings of piece 1 than the index has"):
        laid_out(document, tokenizer, layout)
