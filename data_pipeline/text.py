"""Tokenizer: converts text to token ids in Kimi's layout, from a real or newly trained rank file.

Kimi's vocabulary is a tiktoken file of 163,584 byte-pair ranks followed by 256 special ids
(163,584 ... 163,839). A smaller rank file keeps the same layout: special id = number of ranks +
(Kimi's id - 163,584). The split pattern and the lengths at which long texts are cut before
splitting are Moonshot's, so the real rank file gives Kimi's ids.

Layout of a sample: [BOS], its segments in order, [EOS].
An image:       <|media_begin|> "image" <|media_content|> <|media_pad|> x N <|media_end|>
A region:       its label, then "[012,034,...]", digit by digit.
A video chunk:  "00:00:02.000" <|media_begin|> "video" <|media_content|> <|media_pad|> x N
                <|media_end|>; chunks follow one another with nothing between.

This module parses rank files itself, because tiktoken's loader caches by path and could return an
old file.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tiktoken
import tokenizers

from data_pipeline.store.open import Store

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_MARK = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
MAX_CHARS = 400_000  # longer texts are cut at this length before splitting
MAX_RUN_CHARS = 25_000  # likewise longer runs of only spaces or only non-spaces

NUM_SPECIAL = 256
_KIMI_BASE = 163_584
_SPECIAL_NAMES = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163590: "<|start_header_id|>",
    163591: "<|end_header_id|>",
    163593: "[EOT]",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163606: "<think>",
    163607: "</think>",
    163838: "[UNK]",
    163839: "[PAD]",
}


class Tokenizer:
    """Byte-pair ranks plus Kimi's 256 special ids. Immutable; safe to use from several threads.

    Attributes:
        name: readable name, stored in every source's manifest.
        hash: SHA-256 of the rank file, compared by the loader.
        num_base: number of ranks. vocab_size: num_base + 256.
        bos, eos, pad, media_begin, media_content, media_pad, media_end: special ids.
    """

    def __init__(self, ranks: bytes, name: str) -> None:
        """Build a tokenizer from the content of a rank file.

        Raises:
            ValueError: the file is not a complete list of ranks 0 ... n-1.
        """
        table = _parse_ranks(ranks, name)
        self.name = name
        self.hash = hashlib.sha256(ranks).hexdigest()
        self.num_base = len(table)
        self.vocab_size = self.num_base + NUM_SPECIAL
        special = {
            _SPECIAL_NAMES.get(_KIMI_BASE + i, f"<|reserved_token_{_KIMI_BASE + i}|>"): (
                self.num_base + i
            )
            for i in range(NUM_SPECIAL)
        }
        self.bos, self.eos, self.pad = special["[BOS]"], special["[EOS]"], special["[PAD]"]
        self.media_begin = special["<|media_begin|>"]
        self.media_content = special["<|media_content|>"]
        self.media_pad = special["<|media_pad|>"]
        self.media_end = special["<|media_end|>"]
        self._encoding = tiktoken.Encoding(
            name, pat_str=SPLIT_PATTERN, mergeable_ranks=table, special_tokens=special
        )
        self._image = tuple(self.encode("image"))
        self._video = tuple(self.encode("video"))
        # Digits are encoded one byte at a time, so every number takes the same number of ids.
        self._digits = tuple(table[bytes([b])] for b in b"0123456789")
        self._open, self._comma, self._close = (table[mark] for mark in (b"[", b",", b"]"))

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, hash={self.hash[:12]})"

    @classmethod
    def from_file(cls, path: str | Path, name: str | None = None) -> "Tokenizer":
        """Read a rank file from disk; `name` defaults to the file name."""
        path = Path(path)
        return cls(path.read_bytes(), name or path.name)

    @classmethod
    def from_store(cls, store: Store, key: str, name: str | None = None) -> "Tokenizer":
        """Read a rank file from a store; `name` defaults to the last part of the key."""
        return cls(store.get(key), name or key.rsplit("/", 1)[-1])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, never special ids, even if the text spells one."""
        if len(text) <= MAX_RUN_CHARS:
            return self._encoding.encode_ordinary(text)
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with names for special ids and U+FFFD for broken UTF-8."""
        return self._encoding.decode(list(ids))

    def image_prefix(self) -> list[int]:
        """Return the ids before an image's media pads; `[media_end]` follows the pads."""
        return [self.media_begin, *self._image, self.media_content]

    def video_prefix(self, timestamp: str) -> list[int]:
        """Return the ids before a video chunk's media pads; `[media_end]` follows the pads."""
        return [*self.encode(timestamp), self.media_begin, *self._video, self.media_content]

    def region(self, label: str, numbers: Sequence[int]) -> list[int]:
        """Return the ids of a region: label, "[", three-digit numbers separated by ",", "]".

        Args:
            label: any text.
            numbers: integers in 0 ... 999. The number of ids depends only on their count, so the
                length of a sample is known before its coordinates are.
        """
        ids = [*self.encode(label), self._open]
        for place, number in enumerate(numbers):
            if not 0 <= number <= 999:
                raise ValueError(f"region {label!r}: number {number} is not in 0 ... 999")
            ids += [self._comma] * (place > 0)
            ids += [self._digits[int(digit)] for digit in f"{number:03d}"]
        return [*ids, self._close]

    def region_length(self, label: str, count: int) -> int:
        """Return the number of ids that `region` gives for `count` numbers."""
        return len(self.encode(label)) + 1 + 4 * count


def _parse_ranks(content: bytes, name: str) -> dict[bytes, int]:
    """Parse lines of `base64(token) rank`; ranks must be 0 ... n-1 and cover all single bytes."""
    table: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            table[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"rank file {name!r}, line {number}: expected 'base64 rank', got {line[:60]!r}"
            ) from None
    if sorted(table.values()) != list(range(len(table))):
        raise ValueError(
            f"rank file {name!r}: {len(table)} distinct tokens whose ranks are not 0 ... "
            f"{len(table) - 1}; ids would have gaps: use a complete tiktoken file"
        )
    if missing := [b for b in range(256) if bytes([b]) not in table]:
        raise ValueError(
            f"rank file {name!r}: {len(missing)} of the 256 single bytes have no rank (first: "
            f"{missing[0]}); some texts could not be encoded: use a complete tiktoken file"
        )
    return table


def _pieces(text: str) -> Iterator[str]:
    """Yield the pieces of a long text, cut as in Moonshot's tokenizer."""
    for start in range(0, len(text), MAX_CHARS):
        block = text[start : start + MAX_CHARS]
        done = 0
        for run in re.finditer(r"\s+|\S+", block):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield block[done:cut]
                done = cut
        yield block[done:]


def train_ranks(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train byte-pair ranks on `texts` with Kimi's split pattern.

    Args:
        texts: the training texts; the same texts in the same order give the same bytes.
        vocab_size: number of ranks, at least 257 (the special ids come on top).

    Returns:
        The content of a tiktoken rank file.

    Raises:
        ValueError: `vocab_size` is too small, or the texts do not support that many merges.
    """
    if vocab_size <= 256:
        raise ValueError(
            f"{vocab_size} ranks ({vocab_size + NUM_SPECIAL} ids with the special ones): the 256 "
            "bytes alone take 256; ask for more"
        )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    byte_of = _byte_of_letter()
    tokens = sorted(model.get_vocab().items(), key=lambda item: item[1])
    if len(tokens) < vocab_size:
        raise ValueError(
            f"{vocab_size} ranks ({vocab_size + NUM_SPECIAL} ids with the special ones): these "
            f"texts support only {len(tokens)} ranks ({len(tokens) + NUM_SPECIAL} ids); give more "
            "text or ask for fewer"
        )
    return b"".join(
        base64.b64encode(bytes(byte_of[letter] for letter in token)) + b" %d\n" % rank
        for token, rank in tokens
    )


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of the byte-level alphabet (GPT-2's table).

    Printable Latin-1 bytes map to themselves; the others map to letters from U+0100 in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}
