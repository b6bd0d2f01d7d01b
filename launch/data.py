"""`kimi-pretrain data ...`: make sources and look at them."""

import json
from typing import Annotated

import typer

from launch.errors import told_plainly

data = typer.Typer(help="Make sources and look at them.", no_args_is_help=True)


@data.command("show-index")
def show_index(
    uri: Annotated[str, typer.Argument(help="The source: s3://bucket/prefix/NAME or a folder.")],
) -> None:
    """Print what a source's index holds, as one JSON object.

    \b
    kimi-pretrain data show-index s3://corpus/digits
    """
    with told_plainly():
        from data_pipeline.manifest import read_index
        from data_pipeline.store import open_store

        root, _, source = uri.rstrip("/").rpartition("/")
        index = read_index(open_store(root or "."), source)
        summary = {
            "name": index.name,
            "samples": int(index.num_samples),
            "items": len(index.item_kind),
            "text_tokens": int(index.text_tokens.sum()),
            "shards": [{"key": s.key, "size": s.size, "sha256": s.sha256} for s in index.shards],
        }
        typer.echo(json.dumps(summary))
