"""Lets the campaign see the phase of a process at the moment it is killed.

On the signal below, a process writes the stack of its main thread to a file, immediately and in C.
It must not dump all threads: the other threads keep running, and reading a changing stack has
crashed processes. The campaign puts this folder first on PYTHONPATH; the program under test is
unaware of it.
"""

import faulthandler
import os
import signal
from contextlib import suppress

if folder := os.environ.get("CAMPAIGN_STACKS"):
    with suppress(OSError):
        stacks = open(os.path.join(folder, f"{os.getpid()}.txt"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGRTMIN + 3, file=stacks, all_threads=False)

# Two faults cannot be caused from outside without privileges. The target of a symbolic link
# controls each of them, because reading a link opens no file.

if clock := os.environ.get("CAMPAIGN_CLOCK"):
    import time

    def _shifted(real, unit):  # noqa: ANN001, ANN202
        return lambda: real() + int(os.readlink(clock)) * unit

    time.time, time.time_ns = _shifted(time.time, 1), _shifted(time.time_ns, 10**9)

if failing := os.environ.get("CAMPAIGN_EIO"):
    import errno
    import sys

    def _fail(event: str, arguments: tuple) -> None:
        if event != "open" or arguments[2] & os.O_ACCMODE != os.O_RDONLY:
            return
        if isinstance(arguments[0], str):
            with suppress(FileNotFoundError):
                if arguments[0].startswith(os.readlink(failing)):
                    raise OSError(errno.EIO, os.strerror(errno.EIO), arguments[0])

    sys.addaudithook(_fail)
