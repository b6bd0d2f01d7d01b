"""How versions are named, `captions@3` or `captions@active`, and licences by SPDX. Pure."""

import re
from typing import Any, NamedTuple

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from data_pipeline.index.shards import check_source_name

ACTIVE = "active"
# "captions_3", "captions-v3": the third version of captions. A zero in front would be another name
# of the same number.
_NUMBERED = re.compile(r"(.+?)[_-]v?([1-9]\d{0,5})")


class Wanted(NamedTuple):
    """A version as it is asked for; `number` is None for the active one."""

    dataset: str
    number: int | None

    def __str__(self) -> str:
        return f"{self.dataset}@{ACTIVE if self.number is None else self.number}"


def name_of(row: Any) -> str:
    """Return the name of a row of the table of versions."""
    return str(Wanted(row.dataset, row.number))


def parse(text: str) -> Wanted:
    """Return which version a text asks for.

    Raises:
        ValueError: it is neither DATASET@NUMBER nor DATASET@active.
    """
    dataset, _, number = text.partition("@")
    if number != ACTIVE and not re.fullmatch(r"[1-9]\d{0,5}", number):
        raise ValueError(f"{text!r}: expected DATASET@NUMBER or DATASET@{ACTIVE}, as captions@3")
    check_source_name(dataset)
    return Wanted(dataset, None if number == ACTIVE else int(number))


def of_folder(name: str) -> tuple[str, int]:
    """Return dataset and number of a source by its folder: captions_3 is captions@3, web is web@1.

    The one rule by which a catalogue that was lost gets its names back.
    """
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 1)


def check_licence(text: str) -> str:
    """Return an SPDX licence expression in its normal form.

    Raises:
        ValueError: it is none.
    """
    try:
        return canonicalize_license_expression(text)
    except InvalidLicenseExpression as error:
        raise ValueError(
            f"licence {text!r}: {error}; expected SPDX, such as CC-BY-4.0, or LicenseRef-NAME for "
            "one that is not in its list"
        ) from None
