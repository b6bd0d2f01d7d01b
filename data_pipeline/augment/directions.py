"""Decides which samples may be mirrored or turned; texts that mention directions forbid it.

On a mirrored page the writing is reversed, and "the dog on the left" is on the right. So an image
is mirrored only in categories whose images are not mostly writing, and only if none of the sample's
texts names a side. It is turned only if the texts name no direction at all. The word lists cover
about twenty languages. An unnecessary word (English "right" is mostly not a direction) costs some
augmentation, but a missing word makes a sample wrong, so doubtful words are listed.

A sample with orientation metadata (a region of the shape `turn`) is never mirrored, because no
angle describes a mirrored image. It may be turned, and its angle is updated accordingly.
"""

import re
import unicodedata
from collections.abc import Iterable

from data_pipeline.index.columns import CATEGORIES

# Categories whose images contain writing: pages, charts and exercises, screens, listings.
TEXT_BEARING = frozenset(("ocr", "knowledge", "agent", "code"))

# Whole words in lower case without diacritics (see `_plain`); `\w*` matches endings.
_SIDES = r"""
left(?:s|most|wards?|hand|ie)? right(?:s|most|wards?|hand)? east\w* west\w* mirror\w*
(?:counter|anti)?clockwise o'clock
links\w* rechts\w* (?:link|recht)e[nms]? (?:link|recht)er\w* (?:gegen)?uhrzeigersinn\w*
gauches? droite?s? izquierd[oa]s? izq derech[oa]s? esquerd[oa]s? direit[oa]s?
sinistr[oaie] destr[oaie] esquerr[ae]s? dret[ae]?s? stanga dreapta stang drept
vanster vanstra hoger hogra venstre hoyre hojre vasen vasem\w* oikea\w*
(?:le|pra)w[aoey]\w* vlevo vpravo lev[aey] prav[aey] vlavo bal bal(?:ra|rol|oldal\w*)
jobb jobb(?:ra|rol|oldal\w*) solda\w* solunda\w* sola sag sag[ad]\w* sagin\w*
слева справа влево вправо налево направо лев(?:ы|а|о|у)\w* прав(?:ы|а|о|у)\w*
ліворуч праворуч зліва ліви\w* αριστερ\w* δεξι\w* kiri kanan trai phai
"""
_VERTICAL = r"""
top(?:s|most)? bottoms? above below beneath under underneath upper(?:most)? lower(?:most)? upside
up down upwards? downwards? upright vertical\w* horizontal\w* north\w* south\w*
oben ober\w* unt(?:en|er\w*) uber darunter daruber senkrecht\w* waagerecht\w* kopfuber
haut\w* bas basse dessus dessous sous arriba abajo encima debajo superior\w* inferior\w*
acima abaixo cima baixo sopra sotto alto basso deasupra dedesubt
ovan ovenfor nedenfor nedre ovre onder boven
gor[aey]\w* dol[aey]\w* nahore dole fent lent felso ustte altta ustunde altinda yukari asagi
сверху снизу вверху внизу наверху вверх вниз над под верхн\w* нижн\w* вгорі зверху знизу
επανω πανω κατω atas bawah tren duoi
"""
# Substrings for languages without spaces between words, or with attached particles and endings.
_SIDES_INSIDE = """
左 右 ひだり みぎ 왼 오른 좌측 우측 ซ้าย ขวา يسار يمين أيسر أيمن چپ راست שמאל ימין
बाए बाये बाई दाए दाये दाई বাম ডান
"""
_VERTICAL_INSIDE = """
上方 下方 上面 下面 上边 下边 上邊 下邊 顶 頂 底部 上部 下部 之上 之下 上に 下に 上の 下の 上側 下側 垂直 水平
위쪽 아래 위에 상단 하단 ด้านบน ด้านล่าง فوق تحت أعلى أسفل بالا پایین למעלה למטה מעל מתחת ऊपर नीचे উপরে নিচে
"""  # noqa: E501


def flip_allowed(category: str, texts: Iterable[str], *, has_turn: bool = False) -> bool:
    """Return whether the images of a sample may be mirrored.

    Args:
        category: one of `data_pipeline.index.columns.CATEGORIES`.
        texts: all texts of the sample, including variants, and the labels of its regions.
        has_turn: True if the sample has orientation metadata.

    Raises:
        ValueError: an unknown category.
    """
    _check(category)
    if category in TEXT_BEARING or has_turn:
        return False
    return not any(_names(text, _SIDE_WORDS) for text in texts)


def turn_allowed(category: str, texts: Iterable[str], *, has_turn: bool = False) -> bool:
    """Return whether the images of a sample may be turned by 90, 180 or 270 degrees.

    Args:
        category, texts: as for `flip_allowed`.
        has_turn: True if every image of the sample has orientation metadata.
    """
    _check(category)
    if category in TEXT_BEARING and not has_turn:
        return False
    if category == "ocr":  # in a transcript, "right" does not refer to a side of the page
        return True
    words = (_SIDE_WORDS, _VERTICAL_WORDS)
    return not any(_names(text, pattern) for text in texts for pattern in words)


def _check(category: str) -> None:
    if category not in CATEGORIES:
        raise ValueError(f"category is {category!r}; known are {', '.join(CATEGORIES)}")


# Letters that NFKD does not decompose -> their base letter in the word lists.
_LETTERS = str.maketrans({"ø": "o", "ł": "l", "ı": "i", "đ": "d", "’": "'"})


def _plain(text: str) -> str:
    """Return the text in lower case, without diacritics on Latin, Greek and Cyrillic letters.

    Words are then found however their accents are encoded, and also without accents.
    """
    text = unicodedata.normalize("NFKD", text.casefold())
    bare = re.sub("[\u0300-\u036f]", "", text)
    return unicodedata.normalize("NFC", bare).translate(_LETTERS)


def _pattern(words: str, inside: str) -> re.Pattern[str]:
    whole, parts = "|".join(words.split()), "|".join(_plain(inside).split())
    return re.compile(rf"(?<!\w)(?:{whole})(?!\w)|{parts}")


_SIDE_WORDS = _pattern(_SIDES, _SIDES_INSIDE)
_VERTICAL_WORDS = _pattern(_VERTICAL, _VERTICAL_INSIDE)


def _names(text: str, pattern: re.Pattern[str]) -> bool:
    return pattern.search(_plain(text)) is not None
