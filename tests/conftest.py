"""Keeps every test process to one thread, so that several on two cores do not fight."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
