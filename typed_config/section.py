"""Base class of all configuration sections.

A section is a pydantic model. A docstring below each field documents it:

    seq_len: int = Field(ge=3)
    'Length of a row. [tokens; data_pipeline/plan/pack.py]'

The brackets at the end contain the unit ("-" for none) and the file that reads the key;
`reference.keys` parses them, and a test checks this form in every field.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# YAML has only lists, and strict pydantic accepts only tuples here. The elements stay strict.
Pair = Annotated[tuple[float, float], Field(strict=False)]
IntPair = Annotated[tuple[int, int], Field(strict=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """Part of the configuration: frozen, strict about its keys and their types.

    A ValidationError does not print its input, which may contain a password; `problems` prints
    values.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, validated again; raises ValidationError."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate(values | changes)


def section_of(kind: Any) -> type[Section] | None:
    """Return the section in a field's type, including optional types, lists and dicts, or None."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    for inner in getattr(kind, "__args__", ()):
        if (found := section_of(inner)) is not None:
            return found
    return None


def problems(error: ValidationError, shown: Any = repr) -> Iterator[str]:
    """Yield each problem as "key path: what is allowed (got value)", one line each.

    Args:
        error: of a section.
        shown: formats a value, which may be long.
    """
    for problem in error.errors(include_url=False):
        # Parts in <> name a member of a union type, which the user did not write.
        path = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("<"))
        message = problem["msg"].removeprefix("Value error, ").removeprefix(f"{path}: ")
        value = cast(object, problem["input"])
        told = "" if isinstance(value, Mapping | BaseModel) else f" (got {shown(value)})"
        yield f"{path + ': ' if path else ''}{message}{told}"
