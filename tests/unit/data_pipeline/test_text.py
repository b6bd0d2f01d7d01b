"""The tokenizer against tiktoken's own loader and the library that trained it."""

import base64
import hashlib
import random

import pytest
import tiktoken
import tiktoken.load
import tokenizers

from data_pipeline.text import (
    MAX_CHARS,
    MAX_RUN_CHARS,
    SPLIT_PATTERN,
    Tokenizer,
    _pieces,
    train_ranks,
)
from tests.unit.data_pipeline.conftest import TRAINING_TEXT

TEXTS = [
    "",
    "The Antikythera mechanism is an ancient Greek hand-powered orrery.",
    "  leading and   multiple   spaces\tand\ttabs\n\n\nand blank lines \r\n x",
    "Unicode: café naïve, 日本語のテキスト, 中文字符 한국어 Ελληνικά \U0001f600 e\u0301",
    "DON'T can't I'll x123456789y 3.14159 <|im_end|> [BOS]",
    "mixed中文English混合 ÀÉÎ ǅungla ʰ",
    "\x00\x1f\x85\u2028",
]


@pytest.fixture(scope="module")
def ranks() -> bytes:
    return train_ranks(TRAINING_TEXT, 400)


@pytest.fixture(scope="module")
def oracle(ranks, tmp_path_factory):
    """Return tiktoken with its own loader; TIKTOKEN_CACHE_DIR="" disables its path cache."""
    path = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    path.write_bytes(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        table = tiktoken.load.load_tiktoken_bpe(str(path))
    return tiktoken.Encoding("o", pat_str=SPLIT_PATTERN, mergeable_ranks=table, special_tokens={})


def test_the_split_pattern_is_kimis():
    # SHA-256 of the pattern as a public benchmark of Kimi-K2.5's own tokenizer pins it.
    expected = "de5781783b193d5ccf5b1b28edfa70fa816ce78d54603fdc422cfd8d4ea4411f"
    assert hashlib.sha256(SPLIT_PATTERN.encode()).hexdigest() == expected


@pytest.mark.parametrize("text", TEXTS + TRAINING_TEXT[:3])
def test_ids_equal_tiktokens_and_decode_back(tokenizer, oracle, text):
    ids = tokenizer.encode(text)
    assert ids == oracle.encode_ordinary(text)
    assert tokenizer.decode(ids) == text


def test_ids_equal_those_of_the_library_that_trained(ranks, tokenizer):
    """The merges are compared before any export, with the encoder of tokenizers."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TRAINING_TEXT, trainer)
    for text in TEXTS + TRAINING_TEXT[::10]:
        assert tokenizer.encode(text) == model.encode(text).ids


def test_training_is_deterministic(ranks):
    assert train_ranks(iter(TRAINING_TEXT), 400) == ranks
    assert len(ranks.splitlines()) == 400


def test_training_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="256"):
        train_ranks(["abc"], 256)
    with pytest.raises(ValueError, match="only 25[0-9] ranks"):
        train_ranks(["abc"], 1000)


def test_special_ids_are_laid_out_as_kimis(tokenizer):
    base = tokenizer.num_base
    assert tokenizer.vocab_size == base + 256
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (base, base + 1, base + 255)
    media = (tokenizer.media_begin, tokenizer.media_content, tokenizer.media_end)
    assert (*media, tokenizer.media_pad) == (base + 18, base + 19, base + 20, base + 21)
    assert tokenizer.decode([tokenizer.bos, tokenizer.media_pad]) == "[BOS]<|media_pad|>"
    assert tokenizer.decode([base + 5]) == "<|reserved_token_163589|>"


def test_a_file_of_kimis_size_gives_kimis_ids():
    rng = random.Random(0)
    tokens = [bytes([b]) for b in range(256)]
    seen = set(tokens)
    while len(tokens) < 163_584:
        if (token := rng.randbytes(rng.randint(2, 6))) not in seen:
            seen.add(token)
            tokens.append(token)
    big = Tokenizer(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)), "k")
    assert big.vocab_size == 163_840
    assert (big.bos, big.eos, big.pad) == (163584, 163585, 163839)
    assert (big.media_begin, big.media_content) == (163602, 163603)
    assert (big.media_end, big.media_pad) == (163604, 163605)


def test_encode_never_emits_special_ids(tokenizer):
    text = "[BOS]<|media_pad|><|media_begin|>[EOS]<|reserved_token_163589|><think>"
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.num_base
    assert tokenizer.decode(ids) == text


def test_media_layout(tokenizer):
    t = tokenizer
    assert t.image_prefix() == [t.media_begin, *t.encode("image"), t.media_content]
    prefix = t.video_prefix("00:00:01.500")
    assert t.decode(prefix) == "00:00:01.500<|media_begin|>video<|media_content|>"
    assert prefix[-1] == t.media_content


def _reference_pieces(text: str) -> list[str]:
    """Split by Moonshot's rule, one character at a time."""
    pieces = []
    for begin in range(0, len(text), MAX_CHARS):
        piece, run, last = "", 0, None
        for letter in text[begin : begin + MAX_CHARS]:
            run = run + 1 if letter.isspace() == last else 1
            last = letter.isspace()
            if run > MAX_RUN_CHARS:
                pieces.append(piece)
                piece, run = "", 1
            piece += letter
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "a" * 60_000,
        "a" * MAX_RUN_CHARS + " b",
        "a" * (MAX_RUN_CHARS + 1) + "  b",
        "word " * 9000,
        " " * 50_001 + "x" * 25_001 + "\n" * 3,
        "ab \x1c\x85\u3000" * 90_000,
    ],
)
def test_long_texts_are_cut_where_moonshot_cuts_them(tokenizer, oracle, text):
    pieces = list(_pieces(text))
    assert pieces == _reference_pieces(text)
    assert "".join(pieces) == text


def test_a_cut_shows_in_the_ids(tokenizer, oracle):
    text = "the" * 10_000
    ids = tokenizer.encode(text)
    cut = [i for piece in _reference_pieces(text) for i in oracle.encode_ordinary(piece)]
    assert ids == cut
    assert tokenizer.decode(ids) == text


def test_a_retrained_file_at_the_same_path_is_the_new_one(tmp_path, store, ranks):
    path = tmp_path / "t.model"
    other = train_ranks(TRAINING_TEXT, 300)
    for content, size in ((ranks, 400), (other, 300)):
        path.write_bytes(content)
        store.put("tok/t.model", content)
        for loaded in (Tokenizer.from_file(path), Tokenizer.from_store(store, "tok/t.model")):
            assert loaded.num_base == size
            assert loaded.name == "t.model"
            assert loaded.hash == hashlib.sha256(content).hexdigest()


def _edited(ranks: bytes, edit) -> bytes:
    lines = ranks.splitlines(keepends=True)
    edit(lines)
    return b"".join(lines)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines.pop(), None),
        (lambda lines: lines.pop(300), "ids would have gaps"),
        (lambda lines: lines.append(b"!!! 400\n"), "line 401"),
        (lambda lines: lines.append(b"YWJj\n"), "line 401"),
        (lambda lines: lines.__setitem__(7, b"enp6eg== 7\n"), "single bytes have no rank"),
    ],
)
def test_damaged_rank_files_are_refused(ranks, edit, message):
    content = _edited(ranks, edit)
    if message is None:  # one rank fewer is still a complete file
        assert Tokenizer(content, "x").num_base == 399
    else:
        with pytest.raises(ValueError, match=message):
            Tokenizer(content, "x")
