"""Selects a run's attention (`train.attention`) and checks that this process can run it.

Torch is only imported if the setting needs a GPU or may need one (`auto`).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Literal

from packaging.version import Version

from kimi_pretrain.config import Config, ConfigError

Kind = Literal["portable", "flex", "transformer_engine"]

TE_MINIMUM = "2.17"
"""First version of Transformer Engine that checks the requirements of its kernels for maxima."""
CUDNN_MINIMUM = 92100
"""cuDNN 9.21, the first version whose kernels return maxima in addition to the training output."""
INSTEAD = "set train.attention=portable"


def kind_of(config: Config) -> Kind:
    """Return the attention of this process; `auto` means flex on a GPU in bfloat16."""
    train = config.train
    if train.attention != "auto":
        return train.attention
    # FlexAttention's kernels have no float64, and their float32 results are untested on a GPU.
    return "flex" if train.dtype == "bfloat16" and Host.here().cuda else "portable"


def check_kind(config: Config, *, explicit: bool = False) -> None:
    """Raise if the run's attention cannot run here, before anything is opened.

    Args:
        config: of the run.
        explicit: do not check `auto`, because the run's processes may be on another machine.

    Raises:
        ConfigError: names the missing requirement and the remedy.
    """
    if explicit and config.train.attention == "auto":
        return
    kind = kind_of(config)
    if kind == "portable":
        return
    host = Host.here()
    problem = flex_problem(host) if kind == "flex" else transformer_engine_problem(host)
    if problem is not None:
        raise ConfigError(f"train.attention={config.train.attention} {problem}")


@dataclass(frozen=True)
class Host:
    """Hardware and software that this process can use.

    Attributes:
        cuda: True if there is a CUDA device.
        torch: version of torch.
        maxima: True if torch's FlexAttention can return the largest logits.
        triton: True if Triton is installed, which compiles the kernels.
        compiler: the C compiler that Triton uses for its launchers, or None.
        transformer_engine: version, or None.
        transformer_engine_torch: version of the separate package with its torch part, or None.
        cudnn: version as torch reports it, 92100 for 9.21.0; None if there is none.
        environment: environment variables of the process.
    """

    cuda: bool
    torch: str
    maxima: bool
    triton: bool
    compiler: str | None
    transformer_engine: str | None
    transformer_engine_torch: str | None
    cudnn: int | None
    environment: Mapping[str, str]

    @classmethod
    def here(cls) -> "Host":
        """Inspect this process and return the result."""
        import torch

        try:
            request = import_module("torch.nn.attention.flex_attention").AuxRequest
        except (ImportError, AttributeError):
            request = None
        return cls(
            cuda=torch.cuda.is_available(),
            torch=torch.__version__,
            maxima="max_scores" in getattr(request, "_fields", ()),
            triton=_version("triton") is not None,
            compiler=_compiler(),
            transformer_engine=_version("transformer-engine"),
            transformer_engine_torch=_transformer_engine_torch(),
            cudnn=torch.backends.cudnn.version(),
            environment=os.environ,
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """Return the compiler that Triton's runtime/build.py would use: only CC if it is set."""
    asked = os.environ.get("CC")
    names = ("gcc", "clang") if asked is None else (asked,)
    return next(filter(None, map(shutil.which, names)), None)


def _transformer_engine_torch() -> str | None:
    if (found := _version("transformer-engine-torch")) is not None:
        return found
    # A build from the repository, as in NVIDIA's containers, contains the extension itself.
    try:
        whole = distribution("transformer-engine")
    except PackageNotFoundError:
        return None
    built = any(file.name.startswith("transformer_engine_torch.") for file in whole.files or ())
    return whole.version if built else None


def flex_problem(host: Host) -> str | None:
    """Return the reason why FlexAttention cannot run, or None."""
    if not host.cuda:
        return f"needs a CUDA device, and there is none; {INSTEAD}"
    if not host.maxima:
        return (
            f"needs a torch whose FlexAttention gives the largest logits (AuxRequest.max_scores), "
            f"for QK-Clip; torch {host.torch} has none: install torch >= 2.9 "
            f"(tested with 2.13), or {INSTEAD}"
        )
    if not host.triton:
        return f"needs Triton, which compiles its kernels: pip install triton, or {INSTEAD}"
    if host.compiler is None:
        asked = host.environment.get("CC")
        return (
            "needs a C compiler, for Triton's launchers, and there is "
            f"{'neither gcc nor clang' if asked is None else f'no CC={asked}'}: install gcc, or "
            f"name one in CC, or {INSTEAD}"
        )
    return None


def transformer_engine_problem(host: Host) -> str | None:
    """Return the reason why Transformer Engine's attention cannot run, or None."""
    found = host.transformer_engine
    if not host.cuda:
        # Do not say how to install it: without CUDA it breaks Megatron-Core's import.
        return f"needs a CUDA device, and there is none; {INSTEAD}"
    if found is None or Version(found) < Version(TE_MINIMUM):
        return (
            f"needs Transformer Engine >= {TE_MINIMUM}, which is "
            f"{'not installed' if found is None else f'here in version {found}'}: "
            f"pip install --no-build-isolation 'transformer-engine[pytorch]>={TE_MINIMUM}', or "
            f"{INSTEAD}"
        )
    half = host.transformer_engine_torch
    if half is None or Version(half) != Version(found):
        return (
            f"needs transformer-engine-torch in the version of transformer-engine, {found}, and it "
            f"is {'not installed' if half is None else f'here in version {half}'}: "
            f"pip install --no-build-isolation 'transformer-engine[pytorch]=={found}', or {INSTEAD}"
        )
    if (host.cudnn or 0) < CUDNN_MINIMUM:
        return (
            f"needs cuDNN >= {_cudnn(CUDNN_MINIMUM)}, for the largest logits; torch {host.torch} "
            f"has {_cudnn(host.cudnn) if host.cudnn else 'none'}: install a newer "
            f"nvidia-cudnn package, or {INSTEAD}"
        )
    fused = host.environment.get("NVTE_FUSED_ATTN", "1")
    if fused != "1":
        return (
            f"needs cuDNN's fused kernels, which NVTE_FUSED_ATTN={fused} in the environment "
            f"switches off: unset it, or {INSTEAD}"
        )
    unfused = host.environment.get("NVTE_UNFUSED_ATTN")
    if unfused != "0":
        return (
            "needs NVTE_UNFUSED_ATTN=0 in the environment, which is "
            f"{'not set' if unfused is None else f'NVTE_UNFUSED_ATTN={unfused}'}: otherwise rows "
            f"that no fused kernel takes would silently hold whole logit matrices; set it, or "
            f"{INSTEAD}"
        )
    return None


def _cudnn(number: int) -> str:
    major, rest = divmod(number, 10000)
    return f"{major}.{rest // 100}"
