"""Silences known warnings of libraries, which would obscure the run's own output.

Each warning concerns a choice of this project: no Transformer Engine or Apex on CPU, the GPTModel
class of the pinned Megatron-Core, names that the pinned torch is going to replace.
"""

import logging
import warnings


def quiet_libraries() -> None:
    """Silence the known warnings; call this before torch and Megatron-Core are imported."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
