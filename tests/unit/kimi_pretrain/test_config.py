"""Tests that each wrong key or number gives one clear sentence and that presets are sound."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_pretrain.config import (
    ConfigError,
    _parse_yaml,
    dump_config,
    load_config,
    parse_config,
)
from kimi_pretrain.parallel.layout import check_stages, even_stages, expand_stages
from tests import ROOT
from typed_config.yaml_text import one_line

PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_come_back_from_what_is_written(preset):
    config = load_config(preset)
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_overrides_win_and_keep_their_types():
    overrides = ["train.steps=7", "data.seed=3", "optim.lr=1e-3", "model.language.norm_eps=2E-6"]
    config = load_config("tiny_cpu", overrides)
    assert (config.train.steps, config.data.seed, config.optim.lr) == (7, 3, 1e-3)
    assert config.model.language.norm_eps == 2e-6


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1))
@example("12e4567")
@example("010")
def test_a_configuration_with_any_text_is_read_back_equal(text):
    config = load_config("tiny_cpu", [f"train.stage={one_line(text)}"])
    assert config.train.stage == text
    assert parse_config(_parse_yaml(dump_config(config), "here")) == config


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [("train.seed=010", "seed", 10), ("train.steps=0012", "steps", 12)],
)
def test_a_number_with_leading_zeros_is_decimal(override, key, value):
    assert getattr(load_config("tiny_cpu", [override]).train, key) == value


@pytest.mark.parametrize("text", ["10:30", "0x10", "0o10", "1_000", "12e4567", "no", "1e3"])
def test_a_number_in_another_form_is_refused(text):
    with pytest.raises(ConfigError, match=r"train.steps") as error:
        load_config("tiny_cpu", [f"train.steps={text}"])
    assert text in str(error.value) or text == "1e3"  # which is shown as 1000.0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.step=7", "unknown key train.step; did you mean train.steps?"),
        ("optim.learning=7", "unknown key optim.learning; "),
        ("model.vision.widht=64", "did you mean model.vision.width?"),
        ("data.limits.images=64", "did you mean data.limits.image?"),
        ("model.language.yarn={factr: 2}", "did you mean model.language.yarn.factor?"),
        ("data.augment={digits: {crp: {}}}", "did you mean data.augment.digits.crop?"),
        ("data.augment={digits: {crop: {aera: 1}}}", "did you mean data.augment.digits.crop.area?"),
        ("data.schedule=[{after: 3}]", "unknown key data.schedule.0.after; did you mean"),
        ("data.cache={foldr: /tmp}", "did you mean data.cache.folder?"),
        ("modle.vision.width=64", "did you mean model?"),
        ("train.steps=none", "train.steps"),
        ("train.steps=0", "train.steps"),
        ('train.steps="7"', "train.steps"),
        ("model.language.num_experts=true", "model.language.num_experts"),
        ("data.seq_len=-1", "seq_len"),
        ("train.dtype=float8", "train.dtype"),
        ("train.steps", "expected section.key=value"),
        ("train.steps.more=1", "steps"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, told):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [override])
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["layout.ep=4"], ("layout.ep=4", "layout.dp=2")),
        (["layout.dp=3", "layout.ep=3", "data.rows_per_step=12"], ("num_experts=8",)),
        (["data.rows_per_step=18"], ("data.rows_per_step=18", "x train.rows_per_microbatch=2")),
        (["layout.pp=1"], ("layout.vpp=2", "layout.pp > 1")),
        (["data.rows_per_step=12"], ("3 microbatches", "layout.pp=2")),
        (["model.language.num_layers=6"], ("num_layers=6", "4 chunks", "layout.stages")),
        (["layout.stages=Ett|tt"], ("2 chunks", "is 4")),
        (['layout.stages="Et|t|t|L"'], ("3 layers", "num_layers is 4")),
        (['layout.stages="tE|t|t|tL"'], ('"E" (embedding) first',)),
        (["model.vision.out_width=64"], ("out_width=64", "hidden_size=128")),
        (
            ["model.language.yarn={factor: 64.0}", "data.seq_len=262272"],
            ("data.seq_len=262272", "262144 positions", "factor=64", "at least 64.03"),
        ),
    ],
)
def test_an_impossible_layout_says_which_numbers(overrides, told):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", overrides)
    for part in told:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["dep.scope=3"], ("dep.scope=3", "layout.dp=2")),
        (["dep.scope=0"], ("dep.scope=0",)),
        (["dep.max_split=8"], ("dep.max_split=8", "heads=4")),
        (["dep.max_split=3"], ("dep.max_split",)),
        (["dep.memory_limit_gib=null"], ("needs dep.memory_limit_gib",)),
        (["dep.placement=colocated", "layout.cp=2"], ("placement=colocated", "layout.cp=2")),
        (["train.frozen=[vision_tower, projector, language_model]"], ("nothing is left",)),
        (["train.frozen=[tower]"], ("train.frozen",)),
        (["dep.cost={per_patch: 1.0e-6}"], ("dep.cost.per_patch_squared",)),
    ],
)
def test_settings_of_the_encoder_that_cannot_be_are_named(overrides, told):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", overrides)
    for part in told:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.fp8_storage=true", "train.dtype=float64"], ("fp8_storage=true", "dtype=float64")),
        (["train.recompute=[norms, norms]"], ("train.recompute", "norms", "each kind once")),
        (["train.recompute=[moe]"], ("train.recompute", "moe", "'norms', 'swiglu' or 'mla_up'")),
        (["train.attention=flex", "train.dtype=float64"], ("attention=flex", "dtype=float64")),
        (["train.attention=transformer_engine"], ("transformer_engine", "dtype=float32")),
    ],
)
def test_a_policy_that_does_not_apply_is_one_line(overrides, told):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", overrides)
    for part in told:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_stage_strings_expand_as_megatron_core_reads_them():
    assert expand_stages("Et|(tt|)*2t*3L") == ["Et", "tt", "tt", "tttL"]
    assert len(expand_stages("Ett|(tt|)*29t|L")) == 32


def test_layers_that_do_not_divide_are_spread():
    made = 0
    for num_layers in range(1, 70):
        for chunks in range(1, 40):
            try:
                stages = even_stages(num_layers, chunks)
            except ValueError:
                continue
            if num_layers % chunks == 0:
                assert stages is None
                continue
            assert stages is not None
            check_stages(stages, chunks, num_layers)
            sizes = [chunk.count("t") for chunk in expand_stages(stages)]
            assert len(set(sizes[1:-1])) == 1
            assert sizes[-1] < sizes[1] == -(-num_layers // chunks)
            made += 1
    assert made > 100
    assert even_stages(61, 32) == load_config("kimi_k25_1t").layout.stages


def test_an_unknown_file_names_the_presets():
    with pytest.raises(ConfigError, match="kimi_k25_1t"):
        load_config("configs/nothing.yaml")


def test_text_that_is_no_yaml_is_named(tmp_path):
    with pytest.raises(ConfigError, match="override 'data.sources={pairs': not YAML"):
        load_config("tiny_cpu", ["data.sources={pairs"])
    file = tmp_path / "broken.yaml"
    file.write_text("model: {")
    with pytest.raises(ConfigError, match="broken.yaml: not YAML"):
        load_config(file)


def refused(tmp_path, data: bytes) -> str:
    (tmp_path / "my.yaml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "my.yaml")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/my.yaml: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x80\x04\x95 a pickle", "not YAML: byte 0 is 0x80, which is no UTF-8; expected a text"),
        (b"train:\n  steps: 5 # \xe9\n", "byte 20 is 0xe9, which is no UTF-8"),
        (b"a: \x00", "not YAML: unacceptable character #x0000"),
        (b"train: {steps: 2026-13-13}", "train.steps: Input should be a valid integer (got '2026"),
        (b"1: 2", "unknown key 1; "),
    ],
)
def test_a_file_that_is_no_configuration_is_told_in_a_line(data, told, tmp_path):
    assert told in refused(tmp_path, data)


@pytest.mark.parametrize(
    ("text", "key", "first", "second"),
    [
        ("train: {steps: 1}\nmodel: {}\ntrain: {seed: 1}\n", "train", 1, 3),
        ("train:\n  steps: 1\n  seed: 2\n  steps: 3\n", "steps", 2, 4),
        ("train:\n  steps: 1\n  'steps': 3\n", "steps", 2, 3),
        ("data: {sources: [{a: 1, a: 2}]}\n", "a", 1, 1),
    ],
)
def test_a_key_that_stands_twice_is_refused(text, key, first, second, tmp_path):
    told = f"not YAML: key '{key}' stands twice, in lines {first} and {second}; the second would "
    assert told in refused(tmp_path, text.encode())
    if first == second:
        with pytest.raises(ConfigError, match="stands twice"):
            load_config("tiny_cpu", ["data.sources={a: 1, a: 2}"])


def test_merged_keys_may_be_overridden():
    text = "base: &b {x: 1, y: 2}\nin: {deep: &d {<<: *b, y: 3}}\nout: {<<: *d, x: 4}\n"
    found = _parse_yaml(text, "here")
    assert found["out"] == {"x": 4, "y": 3}
    assert found["in"]["deep"] == {"x": 1, "y": 3}
