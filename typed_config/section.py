"""The base class of every section of the configuration.

A section is a pydantic model. Its fields carry their own documentation, a docstring below each:

    seq_len: int = Field(ge=3)
    'Length of a row. [tokens; data_pipeline/plan/pack.py]'

The brackets at the end hold the unit ("-" for none) and the file that reads the key;
`reference.keys` takes them apart, and a test holds every field to this form.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# YAML knows lists alone, strict pydantic takes a tuple for a tuple: what is inside stays strict.
Pair = Annotated[tuple[float, float], Field(strict=False)]
IntPair = Annotated[tuple[int, int], Field(strict=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about its keys and their types.

    A ValidationError does not print its input, which may hold a password; `problems` shows values.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, all checked again; raises ValidationError."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate(values | changes)


def section_of(kind: Any) -> type[Section] | None:
    """Return the section in a field's type, through optional ones, lists and dicts, or None."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    for inner in getattr(kind, "__args__", ()):
        if (found := section_of(inner)) is not None:
            return found
    return None


def problems(error: ValidationError, shown: Any = repr) -> Iterator[str]:
    """Yield what is wrong as "key path: what is allowed (got value)", one line each.

    Args:
        error: of a section.
        shown: makes a text of a value, for values that may be long.
    """
    for problem in error.errors(include_url=False):
        # In <> stands which form of a value was read; it is nothing that the user wrote.
        path = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("<"))
        message = problem["msg"].removeprefix("Value error, ").removeprefix(f"{path}: ")
        value = cast(object, problem["input"])
        told = "" if isinstance(value, Mapping | BaseModel) else f" (got {shown(value)})"
        yield f"{path + ': ' if path else ''}{message}{told}"
