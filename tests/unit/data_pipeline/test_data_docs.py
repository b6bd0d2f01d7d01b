"""Checks of docs/DATA.md against the code: keys, defaults, examples, commands, error messages."""

import ast
import re
import shlex
from fractions import Fraction

import pytest
import typer
import yaml

from data_pipeline.augment.config import (
    AffineConfig,
    AugmentConfig,
    ColourConfig,
    CropConfig,
    JpegConfig,
)
from data_pipeline.cache.cached_store import CacheConfig
from data_pipeline.config import MAX_PREFETCH, BlendStage, DataConfig
from data_pipeline.plan.blend import UNITS, SourceTotals, weights_for_ratio
from data_pipeline.plan.planner import QUARANTINE_DELAY
from kimi_pretrain.config import ConfigError, parse_config
from launch.cli.main import app
from moonvit3d.geometry import PatchLimits
from tests import ROOT, docs

PAGE = (ROOT / "docs" / "DATA.md").read_text()
CONFIG_PAGE = (ROOT / "docs" / "CONFIG.md").read_text()
EXAMPLES = docs.blocks("docs/DATA.md", "yaml")
TINY = yaml.safe_load((ROOT / "configs" / "tiny_cpu.yaml").read_text())
REQUIRED = "required"
SECTIONS = {"cache": CacheConfig, "limits": PatchLimits}
AUGMENTED = {
    "affine": AffineConfig, "crop": CropConfig, "colour": ColourConfig, "jpeg": JpegConfig,
}  # fmt: skip


def section(number: int) -> str:
    return PAGE.split(f"\n## {number}. ")[1].split("\n## ")[0]


# The configuration -------------------------------------------------------------------------------


def with_data(data):
    """Parse tiny_cpu with `data` as its data section."""
    return parse_config({**TINY, "data": data})


def test_yaml_examples_load():
    whole, *parts = [yaml.safe_load(block) for block in EXAMPLES]
    first = with_data(whole["data"]).data
    assert first.root == "s3://corpus"
    assert first.cache is not None
    assert len(parts) == 3
    shown = set(whole["data"])
    for part in parts:
        assert list(part) == ["data"]
        changed = with_data(whole["data"] | part["data"]).data
        assert changed != first
        shown |= set(part["data"])
    assert {"schedule", "max_epochs", "augment", "cache", "workers"} <= shown


def test_an_example_with_a_wrong_key_would_be_seen():
    whole = yaml.safe_load(EXAMPLES[0])["data"]
    with pytest.raises(ConfigError, match=r"data\.seq_length; did you mean data\.seq_len"):
        with_data(whole | {"seq_length": 1})


def listed() -> dict[str, str]:
    """Return key -> default as the page lists them: `- `key` (default): ...`."""
    found = re.findall(r"^- `([\w.]+)` \((.+?)\): ", section(3), flags=re.MULTILINE)
    assert len(dict(found)) == len(found), "a key stands twice"
    return dict(found)


def keys_of_the_code() -> dict[str, object]:
    """Return key -> default of the models: a section becomes its keys, unless it may be null."""
    found: dict[str, object] = {}
    kinds = {None: DataConfig, **SECTIONS}
    for name, kind in kinds.items():
        prefix = f"{name}." if name in SECTIONS else ""
        for name, field in kind.model_fields.items():
            key = prefix + name
            if key in SECTIONS and key != "cache":
                continue
            default = field.get_default(call_default_factory=True)
            found[key] = REQUIRED if field.is_required() else default
    return found


def test_every_key_is_listed_with_its_default():
    expected = keys_of_the_code()
    page = listed()
    assert set(page) == set(expected)
    for key, default in page.items():
        value = REQUIRED if default == REQUIRED else yaml.safe_load(default)
        wanted = list(expected[key]) if isinstance(expected[key], tuple) else expected[key]
        assert value == wanted, key


def test_a_stage_has_the_keys_that_are_listed():
    (names,) = re.findall(r"each\s+`\{(after_tokens, .+?)\}`", section(3))
    assert names.split(", ") == list(BlendStage.model_fields)


def limits_of_augmentation() -> list[tuple[str, float, float]]:
    """Return (key, least, most) from docs/CONFIG.md: limits of the type, or "within a to b"."""
    found: list[tuple[str, float, float]] = []
    for part in CONFIG_PAGE.split("\n### `data.augment.<name>")[1:]:
        inside, rows = part.split("`", 1)
        prefix = f"{inside[1:]}." if inside else ""
        for key, rest in re.findall(r"^\| `(\w+)` \| (.*)$", rows.split("\n### ")[0], re.M):
            if limits := re.search(r">= ([\d.]+), <= ([\d.]+)|within ([\d.]+) to ([\d.]+)", rest):
                low, high = (float(number.rstrip(".")) for number in limits.groups() if number)
                found.append((prefix + key, low, high))
    return found


def test_all_ranges_of_augmentation_are_read():
    assert len(limits_of_augmentation()) == 19


def augmented(key: str, value):
    """Return a config with one augmentation key set, and other keys that it requires."""
    *inside, name = key.split(".")
    if not inside:
        return AugmentConfig(**{name: value})
    more = {"probability": {"affine": {"degrees": 1.0}, "crop": {"area": (0.5, 1.0)},
            "colour": {"gamma": 0.1}, "jpeg": {"quality": (5, 9)}}}  # fmt: skip
    others = {
        **more.get(name, {}).get(inside[0], {}),
        **({"quality": (5, 9)} if key[0] == "j" else {}),
    }
    return AUGMENTED[inside[0]](**(others | {name: value}))


@pytest.mark.parametrize(("key", "low", "high"), limits_of_augmentation())
def test_the_page_states_what_is_allowed(key, low, high):
    *inside, name = key.split(".")
    kind = AUGMENTED[inside[0]] if inside else AugmentConfig
    field = kind.model_fields[name].get_default()
    ranged = isinstance(field, tuple) or key == "jpeg.quality"
    whole = key == "jpeg.quality"

    def value(number):
        number = int(number) if whole else number
        return (number, number) if ranged else number

    step = 1 if whole else 1e-6
    for inside in (low, high):
        if value(inside) not in (field, 0.0):  # a section without effect is refused
            augmented(key, value(inside))
    for outside in (low - step, high + step):
        with pytest.raises(ValueError, match=f"allowed|equal to {low:g}|equal to {high:g}"):
            augmented(key, value(outside))


def test_the_example_of_shares_is_right():
    """Captions and pages have three quarters media; samples of all sources are equally long."""
    totals = [
        SourceTotals(name, 10, 1000, 750 if name in ("captions", "pages") else 0)
        for name in ("captions", "pages", "web", "code")
    ]
    shares = yaml.safe_load(EXAMPLES[0])["data"]["sources"]
    weights = weights_for_ratio(totals, [shares[total.name] for total in totals], 0.3)
    stated = re.findall(r"(\w+) (\d+)%", section(3).split("0.3 / 0.75")[1].split("A ratio")[0])
    assert [name for name, _ in stated] == [total.name for total in totals]
    for weight, (name, percent) in zip(weights, stated, strict=True):
        assert weight / UNITS == pytest.approx(int(percent) / 100, abs=1e-4), name
    with pytest.raises(ValueError, match="reachable is at most"):
        weights_for_ratio(totals, list(shares.values()), float(Fraction(751, 1000)))


def test_numbers_of_quarantine_and_prefetch():
    assert f"opened {QUARANTINE_DELAY} steps later" in " ".join(PAGE.split())
    assert f"looks at most {MAX_PREFETCH} steps ahead" in " ".join(PAGE.split())


# Commands ----------------------------------------------------------------------------------------


def command_lines() -> list[list[str]]:
    text = section(4).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("kimi-pretrain ")]


@pytest.mark.parametrize("words", command_lines(), ids=lambda words: " ".join(words[2:4]))
def test_commands_have_these_options(words):
    command, words = typer.main.get_command(app), words[1:]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))  # parses the command without running it
    with pytest.raises(Exception, match="no-such|[Nn]o such option"):
        command.make_context(command.name, [*words, "--no-such-option"])


def test_all_data_commands_are_there():
    group = typer.main.get_command(app).commands["data"]
    shown = {words[2] for words in command_lines() if words[1] == "data"}
    assert shown == set(group.commands)
    rows = re.findall(r"^\| ([a-z-]+) \|", section(4), flags=re.MULTILINE)
    assert set(rows) - {"command"} == set(group.commands)


# Messages ----------------------------------------------------------------------------------------


def templates() -> list[str]:
    """Return every string of the code; in f-strings a gap replaces each inserted value."""
    found = []
    for folder in ("typed_config", "data_pipeline", "kimi_pretrain", "moonvit3d", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if id(node) in notes:  # users do not see docstrings
                    continue
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", None) for part in node.values]
                    found.append("\0".join(p if isinstance(p, str) else "" for p in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def fragments() -> list[str]:
    cells = re.findall(r"^\| (`.+?) \| ", section(6), flags=re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def test_messages_of_the_table_are_those_of_the_code():
    known = templates()
    messages = fragments()
    assert len(messages) > 30
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(map(pattern.search, known)), message
