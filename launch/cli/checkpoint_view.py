"""Prints the tables of `kimi-pretrain checkpoint`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kimi_pretrain.weights.compare import WeightDifference
    from kimi_pretrain.weights.report import TensorFigures
    from kimi_pretrain.weights.weight_reader import WeightReader


def plain_bytes(count: int) -> str:
    """Return a human-readable size, such as "1.5 GiB" (powers of 1024)."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_report(found: dict[str, Any]) -> None:
    """Print the result of `report` as a table."""
    echo = typer.echo
    echo(f"{found['uri']}")
    if found["kind"] == "checkpoint":
        _print_state(found)
    else:
        echo(f"  Hugging Face folder, {found['architecture']}")
    files = f"{found['files']} files, {plain_bytes(found['bytes'])}"
    echo(f"  {files}, {found['tensors']:,} tensors")
    echo(f"  {found['parameters']:,} parameters")
    echo("")
    echo(f"  {'part':22s} {'tensors':>9s} {'numbers':>19s} {'size':>11s}  type")
    for part, count in found["parts"].items():
        _print_count(part, count)
    for kind, count in found["optimizer"].items():
        _print_count(f"optim.{kind}", count)


def _print_state(found: dict[str, Any]) -> None:
    layout = found["layout"]
    sizes = " ".join(f"{axis}={layout[axis]}" for axis in ("pp", "vpp", "dp", "ep", "cp", "tp"))
    what = "everything" if found["contents"] == "all" else "weights alone"
    skipped = found["step"] - found["optimizer_steps"]
    typer.echo(
        f"  step {found['step']}, {found['optimizer_steps']} updates ({skipped} skipped), {what}, "
        f"{found['dtype']}"
    )
    typer.echo(f"  written by layout {sizes}")
    if found["loader"]:
        place = ", ".join(f"{key} {value}" for key, value in found["loader"].items())
        typer.echo(f"  loader: {place}; rows of {found['seq_len']} tokens")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    typer.echo(f"  by {versions}")


def _print_count(name: str, count: dict[str, Any]) -> None:
    typer.echo(
        f"  {name:22s} {count['tensors']:9,d} {count['numbers']:19,d} "
        f"{plain_bytes(count['bytes']):>11s}  {' '.join(count['dtypes'])}"
    )


def print_figures(found: "Iterable[TensorFigures]", *, quiet: bool) -> Iterator[dict[str, Any]]:
    """Print a line for each tensor as it is read; yield its figures for JSON."""
    if not quiet:
        typer.echo(f"{'norm':>12s} {'largest':>11s}  {'type':9s} {'shape':16s} name")
    for one in found:
        if not quiet:
            shape = "x".join(map(str, one.shape)) or "-"
            bad = f"  {one.not_finite:,} NOT FINITE" if one.not_finite else ""
            typer.echo(
                f"{one.norm:12.5g} {one.largest:11.4g}  {one.dtype:9s} {shape:16s} {one.name}{bad}"
            )
        yield _finite(asdict(one))


def as_plain(one: "WeightDifference") -> dict[str, Any]:
    """Return a difference as plain values for JSON."""
    return _finite(asdict(one))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN with None, because JSON has neither."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def print_differences(
    found: "Sequence[WeightDifference]",
    state: str | None,
    a: "WeightReader",
    b: "WeightReader",
    most: int,
) -> None:
    """Print the first `most` differences, and whether A and B are the same."""
    typer.echo(f"A {a.where}: {len(a.headers):,} tensors")
    typer.echo(f"B {b.where}: {len(b.headers):,} tensors")
    for one in found[:most]:
        typer.echo(f"  {one.name}: {_told(one)}")
    if len(found) > most:
        typer.echo(f"  ... and {len(found) - most:,} more; --most shows them")
    if state is not None:
        typer.echo(f"  {state}")
    if not found and state is None:
        typer.echo("SAME: bit for bit")
        return
    largest = max((one.largest for one in found), default=0.0)
    typer.echo(f"DIFFERENT: {len(found):,} tensors; largest difference {largest:.4g}")


def _told(one: "WeightDifference") -> str:
    told = one.kind if one.kind.startswith("only") else f"{one.kind} {one.detail}".rstrip()
    if one.first is None:
        return told
    index, x, y = one.first
    numbers = (
        f"{one.count:,} of {one.total:,} numbers, largest {one.largest:.4g} "
        f"(relative {one.relative:.4g}), first at {index}: {x!r} and {y!r}"
    )
    return numbers if one.kind == "numbers" else f"{told}; {numbers}"


def print_export(summary: dict[str, Any], widened: bool, tokenizer: bool) -> None:
    """Print a summary of an export, and the origin of its precision and special ids."""
    kind = f"{summary['dtype']}, routed experts INT4" if summary["int4"] else summary["dtype"]
    typer.echo(
        f"{summary['folder']}: {summary['tensors']:,} tensors, {plain_bytes(summary['bytes'])} "
        f"({kind}), from {summary['from']}"
    )
    if summary["from_masters"]:
        typer.echo(f"  {summary['from_masters']:,} of them from the optimizer's float32 masters")
    if widened:
        typer.echo("  the checkpoint holds no masters: these are widened, not more exact")
    if not tokenizer:
        first = summary["special_ids_from"]
        typer.echo(
            f"  config.json takes {first} ... {first + 255} for the special ids; --tokenizer makes "
            "sure, and puts the tokenizer beside the weights"
        )


def print_import(summary: dict[str, Any]) -> None:
    """Print a summary of an import."""
    kind = f" ({summary['quantized']}, dequantised)" if summary["quantized"] else ""
    typer.echo(
        f"{summary['checkpoint']}: {summary['tensors']:,} tensors, "
        f"{plain_bytes(summary['bytes'])}, from {summary['from']}{kind}"
    )
    if summary["absent"]:
        typer.echo(
            f"  no {' or '.join(summary['absent'])}: train.start_from takes the encoder from the "
            "seed then, or from train.vision_weights"
        )
