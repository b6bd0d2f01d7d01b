"""Imports that `fork_server` does before it forks: every module of a training run, lazy ones too.

No module here may start a thread or be run as `python -m`.
"""

import pyarrow
import pyarrow.dataset  # noqa: F401
from torch.utils import tensorboard  # noqa: F401

from kimi_pretrain import train  # noqa: F401
from kimi_pretrain.engine import backbone  # noqa: F401
from kimi_pretrain.tools import evaluate  # noqa: F401
from kimi_pretrain.verify import dep, resume  # noqa: F401
from launch.cli import main  # noqa: F401
from launch.local import start  # noqa: F401
from moonvit3d import media  # noqa: F401
from tests.dist import worker  # noqa: F401

pyarrow.array([[1]]).value_lengths().to_numpy(zero_copy_only=False)  # imports pandas
