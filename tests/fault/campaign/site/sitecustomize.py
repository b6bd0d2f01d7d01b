"""Lets the campaign see where a process stands at the moment it is killed.

On the signal below a process writes the stack of its main thread to a file, in C and at once,
whatever it is doing. (Of all threads it must not be: they go on meanwhile, and a stack that changes
while it is read has crashed processes.) The campaign puts this folder first on PYTHONPATH; the
program under test knows nothing of it.
"""

import faulthandler
import os
import signal
from contextlib import suppress

if folder := os.environ.get("CAMPAIGN_STACKS"):
    with suppress(OSError):
        stacks = open(os.path.join(folder, f"{os.getpid()}.txt"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGRTMIN + 3, file=stacks, all_threads=False)
