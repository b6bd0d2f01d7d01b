"""The `kimi-pretrain data` commands, which create, check and show sources."""

import json
import os
from typing import Annotated

import typer

from launch.cli import (
    data_collect,
    data_facts,
    data_govern,
    data_inspect,
    data_serve,
    data_sync,
)
from launch.cli.data_catalog import catalog
from launch.cli.options import EndpointOption, JsonOption
from launch.local.user_errors import one_line_errors

data = typer.Typer(help="Make sources and look at them.", no_args_is_help=True)

WorkersOption = Annotated[
    int | None, typer.Option(min=0, help="Processes that do the work; one per core unless given.")
]

FollowLinksOption = Annotated[
    bool, typer.Option("--follow-links", help="Links may lead out of an input's folder.")
]


@data.command()
def ingest(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Folders, .tar files, folders of those, .jsonl manifests; paths or s3:// URIs.",
        ),
    ],
    to: Annotated[str, typer.Option(help="Root of the sources: s3://bucket/prefix or a folder.")],
    name: Annotated[str, typer.Option(help="Of the new source.")],
    category: Annotated[
        str,
        typer.Option(
            help="agent, caption, code, grounding, interleaved, knowledge, ocr, text or video."
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="Rank file: a key under --to, a path or a URI.")],
    shard_mb: Annotated[int, typer.Option(min=1, help="Largest shard, in MiB.")] = 256,
    append_to: Annotated[
        str | None,
        typer.Option(
            help="Source under --to, or captions@3: its samples come first, by reference."
        ),
    ] = None,
    max_rejected: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of samples that may be rejected before the ingest ends."
        ),
    ] = 0.5,
    workers: WorkersOption = None,
    prefix_keys: Annotated[
        bool, typer.Option("--prefix-keys", help="Put the input's name before each sample's key.")
    ] = False,
    follow_links: FollowLinksOption = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a source from raw data: shards, index and manifest.

    The command rejects unusable samples, counts them by reason, and lists them in
    NAME/rejected.jsonl. If their share exceeds --max-rejected, the ingest ends;
    the same command with a higher share continues it. The same command also
    continues an ingest that was interrupted or killed. A finished source never
    changes. More data of the same kind become another source, or, with --append-to,
    a new version that refers to the old samples. docs/data_format.md shows the
    possible inputs.

    \b
    kimi-pretrain data ingest photos/ --to s3://corpus --name pairs \\
        --category caption \\
        --tokenizer tokenizer/kimi.tiktoken
    kimi-pretrain data ingest s3://crude/laion/ --to s3://corpus --name laion \\
        --category caption --tokenizer tokenizer/kimi.tiktoken --workers 16
    kimi-pretrain data ingest more/ --to s3://corpus --name pairs_2 \\
        --append-to pairs --category caption --tokenizer tokenizer/kimi.tiktoken
    kimi-pretrain data ingest boxes.jsonl --to /data/corpus --name boxes \\
        --category grounding --tokenizer kimi.tiktoken --json
    """
    with one_line_errors():
        from data_pipeline.ingest.ingest import ingest as write_source
        from data_pipeline.ingest.readers import open_inputs
        from data_pipeline.store.open import open_store
        from data_pipeline.workers.workers import WorkerDied
        from launch.cli.ingest_view import Pace, ingest_bar, print_rejections, rejections
        from launch.cli.sources import named_tokenizer

        _use_endpoint(endpoint)
        store = open_store(to)
        ranks = named_tokenizer(tokenizer, store, endpoint)
        before = append_to
        if append_to is not None and "@" in append_to:
            from launch.local.versions import folder_of

            before = folder_of(append_to, store, endpoint)
        reader = open_inputs(inputs, category, prefix_keys=prefix_keys, follow_links=follow_links)
        pace = Pace()
        try:
            with ingest_bar(name, reader.total, pace) as show:
                index = write_source(
                    reader,
                    store,
                    name,
                    ranks,
                    shard_mb << 20,
                    category=category,
                    append_to=before,
                    max_rejected=max_rejected,
                    workers=_num_workers(workers),
                    progress=show,
                )
        except KeyboardInterrupt:
            typer.echo("interrupted; the same command goes on where it was", err=True)
            raise typer.Exit(130) from None
        except WorkerDied as error:
            raise ValueError(f"{error}; the same command goes on where it was") from error
        found = rejections(store, name)
        print_rejections(found, f"{store.uri}/{name}")
        if pace.now.turned:
            typer.echo(
                f"{pace.now.turned} images or clips carry an EXIF orientation or a rotation tag, "
                "which is not applied: if they should be upright, turn them and ingest them again",
                err=True,
            )
        summary = {
            "name": name,
            "uri": f"{store.uri}/{name}",
            "samples": index.num_samples,
            "items": index.num_items,
            "text_tokens": int(index.text_tokens.sum()),
            "shards": len(index.shards),
            "bytes": sum(shard.size for shard in index.shards),
            "rejected": {reason: count for reason, (count, _) in found.items()},
            "turned": pace.now.turned,
            "samples_per_second": round(pace.samples_per_second(), 1),
            "content_hash": index.content_hash,
        }
        _print_summary(summary, as_json)


@data.command()
def reindex(
    uri: Annotated[str, typer.Argument(help="The source: s3://bucket/prefix/NAME or a folder.")],
    name: Annotated[str, typer.Option(help="Of the new source, in the same root.")],
    tokenizer: Annotated[
        str, typer.Option(help="Rank file: a key in the source's root, a path or a URI.")
    ],
    workers: WorkersOption = None,
    threads: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count a source's tokens again with another tokenizer, without reading its media.

    The source does not change, because runs may be reading it. The new source gets a
    new index and manifest and shares the shards of the old source. Keep the shards as
    long as either source is used.

    \b
    kimi-pretrain data reindex s3://corpus/pairs --name pairs_k2 \\
        --tokenizer tokenizer/kimi.tiktoken
    """
    with one_line_errors():
        from data_pipeline.ingest.reindex import reindex as count_anew
        from data_pipeline.store.open import open_store
        from data_pipeline.workers.workers import WorkerDied
        from launch.cli.progress import item_bar
        from launch.cli.sources import named_tokenizer, split_source

        _use_endpoint(endpoint)
        root, old = split_source(uri)
        store = open_store(root)
        ranks = named_tokenizer(tokenizer, store, endpoint)
        try:
            with item_bar(name) as show:
                index = count_anew(
                    store,
                    old,
                    name,
                    ranks,
                    workers=_num_workers(workers),
                    threads=threads,
                    progress=show,
                )
        except WorkerDied as error:
            raise ValueError(str(error)) from error
        summary = {
            "name": name,
            "uri": f"{store.uri}/{name}",
            "samples": index.num_samples,
            "text_tokens": int(index.text_tokens.sum()),
            "shards_of": old,
            "content_hash": index.content_hash,
        }
        _print_summary(summary, as_json)


@data.command()
def tokenizer(
    to: Annotated[str, typer.Option(help="Root of the sources: s3://bucket/prefix or a folder.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            help="As for ingest: folders, .tar files, .jsonl manifests. Or finished sources: "
            "s3://bucket/prefix/NAME or their folders.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="It is stored under --to, as tokenizer/NAME.tiktoken.")
    ] = "tokenizer",
    given: Annotated[
        str | None,
        typer.Option(help="Store this tiktoken rank file (path or URI) instead of training one."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Number of ids, with the 256 special ones.")
    ] = 32_768,
    category: Annotated[str, typer.Option(help="Of raw inputs, as for ingest.")] = "text",
    max_mb: Annotated[
        int, typer.Option(min=1, help="Most MiB of text, shared evenly by the inputs.")
    ] = 1024,
    follow_links: FollowLinksOption = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a tokenizer (byte pairs, Kimi's layout) for your sources, or store an existing one.

    Samples with media contribute their texts. Each input contributes an equal part of
    --max-mb, from its beginning. The same inputs in the same order give the same file.

    \b
    kimi-pretrain data tokenizer books/ notes.jsonl --to s3://corpus
    kimi-pretrain data tokenizer s3://corpus/prose s3://corpus/code \\
        --to s3://corpus --name mixed --vocab-size 65536
    kimi-pretrain data tokenizer --given kimi.tiktoken --to /data --name kimi
    """
    with one_line_errors():
        from data_pipeline.store.open import open_store
        from data_pipeline.text import NUM_SPECIAL, train_ranks
        from launch.cli.sources import rank_file, store_tokenizer, training_texts

        if bool(inputs) == bool(given):
            raise ValueError("give either INPUTs to train on, or --given with a rank file")
        _use_endpoint(endpoint)
        store = open_store(to)
        if given:
            _, ranks = rank_file(given, store, endpoint)
        else:
            with training_texts(
                inputs or (), category, max_mb << 20, endpoint, follow_links=follow_links
            ) as texts:
                ranks = train_ranks(texts, vocab_size - NUM_SPECIAL)
        found = store_tokenizer(store, name, ranks)
        key = f"tokenizer/{found.name}"
        summary = {
            "uri": f"{store.uri}/{key}",
            "vocab_size": found.vocab_size,
            "sha256": found.hash,
        }
        _print_summary(summary, as_json)
        if not as_json:
            typer.echo(
                f"next: kimi-pretrain data ingest ... --to {to} --tokenizer {key}; in the "
                f"configuration data.tokenizer={key} and a model.language.vocab_size of "
                f"{found.vocab_size} or more"
            )


def _use_endpoint(endpoint: str | None) -> None:
    """Set the endpoint of all stores, including those of workers, through the environment."""
    if endpoint:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):  # boto3 prefers the second
            os.environ[name] = endpoint


def _num_workers(asked: int | None) -> int:
    cores = len(os.sched_getaffinity(0))
    # On one core a second process would only add overhead.
    return (cores if cores > 1 else 0) if asked is None else asked


def _print_summary(summary: dict[str, object], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    for key, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{count:,} x {reason}" for reason, count in value.items()) or "none"
        typer.echo(f"{key:20s} {value}")


@data.command("show-index")
def show_index(
    uri: Annotated[str, typer.Argument(help="The source: s3://bucket/prefix/NAME or a folder.")],
) -> None:
    """Print a summary of a source's index as one JSON object.

    \b
    kimi-pretrain data show-index s3://corpus/digits
    """
    with one_line_errors():
        from data_pipeline.index.manifest import read_index
        from data_pipeline.store.open import open_store
        from launch.cli.sources import split_source

        root, source = split_source(uri)
        index = read_index(open_store(root), source)
        summary = {
            "name": index.name,
            "category": index.category,
            "samples": int(index.num_samples),
            "items": len(index.item_kind),
            "text_tokens": int(index.text_tokens.sum()),
            "shards": [{"key": s.key, "size": s.size, "sha256": s.sha256} for s in index.shards],
        }
        typer.echo(json.dumps(summary))


data.add_typer(catalog, name="catalog")
for command in (
    *(data_inspect.verify, data_inspect.stats, data_facts.facts, data_facts.count),
    *(data_inspect.show, data_sync.sync),
    *(data_govern.exposure, data_govern.redact, data_govern.hold, data_collect.collect),
    *(data_serve.serve, data_serve.token),
):
    data.command()(command)
