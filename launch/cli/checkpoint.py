"""The `kimi-pretrain checkpoint` commands: inspect checkpoints, import and export weights."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.store.addresses import check_local
from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from kimi_pretrain.weights.hf_config import SpecialIds

checkpoint = typer.Typer(
    help="Inspect checkpoints, import and export weights.", no_args_is_help=True
)

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="Folder or s3:// URI of a checkpoint; of a run or its checkpoints: the latest.",
    ),
]


@checkpoint.command()
def inspect(
    uri: CheckpointArgument,
    tensors: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="List tensors, '*' for anything, with their norms."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a checkpoint or a Hugging Face folder.

    The command reads only the manifest and the headers of files, so it takes no
    longer for a large model. With --tensors it also reads the matching tensors, one
    at a time.

    \b
    kimi-pretrain checkpoint inspect runs/demo
    kimi-pretrain checkpoint inspect s3://bucket/run/step_00001000 --json
    kimi-pretrain checkpoint inspect runs/demo --tensors '*.layers.0.self_attn.*'
    """
    with one_line_errors():
        from kimi_pretrain.reliability.run_history import latest_in
        from kimi_pretrain.weights.report import figures, report
        from kimi_pretrain.weights.weight_reader import open_weights
        from launch.cli import checkpoint_view as view

        stored = open_weights(latest_in(uri))
        found = report(stored)
        if tensors is not None:
            found["listed"] = list(view.print_figures(figures(stored, tensors), quiet=as_json))
        elif not as_json:
            view.print_report(found)
        if as_json:
            typer.echo(json.dumps(found))


@checkpoint.command()
def verify(uri: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Read every file of a checkpoint and compare it with the manifest's SHA-256.

    The manifest itself is compared with the SHA-256 at its end.

    Exit code 0: every file is as it was written, 1: some files differ, 2: there is no
    checkpoint.

    \b
    kimi-pretrain checkpoint verify runs/demo/checkpoints/step_00000220
    kimi-pretrain checkpoint verify s3://bucket/run --json
    """
    with one_line_errors():
        from kimi_pretrain.checkpoint.storage_read import open_checkpoint
        from kimi_pretrain.reliability.run_history import latest_in
        from kimi_pretrain.weights.weight_reader import checkpoint_weights
        from launch.cli.checkpoint_view import plain_bytes
        from launch.cli.progress import byte_bar

        found = open_checkpoint(latest_in(uri))
        problems, files, tensors = found.manifest_problems(), {}, 0
        if not problems:
            files = found.files
            with byte_bar("verify", sum(files.values())) as advance:
                problems = found.verify(progress=advance)
        if not problems:
            tensors = len(checkpoint_weights(found).headers)
        total = sum(files.values())
        if as_json:
            told = {"uri": found.uri, "passed": not problems, "problems": problems}
            typer.echo(json.dumps(told | {"files": len(files), "bytes": total}))
        else:
            for problem in problems:
                typer.echo(f"damaged: {problem}")
            size = f"{len(files)} files, {plain_bytes(total)}"
            told = f"{len(problems)} of " if problems else f"{tensors} tensors in "
            typer.echo(f"{'FAIL' if problems else 'PASS'}: {found.uri}: {told}{size}")
        raise typer.Exit(1 if problems else 0)


@checkpoint.command()
def diff(
    a: CheckpointArgument,
    b: CheckpointArgument,
    weights_only: Annotated[
        bool, typer.Option("--weights", help="Leave the optimizer and the run's state out.")
    ] = False,
    most: Annotated[int, typer.Option(min=1, help="Tensors to show.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints (or Hugging Face folders) tensor by tensor, and their run states.

    For each tensor that differs, shows how many numbers differ, the largest
    difference, its ratio to the largest number in A, and the first number that
    differs. Exit code 0: equal bit for bit, 1: different, 2: could not be compared.

    \b
    kimi-pretrain checkpoint diff runs/a runs/b
    kimi-pretrain checkpoint diff runs/a/checkpoints/step_00000110 runs/a \\
        --weights --most 5
    kimi-pretrain checkpoint diff exported/ moonlight/ --weights
    """
    with one_line_errors():
        from kimi_pretrain.reliability.run_history import latest_in
        from kimi_pretrain.weights.compare import compare, state_difference
        from kimi_pretrain.weights.weight_reader import open_weights
        from launch.cli import checkpoint_view as view
        from launch.cli.progress import item_bar

        left, right = (open_weights(latest_in(uri)) for uri in (a, b))
        with item_bar("diff") as progress:
            found = list(compare(left, right, weights_only=weights_only, progress=progress))
        state = None if weights_only else state_difference(left, right)
        same = not found and state is None
        if as_json:
            differences = [view.as_plain(one) for one in found]
            typer.echo(json.dumps({"same": same, "state": state, "tensors": differences}))
        else:
            view.print_differences(found, state, left, right, most)
        raise typer.Exit(0 if same else 1)


@checkpoint.command()
def export(
    uri: CheckpointArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    kind: Annotated[
        str, typer.Option("--as", help="kimi_k25, or deepseek_v3: the language model alone.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float32; as trained unless given."),
    ] = None,
    int4: Annotated[
        bool, typer.Option("--int4", help="Routed experts as INT4, as Kimi K2.5 is released.")
    ] = False,
    shard_gib: Annotated[float, typer.Option(min=1e-6, help="Largest file, in GiB.")] = 5.0,
    max_positions: Annotated[
        int | None,
        typer.Option(min=1, help="For config.json; else YaRN's, or the rows' length in training."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Rank file: copied along, and its special ids go into config.json."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the weights as a Hugging Face folder: safetensors, index and config.json.

    Tensor names follow DeepSeek-V3 and Kimi K2, or Kimi K2.5 with --as kimi_k25. A
    float32 export of a bfloat16 run writes the optimizer's master copies. Only one
    tensor at a time is in memory.

    \b
    kimi-pretrain checkpoint export runs/demo exported/ --as deepseek_v3
    kimi-pretrain checkpoint export s3://bucket/run k25/ --as kimi_k25 --int4 \\
        --tokenizer kimi.tiktoken
    """
    with one_line_errors():
        from kimi_pretrain.config import GIB
        from kimi_pretrain.weights.hf_export import ExportOptions, plan
        from kimi_pretrain.weights.hf_export import export as write
        from launch.cli import checkpoint_view as view
        from launch.cli.progress import byte_bar

        check_local("OUT", out)
        _one_of("--as", kind, ("kimi_k25", "deepseek_v3"))
        _one_of("--dtype", dtype, (None, "bfloat16", "float32"))
        content, ids = _tokenizer(tokenizer)
        options = ExportOptions(
            kind,  # type: ignore[arg-type]
            dtype,
            int4,
            round(shard_gib * GIB),
            max_positions,
            ids,
        )
        found = plan(uri, options)
        total = sum(tensor.entry.nbytes for tensor in found.tensors)
        with byte_bar("export", total) as advance:
            extra = {} if content is None else {"tiktoken.model": content}
            write(found, out, options, advance, extra)
        summary = {
            "folder": str(out),
            "from": found.weights.reader.where,
            "tensors": len(found.tensors),
            "bytes": total,
            "dtype": found.dtype,
            "int4": int4,
            "from_masters": found.from_masters,
            "special_ids_from": found.first_special_id,
        }
        if as_json:
            typer.echo(json.dumps(summary))
        else:
            view.print_export(summary, found.widened, ids is not None)


@checkpoint.command("import")
def import_(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Hugging Face folder: K2, Moonlight or K2.5.")
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Where checkpoints lie: a folder or s3:// URI.")
    ],
    config: ConfigOption,
    overrides: Overrides = None,
    vision: Annotated[
        str | None, typer.Option(help="Weights of the encoder, where FOLDER has none.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a weights-only checkpoint (OUT/step_00000000) from a Hugging Face folder.

    The command checks everything before it writes anything: names, shapes, types, and
    config.json against the configuration. It dequantises INT4 and FP8 weights, and
    converts all weights to train.dtype. train.start_from also reads such a folder
    directly, but a checkpoint loads faster, and `eval` accepts it.

    \b
    kimi-pretrain checkpoint import moonlight/ imported/ \\
        --config moonlight_16b_a3b
    kimi-pretrain checkpoint import kimi-k2.5/ s3://bucket/k25 \\
        --config kimi_k25_1t
    """
    with one_line_errors():
        from kimi_pretrain.config import load_config
        from kimi_pretrain.weights.hf_import import plan, write
        from launch.cli import checkpoint_view as view
        from launch.cli.progress import byte_bar

        found = plan(folder, load_config(config, overrides or ()), vision)
        with byte_bar("import", found.nbytes) as advance:
            made = write(found, out, advance)
        summary = {
            "checkpoint": made,
            "from": folder,
            "tensors": len(found.sizes),
            "bytes": found.nbytes,
            "quantized": found.weights.quantized,
            "absent": list(found.absent),
        }
        if as_json:
            typer.echo(json.dumps(summary))
        else:
            view.print_import(summary)


def _one_of(option: str, value: str | None, known: tuple[str | None, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option} {value}: expected {' or '.join(filter(None, known))}")


def _tokenizer(file: Path | None) -> "tuple[bytes | None, SpecialIds | None]":
    """Return a rank file's content and its special ids; both are None without a file."""
    from data_pipeline.text import Tokenizer
    from kimi_pretrain.weights.hf_config import SpecialIds

    if file is None:
        return None, None
    content = file.read_bytes()
    return content, SpecialIds(Tokenizer(content, file.name).num_base)
