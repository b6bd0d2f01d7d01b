"""Lack of memory is never reported as a defect of a file, whatever error the decoder raises."""

import json
import os
import subprocess
import sys

import pytest

from moonvit3d.media import MediaError, is_turned, probe, read_image, read_video, verify

# Decode intact files with less and less memory, under a real limit of the address space.
STARVED = """
import io, json, resource, sys
import numpy as np
from moonvit3d import media
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO
from tests.unit.data_pipeline.media import encoded, mp4, noise

pixels = np.kron(noise(75, 100), np.ones((12, 12, 1), np.uint8))
files = {
    "png": encoded(pixels), "jpg": encoded(pixels, "JPEG"), "webp": encoded(pixels, "WEBP"),
    "progressive": encoded(pixels, "JPEG", progressive=True),
    "gif": encoded(pixels[:, :, 0], "GIF"),
    "mp4": mp4(3, height=1080, width=1440),
}
free = resource.getrlimit(resource.RLIMIT_AS)
outcomes = {}
for name, data in files.items():
    kind = KIND_VIDEO if name == "mp4" else KIND_IMAGE
    media.verify(data, kind)  # all that is loaded once is there
    found = outcomes[name] = {}
    for step in range(0, 48, 2):
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + step * (1 << 20), free[1]))
        try:
            media.verify(data, kind)
            outcome = "good"
        except MemoryError:
            outcome = "no memory"
        except media.MediaError as error:
            outcome = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, free)
        found[outcome] = found.get(outcome, 0) + 1
print(json.dumps(outcomes))
"""


def test_a_good_file_is_not_called_bad_for_want_of_memory():
    command = [sys.executable, "-c", STARVED]
    # Freed memory must return to the system immediately, or the limit would never be reached.
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **given_back}
    )
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name, found in outcomes.items():
        assert set(found) <= {"good", "no memory"}, name
        assert found["no memory"] > 1, name
        assert found["good"] > 1, name


@pytest.mark.parametrize("kind", [0, 1])
def test_a_path_instead_of_bytes_is_told_in_one_line(kind):
    for read in (lambda p: probe(p, kind), lambda p: verify(p, kind)):
        with pytest.raises(MediaError, match=r"'a/b.png' is no bytes: give the content"):
            read("a/b.png")
    for read in (read_image, read_video, is_turned):
        with pytest.raises(MediaError, match=r"'a/b.png' is no bytes: give the content"):
            read("a/b.png")
