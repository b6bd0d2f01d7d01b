"""Options and arguments shared by several commands."""

from typing import Annotated

import typer

ConfigOption = Annotated[
    str, typer.Option("--config", help="YAML file, or the name of a shipped preset.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, the value in YAML.", show_default=False),
]
EndpointOption = Annotated[
    str | None, typer.Option(help="Of the object store; else AWS_ENDPOINT_URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]
