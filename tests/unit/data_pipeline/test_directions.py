import unicodedata

import pytest

from data_pipeline.augment.directions import TEXT_BEARING, flip_allowed, turn_allowed
from data_pipeline.index.columns import CATEGORIES

SIDES = [
    "A dog on the left of a tree",
    "im linken Bild",
    "the RIGHT-most cup",
    "turn the knob clockwise",
    "at 3 o’clock",
    "Links steht ein Haus",
    "der rechte Arm",
    "une porte à gauche",
    "le bras droit",
    "a la izquierda del coche",
    "el brazo derecho",
    "à esquerda da mesa",
    "a destra",
    "Слева стоит дом",
    "левый берег",
    "правой рукой",
    "po lewej stronie",
    "till vänster om huset",
    "Solunda bir ağaç var, sağında ev",
    "穿红衣服的人在左边",
    "右から三番目",
    "왼쪽에 있는 개",
    "على يسار الصورة",
    "बाईं ओर",
    "bên trái",
    "di sebelah kiri",
    "δεξιά",
]
NO_SIDES = [
    "A dog under a tree",
    "brightly lit, delighted, upright",
    "Ein Hund liegt auf der Wiese, gerecht verteilt",
    "un chien dans un pré, drôle",
    "Белый дом у реки, правда",
    "树下有一只狗",
    "木の下に犬がいる",
    "leftover pizza, copyright 2020",
    "",
]


@pytest.mark.parametrize("text", SIDES)
def test_a_named_side_forbids_mirror_and_turn(text):
    for form in ("NFC", "NFD"):
        for written in (text, text.upper()):
            encoded = unicodedata.normalize(form, written)
            assert not flip_allowed("caption", ["A dog", encoded])
            assert not turn_allowed("caption", [encoded])


@pytest.mark.parametrize("text", NO_SIDES)
def test_other_words_do_not(text):
    assert flip_allowed("caption", [text])


@pytest.mark.parametrize(
    "text", ["the top shelf", "unten im Bild", "en haut", "arriba", "上面有一只鸟", "под столом"]
)
def test_above_and_below_forbid_turns_only(text):
    assert flip_allowed("grounding", [text])
    assert not turn_allowed("grounding", [text])


@pytest.mark.parametrize("category", CATEGORIES)
def test_categories(category):
    writing = category in ("ocr", "knowledge", "agent", "code")
    assert (category in TEXT_BEARING) == writing
    assert flip_allowed(category, ["a dog"]) == (not writing)
    assert turn_allowed(category, ["a dog"]) == (not writing)
    assert not flip_allowed(category, ["a dog"], has_turn=True)
    assert turn_allowed(category, ["a dog"], has_turn=True)


def test_a_transcript_says_nothing_of_sides():
    assert turn_allowed("ocr", ["All rights reserved. Turn left."], has_turn=True)
    assert not turn_allowed("agent", ["click the button on the left"], has_turn=True)


def test_unknown_categories_are_refused():
    for rule in (flip_allowed, turn_allowed):
        with pytest.raises(ValueError, match="category is 'captions'; known are agent, caption"):
            rule("captions", [])
