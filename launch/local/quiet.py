"""Keeps the libraries' standing remarks off the terminal, where they would bury the run's own.

Each is about something this project has decided: no Transformer Engine or Apex on CPU, the
GPTModel class of the pinned Megatron-Core, names that the pinned torch is going to replace.
"""

import logging
import warnings


def quiet_libraries() -> None:
    """Silence known warnings; call it before torch and Megatron-Core are imported."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
