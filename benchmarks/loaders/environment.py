"""Environment of the loaders: a venv for the peers, the data on disk, and an S3 bucket."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3

from benchmarks.loaders import data
from benchmarks.loaders.job import PAIRS
from launch.local.s3_server import S3Server

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
PEERS = ("lit", "web", "mosaic", "energon")
PLACES = ("ours", "mds", "lit", "tar")
BUCKET = "bench"
# Energon's reader of object stores takes addresses only from a file. Keys come from that file or
# from the usual variables.
_MSC = """profiles:
  bench:
    storage_provider:
      type: s3
      options: {{base_path: {bucket}, region_name: us-east-1, endpoint_url: "{endpoint}"}}
"""


def make_peers(folder: Path) -> None:
    """Create a virtual environment with the peers (about 2 GB), unless it exists.

    torch is installed first and pinned; otherwise a peer would install another build, made for
    CUDA.
    """
    done = folder / ".installed"
    if done.exists():
        return
    print(f"installing the peers into {folder} (about 2 GB)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / ".gitignore").write_text("*\n")
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    pins = ["--constraint", str(HERE / "constraints.txt")]
    subprocess.run([*pip, "install", *pins, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "install", *pins, "-r", str(HERE / "requirements.txt")], check=True)
    # The PyPI build of torchvision is for CUDA and breaks the import of other packages (see
    # imports.py).
    subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)
    done.touch()


def make_data(root: Path, count: int, peers: Path | None) -> None:
    """Make our samples under `root`, and the peers' copies if their environment is given."""
    data.make(root / "ours", count)
    if peers is not None:
        command = [str(peers / "bin" / "python"), "-m", "benchmarks.loaders.convert", str(root)]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True)
class Bucket:
    """An S3 bucket that holds the data."""

    endpoint: str
    secrets: dict[str, str]

    def variables(self, endpoint: str) -> dict[str, str]:
        """Return the environment variables that a loader needs to read from `endpoint`."""
        handle, path = tempfile.mkstemp(suffix=".yaml")
        with os.fdopen(handle, "w") as file:
            file.write(_MSC.format(bucket=BUCKET, endpoint=endpoint))
        addresses = {"AWS_ENDPOINT_URL": endpoint, "S3_ENDPOINT_URL": endpoint, "MSC_CONFIG": path}
        return self.secrets | addresses

    def urls(self, endpoint: str) -> list[str]:
        """Return signed URLs of the tars."""
        client = self.client(endpoint)
        listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"ours/{PAIRS}/")["Contents"]
        return [
            client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": found["Key"]})
            for found in listed
            if found["Key"].endswith(".tar")
        ]

    def client(self, endpoint: str):
        return boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1",
            aws_access_key_id=self.secrets["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.secrets["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip


@contextmanager
def bucket(root: Path) -> Iterator[Bucket]:
    """Run an S3 server on the loopback interface and yield a bucket with all data of `root`."""
    with S3Server(root / "server", BUCKET) as server:
        filled = Bucket(server.endpoint, server.environment())
        client = filled.client(server.endpoint)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        there = {found["Key"] for page in pages for found in page.get("Contents", ())}
        for place in PLACES:
            for path in sorted((root / place).rglob("*")):
                key = path.relative_to(root).as_posix()
                if path.is_file() and key not in there:
                    client.upload_file(str(path), BUCKET, key)
        yield filled
