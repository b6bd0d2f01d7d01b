"""The `kimi-pretrain config` commands, which explain, create and check configurations."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from kimi_pretrain.config import Config
    from kimi_pretrain.reliability.preflight import Checked

config = typer.Typer(
    help="Explain the configuration, begin one, and check one.", no_args_is_help=True
)


@config.command()
def show(
    overrides: Overrides = None,
    path: Annotated[
        str | None,
        typer.Option("--config", help="YAML file or preset whose values are shown, too."),
    ] = None,
    section: Annotated[
        str | None, typer.Option(help="Show this key and those below it alone.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/CONFIG.md.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every key: type, default, unit, meaning, and the file that reads it.

    With --config, also show the value that the file and the overrides give it.

    \b
    kimi-pretrain config show
    kimi-pretrain config show --section data.cache
    kimi-pretrain config show --config tiny_cpu layout.dp=1 layout.ep=1
    kimi-pretrain config show --json
    kimi-pretrain config show --markdown > docs/CONFIG.md
    """
    with one_line_errors():
        from launch.cli import config_view as view

        if path is None and overrides:
            raise ValueError(f"{overrides[0]}: overrides change a file; add --config")
        if markdown:
            typer.echo(view.markdown(), nl=False)
            return
        values = None if path is None else _load(path, overrides).model_dump(mode="json")
        found = view.chosen(section)
        if as_json:
            typer.echo(json.dumps({"keys": view.as_dicts(found, values)}))
            return
        for line in view.lines(found, values):
            typer.echo(line)


@config.command()
def template(
    out: Annotated[Path | None, typer.Option(help="New file for it; printed unless given.")] = None,
) -> None:
    """Print a YAML file for your own data that explains every key.

    It trains a small model in one process after three edits: the location of the
    data, the names of the sources, and the tokenizer that they were ingested with.

    \b
    kimi-pretrain config template --out my.yaml
    kimi-pretrain config check --config my.yaml
    kimi-pretrain train --config my.yaml
    """
    with one_line_errors():
        from launch.cli import config_view as view

        if out is None:
            typer.echo(view.template(), nl=False)
            return
        if out.exists():
            raise ValueError(f"--out {out}: it is there already; give another name")
        if not out.parent.is_dir():
            raise ValueError(f"--out {out}: there is no folder {out.parent}")
        out.write_text(view.template())
        typer.echo(f"wrote {out}; edit the lines marked EDIT")


@config.command()
def check(
    path: ConfigOption,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to plan, from the first.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Find errors that would prevent a run from starting, before any process starts.

    Reads the configuration, the tokenizer, the indices of all sources, and the
    headers of the initial weights. Plans the first steps exactly like the training.
    Finds wrong keys and values, a layout that does not divide, a missing root or
    source, a tokenizer that is missing or differs from that of the sources, a
    vocabulary that is too small, mixture weights that cannot be met, media that do
    not fit, and a checkpoint location that cannot be written.

    \b
    kimi-pretrain config check --config my.yaml
    kimi-pretrain config check --config my.yaml data.root=/data/corpus --steps 8
    """
    with one_line_errors():
        from kimi_pretrain.config import describe
        from kimi_pretrain.reliability.preflight import check_start
        from launch.local.start import check_weights

        loaded = _load(path, overrides)
        checked = check_start(loaded, steps)
        check_weights(loaded)
        typer.echo(describe(loaded))
        found = _found(loaded, checked)
        for source, samples in found["sources"].items():
            typer.echo(f"source {source}: {samples:,} samples")
        typer.echo(
            f"tokenizer {loaded.data.tokenizer}: {found['tokenizer_ids']:,} ids; "
            f"model.language.vocab_size is {loaded.model.language.vocab_size:,}"
        )
        for number, step in enumerate(found["steps"], 1):
            typer.echo(
                f"step {number}: {step['samples']:,} samples, {step['media']:,} media in "
                f"{loaded.data.rows_per_step:,} rows"
            )
        for notice in checked.notices:
            typer.echo(notice)
        typer.echo("sound: nothing that could be known before the start stands in its way")
        if as_json:
            typer.echo(json.dumps(found))


def _load(path: str, overrides: list[str] | None) -> "Config":
    from launch.local.versions import load_pinned

    return load_pinned(path, overrides or ())[0]


def _found(config: "Config", checked: "Checked") -> dict[str, Any]:
    steps = [{"samples": len(plan.samples.row), "media": len(plan.items)} for plan in checked.plans]
    return {
        "processes": config.layout.world_size(),
        "tokens_per_step": config.tokens_per_step(),
        "tokenizer_ids": checked.tokenizer.vocab_size,
        "sources": {index.name: len(index.key) for index in checked.indices},
        "steps": steps,
    }
