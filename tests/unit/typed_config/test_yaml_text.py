"""YAML of the configuration: written values read back equal, and numbers are decimal."""

import math

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from typed_config.yaml_text import dump, one_line, parse

# Lone surrogates are included, and texts that look like numbers, dates and words of YAML.
TEXTS = st.one_of(
    st.text(st.characters()),
    st.from_regex(r"[-+]?[0-9._:eE xXbo]{1,12}", fullmatch=True),
    st.sampled_from(("yes", "NO", "on", "y", "~", "null", "", "<<", "=", "2026-11-29", "!!int 3")),
)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False), st.integers(10**40, 10**50))
PLAIN = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN)
@example("12e4567")
@example("010")
@example({"010": "1_000", "1e5": "10:30"})
@example("\U0001f600 \x85\u2028\ufeff\x7f")
@example("a" * 90 + "  b \n c " + "d " * 90)
def test_what_is_written_is_read_back_equal(value):
    for text in (dump(value), one_line(value), dump({"in": [value]})):
        found = parse(text)
        found = found["in"][0] if text == dump({"in": [value]}) else found
        assert found == value
        assert type(found) is type(value)
    assert "\n" not in one_line(value)


@given(PLAIN)
def test_readers_of_yaml_1_1_find_the_same(value):
    assert yaml.safe_load(dump([value])) == [value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("-08", -8), ("+3", 3), ("0", 0), ("010.50", 10.5), ("1e-6", 1e-6),
        ("2E6", 2e6), (".5", 0.5), ("5.", 5.0), ("-.inf", -math.inf), ("null", None), ("", None),
        ("true", True), ("10:30", "10:30"), ("1:30:00", "1:30:00"), ("0x10", "0x10"),
        ("0o10", "0o10"), ("0b10", "0b10"), ("1_000", "1_000"), ("1_0.5", "1_0.5"), ("no", "no"),
        ("on", "on"), ("2026-11-29", "2026-11-29"), ("!!int '010'", 10),
    ],
)  # fmt: skip
def test_plain_values_are_decimal_numbers_or_texts(text, value):
    found = parse(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("12e4567", "'12e4567' is larger than any number; write a text in quotes"),
        ("!!int 0x10", "'0x10' is no decimal number"),
        ("!!float 10:30", "'10:30' is no decimal number"),
        ("[" * 100_000, "not YAML"),
    ],
)
def test_a_number_that_is_none_is_refused_in_a_line(text, told):
    with pytest.raises(ValueError, match=told) as error:
        parse(text)
    assert "\n" not in str(error.value)
