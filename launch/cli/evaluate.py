"""The `kimi-pretrain eval` command: accuracy on held-out pages of digits, or loss on texts."""

import json
from typing import Annotated, Any

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.quiet import quiet_libraries
from launch.local.user_errors import one_line_errors


def evaluate(
    config: ConfigOption,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint, or run for its newest.")],
    source: Annotated[str | None, typer.Option(help="Source to read, under data.root.")] = None,
    overrides: Overrides = None,
    heldout: Annotated[
        bool, typer.Option("--heldout", help="Loss of data.heldout, as in training.")
    ] = False,
    texts: Annotated[bool, typer.Option("--texts", help="Count samples without media.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first samples.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how many digits of held-out pages a checkpoint reads, or its loss on texts.

    For a source with media, it uses samples with one image each and counts the
    digits of the page. The model sees each page with its own picture, and with
    another page's picture. The second result shows how many digits a model can guess
    without the right picture.

    For a source without media, or with --texts, it measures loss and perplexity over
    all tokens of whole texts that the model is trained to write.

    With --heldout instead of --source, it measures the loss of the sources in
    data.heldout in one process: the same line that train.validate_every writes.

    It reports what it counted, and what it left out and why (docs/METRICS.md).

    \b
    kimi-pretrain eval --config runs/demo/config.yaml --checkpoint \\
        runs/demo/checkpoints/step_00000220 --source digits_heldout \\
        data.root=/where/the/corpus/is
    """
    quiet_libraries()
    with one_line_errors():
        if heldout == (source is not None):
            raise ValueError("give --source NAME, or --heldout for the sources of data.heldout")
        from kimi_pretrain.tools.evaluate import evaluate as measure
        from kimi_pretrain.tools.evaluate import heldout as measure_heldout
        from launch.local.versions import load_pinned

        loaded, _ = load_pinned(config, overrides or ())
        if heldout:
            line = measure_heldout(loaded, checkpoint)
            typer.echo(json.dumps(line) if as_json else table_of(line))
            return
        assert source is not None
        result = measure(loaded, checkpoint, source, texts=texts, limit=limit)
        if as_json:
            typer.echo(json.dumps(result))
            return
        whys = [f"{number:,} {why}" for why, number in result["left_out"].items()]
        for key, value in (result | {"left_out": ", ".join(whys) or "nothing"}).items():
            typer.echo(f"{key:16s} {'not known' if value is None else value}")


def table_of(line: dict[str, Any]) -> str:
    """Return the losses in a line of heldout.jsonl as a text table."""
    lines = [("all", line["loss"], line["loss_tokens"])]
    for what in ("source", "position"):
        means, tokens = line[f"loss_by_{what}"], line[f"loss_tokens_by_{what}"]
        lines += [(name, mean, tokens[name]) for name, mean in means.items()]
    told = [
        f"{name:20s} {'-' if mean is None else format(mean, '.4f'):>8s}  {tokens:,} tokens"
        for name, mean, tokens in lines
    ]
    return "\n".join([f"held-out loss after {line['step']} steps, nats a token", *told])
