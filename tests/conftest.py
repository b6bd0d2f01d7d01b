"""Keeps every test process to one thread, so that several on two cores do not fight."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; the tests
# that interrupt their own processes would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
