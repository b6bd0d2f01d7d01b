"""Names of versions (`captions@3` or `captions@active`), and SPDX licence names. Pure functions."""

import re
from typing import Any, NamedTuple

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from data_pipeline.index.shards import check_source_name

ACTIVE = "active"
# Matches "captions_3" and "captions-v3", the third version of captions. Leading zeros are excluded,
# because they would give a number two names.
_NUMBERED = re.compile(r"(.+?)[_-]v?([1-9]\d{0,5})")


class Wanted(NamedTuple):
    """A requested version; `number` is None for the active version."""

    dataset: str
    number: int | None

    def __str__(self) -> str:
        return f"{self.dataset}@{ACTIVE if self.number is None else self.number}"


def name_of(row: Any) -> str:
    """Return the name of a row of the table of versions."""
    return str(Wanted(row.dataset, row.number))


def parse(text: str) -> Wanted:
    """Return the version that a text requests.

    Raises:
        ValueError: it is neither DATASET@NUMBER nor DATASET@active.
    """
    dataset, _, number = text.partition("@")
    if number != ACTIVE and not re.fullmatch(r"[1-9]\d{0,5}", number):
        raise ValueError(f"{text!r}: expected DATASET@NUMBER or DATASET@{ACTIVE}, as captions@3")
    check_source_name(dataset)
    return Wanted(dataset, None if number == ACTIVE else int(number))


def of_folder(name: str) -> tuple[str, int]:
    """Return a source's dataset and number by its folder: captions_3 is captions@3, web is web@1.

    A lost catalogue recovers its names by this rule.
    """
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 1)


def check_licence(text: str) -> str:
    """Return an SPDX licence expression in its normal form.

    Raises:
        ValueError: the text is not an SPDX expression.
    """
    try:
        return canonicalize_license_expression(text)
    except InvalidLicenseExpression as error:
        raise ValueError(
            f"licence {text!r}: {error}; expected SPDX, such as CC-BY-4.0, or LicenseRef-NAME for "
            "one that is not in its list"
        ) from None
