"""Formats the configuration keys for `kimi-pretrain config`: text, docs/CONFIG.md, template."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, cast

from kimi_pretrain.config import Config, load_config
from typed_config.reference import Default, Key, keys
from typed_config.section import Section
from typed_config.yaml_text import one_line

WIDTH = 96

# Overrides of the preset `tiny_cpu` in the template: one process, and nothing specific to the
# demo's corpus.
OWN_DATA = (
    "layout={}", "model.language.vocab_size=163840",
    "data.root=/path/to/corpus", "data.sources={my_images: 1.0, my_texts: 1.0}",
    "data.tokenizer=tokenizer/tokenizer.tiktoken",
    "data.vision_token_ratio=null", "data.schedule=[]", "data.max_epochs={}", "data.augment={}",
    "data.seq_len=512", "data.rows_per_step=4", "data.pack_window=1024", "data.cache=null",
    "data.shard_window=8", "data.limits={image: 1024, frame: 256}",
    "data.requests_per_second=null", "data.fetch_threads=4",
    "optim.warmup_steps=10", "optim.stable_steps=60", "optim.decay_steps=30",
    "train.steps=100", "train.rows_per_microbatch=1", "train.trace_step=null",
    "train.efficiency_pairs=0", "train.threads=null", "train.timeout_seconds=600.0",
    "dep={max_patches_per_chunk: 4096}", "checkpoint.every=50",
)  # fmt: skip
EDITS = {
    "data.root": "the folder or s3:// URI that `kimi-pretrain data ingest` wrote to",
    "data.sources": "your sources and their token shares",
    "data.tokenizer": "your tiktoken file: its key under root, or a path of its own",
}
SHOWN = {"layout.pp", "layout.dp"}  # shown although they have default values
HEAD = """\
# A small Kimi on your own data, in one process on a CPU or a GPU.
#
# Edit the three keys marked EDIT. Every key is here; one behind a # without a space has the value
# shown, or for sections an example.
#
# command:   kimi-pretrain config check --config my.yaml, then kimi-pretrain train --config my.yaml
# hardware:  a CPU with 8 GiB of memory, or one GPU (then train.dtype: bfloat16)
# expected:  100 steps in some minutes; model.language.vocab_size holds Kimi K2's tokenizer, and
#            steps are faster with as many as yours has (`config check` says)
"""
PAGE_HEAD = """\
This page is made by `kimi-pretrain config show --markdown` from the models; a test compares them.
Values come from defaults, then the YAML file, then `section.key=value` on the command line; an
unknown key is an error that names the nearest one. `kimi-pretrain config template` prints a file to
begin with. `kimi-pretrain config check` says what is wrong with one before any process starts."""
EXAMPLES = {
    "data.schedule": "[{after_tokens: 1000000, sources: {my_images: 1.0, my_texts: 2.0}}]",
    "data.max_epochs": "{my_texts: 4.0}",
    "data.augment": "{my_images: {flip: 0.5, crop: {area: [0.6, 1.0]}}}",
    "data.cache": "{folder: /local/disk/cache}",
    "optim.schedule": "[{steps: 500, lr: 2.0e-4, shape: linear}]",
    "optim.groups": "{router: {weight_decay: 0.0}}",
    "dep.cost": "{per_patch: 1.0e-6, per_patch_squared: 1.0e-10, per_item: 1.0e-4}",
    "model.language.yarn": "{factor: 32.0}",
}


def every_key() -> list[Key]:
    """Return all keys of the configuration."""
    return list(keys(Config))


def chosen(section: str | None) -> list[Key]:
    """Return a section's key and the keys below it, or all keys for None.

    Raises:
        ValueError: there is no such key.
    """
    every = every_key()
    if section is None:
        return every
    below = tuple(section + end for end in (".", "["))
    found = [key for key in every if key.path == section or key.path.startswith(below)]
    if not found:
        sections = ", ".join(key.path for key in every if key.section is not None)
        raise ValueError(f"--section {section}: no such key; the sections are {sections}")
    return found


def lines(found: list[Key], values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield lines that show keys on a terminal, with a configuration's values if given."""
    for key in found:
        value = _value(values, key.path) if values is not None else Default.REQUIRED
        given = "" if isinstance(value, Default | dict) else f" = {one_line(value)}"
        yield f"{key.path}{given}" + ("" if key.unit == "-" else f"  [{key.unit}]")
        default = key.default_text if key.default is Default.REQUIRED else (
            f"default {key.default_text}")  # fmt: skip
        yield f"    {key.kind}; {default}; read by {key.reader}"
        yield textwrap.indent(textwrap.fill(key.text, WIDTH - 4), "    ")


def as_dicts(found: list[Key], values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return keys for JSON; a required key has no "default"."""
    told = []
    for key in found:
        one = {"key": key.path, "type": key.kind, "unit": key.unit, "text": key.text}
        one |= {"reader": key.reader, "required": key.default is Default.REQUIRED}
        if key.default is not Default.REQUIRED:
            one["default"] = key.default
        if values is not None and (value := _value(values, key.path)) is not Default.REQUIRED:
            one["value"] = value
        told.append(one)
    return told


def _value(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, or `Default.REQUIRED` if there is none."""
    value: Any = values
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return Default.REQUIRED
        value = cast(Mapping[str, Any], value)[part]
    return value


def markdown() -> str:
    """Return the text of docs/CONFIG.md."""
    found = [
        "# Configuration: every key",
        PAGE_HEAD,
        "A unit `-` is none. *Where* is the file that reads the key.",
    ]
    for name, field in Config.model_fields.items():
        found += _chapter(name, cast(type[Section], field.annotation))
    return "\n\n".join(found) + "\n"


def _chapter(path: str, section: type[Section]) -> Iterator[str]:
    yield f"{'##' if '.' not in path else '###'} `{path}`"
    yield textwrap.fill(" ".join(inspect.cleandoc(section.__doc__ or "").split()), 100)
    below = [key for key in keys(section, f"{path}.")]
    inner = [key for key in below if key.section is not None]
    own = [key for key in below if not any(_is_under(key, other) for other in inner)]
    rows = ["| key | type | default | unit | what it does | where |", "|---|---|---|---|---|---|"]
    for key in own:
        name = key.path.removeprefix(f"{path}.")
        cells = (f"`{name}`", key.kind, key.default_text, key.unit, key.text, f"`{key.reader}`")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    yield "\n".join(rows)
    for key in inner:
        if key in own:
            (first, *_) = [other.path for other in below if _is_under(other, key)]
            yield from _chapter(first.rpartition(".")[0], cast(type[Section], key.section))


def _is_under(key: Key, other: Key) -> bool:
    return key.path.startswith((f"{other.path}.", f"{other.path}["))


def template() -> str:
    """Return a YAML file for the user's own data that runs after the edits marked in it."""
    values = load_config("tiny_cpu", OWN_DATA).model_dump(mode="json")
    values["model"]["vision"]["projector_width"] = 0  # computed from the width
    return HEAD + "".join(f"{line}\n" for line in _block(every_key(), values, ""))


def _block(found: list[Key], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the keys directly below a prefix, each after its description; comment out defaults."""
    pad = "  " * prefix.count(".")
    for key in found:
        name = key.path.removeprefix(prefix)
        if not key.path.startswith(prefix) or "." in name or "[" in name:
            continue
        value = values[name]
        if key.kind == "section":
            inner = list(_block(found, value, f"{key.path}."))
            used = any(re.match(r" *[a-z]", line) for line in inner)
            yield from ["", f"# {key.text}"] if not prefix else _comment(key, pad)
            yield f"{pad}{name}:" if used else f"{pad}#{name}:"
            yield from inner
            continue
        yield from _comment(key, pad)
        if key.path in EDITS:
            number = list(EDITS).index(key.path) + 1
            yield f"{pad}# EDIT {number} of {len(EDITS)}: {EDITS[key.path]}"
            yield f"{pad}{name}: {one_line(value)}"
        elif key.path in SHOWN or key.default is Default.REQUIRED or value != key.default:
            yield f"{pad}{name}: {one_line(value)}"
        else:
            yield f"{pad}#{name}: {EXAMPLES.get(key.path, one_line(key.default))}"


def _comment(key: Key, pad: str) -> Iterator[str]:
    unit = "" if key.unit == "-" else f" [{key.unit}]"
    default = f"; default {key.default_text}" if key.path in EXAMPLES else ""
    text = f"{key.text}{unit} ({key.kind}{default})"
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
