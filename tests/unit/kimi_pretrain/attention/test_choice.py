"""Tests the choice of the attention implementation and its refusals before data is opened."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kimi_pretrain.attention import choice
from kimi_pretrain.attention.choice import (
    Host,
    check_kind,
    flex_problem,
    kind_of,
    transformer_engine_problem,
)
from kimi_pretrain.config import ConfigError, load_config
from tests import ROOT

GPU = Host(
    cuda=True,
    torch="2.13.0",
    maxima=True,
    triton=True,
    compiler="/usr/bin/gcc",
    transformer_engine="2.20.2",
    transformer_engine_torch="2.20.2",
    cudnn=92100,
    environment={"NVTE_UNFUSED_ATTN": "0"},
)
CPU = replace(GPU, cuda=False)


def config(*overrides):
    return load_config("tiny_cpu", overrides)


@pytest.mark.parametrize(
    ("attention", "dtype", "host", "kind"),
    [
        ("auto", "bfloat16", GPU, "flex"),
        ("auto", "float32", GPU, "portable"),
        ("auto", "float64", GPU, "portable"),
        ("auto", "bfloat16", CPU, "portable"),
        ("portable", "bfloat16", GPU, "portable"),
        ("flex", "float32", GPU, "flex"),
        ("flex", "bfloat16", CPU, "flex"),
        ("transformer_engine", "bfloat16", CPU, "transformer_engine"),
    ],
)
def test_the_kind(attention, dtype, host, kind, monkeypatch):
    monkeypatch.setattr(Host, "here", lambda: host)
    asked = config(f"train.attention={attention}", f"train.dtype={dtype}", "layout.cp=1")
    assert kind_of(asked) == kind


def test_a_whole_host_is_taken(monkeypatch):
    assert flex_problem(GPU) is None
    assert transformer_engine_problem(GPU) is None
    assert flex_problem(replace(GPU, transformer_engine=None, cudnn=None, environment={})) is None
    fused = {"NVTE_UNFUSED_ATTN": "0", "NVTE_FUSED_ATTN": "1"}
    assert transformer_engine_problem(replace(GPU, compiler=None, environment=fused)) is None
    monkeypatch.setattr(Host, "here", lambda: GPU)
    for kind in ("auto", "portable", "flex", "transformer_engine"):
        check_kind(config(f"train.attention={kind}", "train.dtype=bfloat16"))


FLEX = {
    "no GPU": (dict(cuda=False), ("CUDA", "portable")),
    "old torch": (dict(maxima=False, torch="2.8.0"), ("2.8.0", "max_scores", "QK-Clip", ">= 2.9")),
    "no Triton": (dict(triton=False), ("Triton", "pip install triton")),
    "no compiler": (dict(compiler=None), ("C compiler", "neither gcc nor clang", "install gcc")),
    "no such CC": (dict(compiler=None, environment={"CC": "icc"}), ("C compiler", "CC=icc")),
}


@pytest.mark.parametrize(("change", "named"), FLEX.values(), ids=FLEX.keys())
def test_what_flex_lacks_is_one_line(change, named, monkeypatch):
    monkeypatch.setattr(Host, "here", lambda: replace(GPU, **change))
    with pytest.raises(ConfigError) as error:
        check_kind(config("train.attention=flex"))
    assert all(part in str(error.value) for part in ("train.attention=flex", *named))
    assert "\n" not in str(error.value)


TE = {
    "no GPU": (dict(cuda=False, transformer_engine=None), ("CUDA device",)),
    "missing": (dict(transformer_engine=None), (">= 2.17", "not installed", "pip install")),
    "old": (dict(transformer_engine="2.16.1"), (">= 2.17", "2.16.1", "pip install")),
    "no half": (
        dict(transformer_engine_torch=None),
        ("transformer-engine-torch", "not installed", "transformer-engine[pytorch]==2.20.2"),
    ),
    "other half": (dict(transformer_engine_torch="2.19.0"), ("2.20.2, and it is", "2.19.0")),
    "torch's own cuDNN": (dict(cudnn=92000), ("cuDNN >= 9.21", "9.20", "2.13.0")),
    "no cuDNN": (dict(cudnn=None), ("cuDNN >= 9.21", "none")),
    "unset": (dict(environment={}), ("NVTE_UNFUSED_ATTN=0", "not set")),
    "other": (dict(environment={"NVTE_UNFUSED_ATTN": "1"}), ("NVTE_UNFUSED_ATTN=1",)),
    "no fused": (
        dict(environment={"NVTE_UNFUSED_ATTN": "0", "NVTE_FUSED_ATTN": "0"}),
        ("NVTE_FUSED_ATTN=0", "unset it"),
    ),
}


@pytest.mark.parametrize(("change", "named"), TE.values(), ids=TE.keys())
def test_what_transformer_engine_lacks_is_one_line(change, named):
    problem = transformer_engine_problem(replace(GPU, **change))
    assert problem is not None
    assert all(part in problem for part in (*named, "set train.attention=portable"))
    assert "\n" not in problem


def test_nobody_is_told_to_install_transformer_engine_without_a_gpu():
    """Installing it on such a host would break Megatron-Core's import."""
    problem = transformer_engine_problem(replace(CPU, transformer_engine=None))
    assert problem is not None
    assert "pip" not in problem


def test_this_host_is_looked_at():
    here = Host.here()
    assert here.maxima  # holds for the torch version that the project pins
    assert here.torch.split("+")[0].count(".") == 2
    assert here.transformer_engine is None
    assert here.transformer_engine_torch is None


def test_the_compiler_is_the_one_that_triton_takes(monkeypatch, tmp_path):
    for name in ("cc", "clang", "mine"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for cc, found in ((None, "clang"), ("mine", "mine"), ("no such", None)):
        monkeypatch.delenv("CC", raising=False)
        if cc is not None:
            monkeypatch.setenv("CC", cc)
        assert Host.here().compiler == (found and str(tmp_path / found))


@pytest.mark.parametrize(
    ("files", "half"),
    [
        ("transformer_engine/__init__.py,,\n", None),
        ("transformer_engine_torch.cpython-312-x86_64-linux-gnu.so,,\n", "2.20.2+abc"),
    ],
)
def test_one_package_built_from_source_has_both_halves(files, half, monkeypatch, tmp_path):
    info = tmp_path / "transformer_engine-2.20.2+abc.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: transformer-engine\nVersion: 2.20.2+abc\n")
    (info / "RECORD").write_text(files)
    monkeypatch.syspath_prepend(tmp_path)
    here = Host.here()
    assert (here.transformer_engine, here.transformer_engine_torch) == ("2.20.2+abc", half)


def test_auto_is_left_to_the_processes_of_the_run(monkeypatch):
    monkeypatch.setattr(Host, "here", lambda: replace(GPU, maxima=False))
    asked = config("train.dtype=bfloat16")
    check_kind(asked, explicit=True)
    with pytest.raises(ConfigError, match="train.attention=auto .*max_scores"):
        check_kind(asked)


def test_a_run_is_refused_before_its_data_is_opened(monkeypatch):
    """The launcher and each process refuse the run."""
    from launch.local import start

    opened = []
    monkeypatch.setattr(Host, "here", lambda: CPU)
    monkeypatch.setattr("kimi_pretrain.reliability.preflight.open_data", opened.append)
    asked = config("train.attention=flex", "data.root=/nowhere")
    with pytest.raises(ConfigError, match="train.attention=flex needs a CUDA device"):
        start._start_several(None, asked, start.Machines(), "unused")  # type: ignore[arg-type]
    assert opened == []


def test_transformer_engine_on_a_host_without_cuda_is_named(tmp_path):
    """The package cannot be imported there, but Megatron-Core tries to import it."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Found empty `transformer-engine`')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import kimi_pretrain.engine"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(part in last for part in ("ImportError", "Transformer Engine", "pip uninstall"))


def test_nothing_here_loads_torch():
    code = "import sys, kimi_pretrain.attention.choice; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    assert choice.TE_MINIMUM in (ROOT / "pyproject.toml").read_text()
