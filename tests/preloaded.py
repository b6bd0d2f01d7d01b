"""What `fork_server` imports before it forks: all that a training imports, inside functions too.

Nothing here is ever run as `python -m`, and nothing here starts a thread.
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
