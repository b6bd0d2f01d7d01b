"""Measures page times and server memory of the data platform over 10 M samples.

Serves the synthetic sources of `bench_facts` with the regular command. One signed-in user requests
the pages one after the other in random order: the grid with each filter and from positions deep in
the sources, key searches, counts, samples by key. One more source, a tenth as large as all others
together, has bytes: every sample is the same document and photograph. Pages of single samples, a
different one each time, therefore read a part of the index and the shard, and decode. Pages of
steps are left out because planning dominates their time.

Targets on two idle cores: p95 <= 250 ms, the server's memory <= 512 MB. Writes a result file and a
page.

    python benchmarks/bench_serve.py
    python benchmarks/bench_serve.py --quick      # 60,000 samples
"""

import argparse
import dataclasses
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_facts import (  # noqa: E402
    made_sources,
    part_of,
    target,
    timed,
    write_source,
)
from benchmarks.result import (  # noqa: E402
    RESULTS,
    cores,
    named,
    processor,
    table,
    verdicts,
    versions,
    write,
)
from data_pipeline.index.columns import ShardInfo, SourceIndex  # noqa: E402
from data_pipeline.index.manifest import read_manifest  # noqa: E402
from data_pipeline.store.open import FolderStore  # noqa: E402
from launch.pages.pictures import encoded  # noqa: E402

PAGE_S, MEMORY_BYTES = 0.25, 512e6
ROUNDS = 20
PHOTOS = "photos"
SIDES = 1600, 1200


def photograph() -> bytes:
    """Return a JPEG of about two megapixels with as much detail as a camera picture."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[: SIDES[1], : SIDES[0]] / 100
    waves = np.stack([np.sin(x * k + y * y / (k + 1)) for k in range(3)], axis=2)
    noise = rng.normal(0, 6, waves.shape)
    data, kind = encoded((127 + 90 * waves + noise).clip(0, 255).astype(np.uint8), max(SIDES))
    assert kind == "image/jpeg"
    return data


def write_photos(root: Path, samples: int) -> None:
    """Write the source whose samples all use the same bytes, at the start of every shard."""
    picture = photograph()
    document = json.dumps(
        {
            "meta": {},
            "segments": [
                {"kind": "text", "text": "Look: ", "loss": False},
                {"kind": "image", "file": "0.jpg"},
                {"kind": "text", "text": "A photograph of waves. " * 20, "loss": True},
            ],
        }
    ).encode()

    def make(name: str, first: int, count: int, shards: tuple[ShardInfo, ...]) -> SourceIndex:
        part = part_of("captions", first, count, shards)  # captions have one picture each

        def same(column: str, value: int) -> NDArray[Any]:
            return np.full_like(getattr(part, column), value)

        given = {
            "json_offset": 0, "json_length": len(document), "json_crc": crc32(document),
            "item_offset": len(document), "item_length": len(picture),
            "item_crc": crc32(picture), "item_width": SIDES[0], "item_height": SIDES[1],
        }  # fmt: skip
        columns: dict[str, Any] = {column: same(column, value) for column, value in given.items()}
        keys = [f"{name}-{number:09d}" for number in range(first, first + count)]
        return dataclasses.replace(part, name=name, key=keys, **columns)

    write_source(root, PHOTOS, samples, make)
    keys = [shard["key"] for shard in read_manifest(FolderStore(root), PHOTOS)["shards"]]
    (root / keys[0]).write_bytes(document + picture)
    for key in keys[1:]:
        os.link(root / keys[0], root / key)


def addresses(sources: dict[str, int], category: str) -> dict[str, list[str]]:
    """Return the addresses of each kind of page, one for each round."""
    asked = {name: [address] * ROUNDS for name, address in fixed(sources, category).items()}
    some, rng = (random.Random(seed) for seed in (1, 2))
    for name, address in {
        "a sample": f"/sources/{PHOTOS}/samples/{{}}",
        "its words in the grid": f"/words/{PHOTOS}/{{}}",
        "its small picture": f"/thumbnails/{PHOTOS}/{{}}",
        "its picture": f"/media/{PHOTOS}/{{}}/0.jpg",
    }.items():
        numbers = [some.randrange(sources[PHOTOS]) for _ in range(ROUNDS)]
        asked[name] = [address.format(number) for number in numbers]
    near = rng.randrange(sources[PHOTOS] - ROUNDS)
    asked["the next sample"] = [f"/sources/{PHOTOS}/samples/{near + n}" for n in range(ROUNDS)]
    return asked


def fixed(sources: dict[str, int], category: str) -> dict[str, str]:
    """Return the address of each page that reads only facts."""
    large = max(sources, key=lambda name: sources[name])
    deep = f"{large}:{sources[large] * 2 // 3}"
    return {
        "sources": "/",
        "one source": f"/sources/{large}",
        "samples": "/samples",
        "samples, deep": f"/samples?source={large}&after={deep}",
        "samples of a category": f"/samples?category={category}&tokens_from=100",
        "with boxes": "/samples?source=grounding&holds=boxes",
        "long ones": "/samples?tokens_from=3000&tokens_to=4000",
        "large ones": "/samples?bytes_from=1500000",
        "many items": "/samples?source=interleaved&items_from=6",
        "large pictures": "/samples?source=captions&side_from=2000",
        "none is like that": "/samples?tokens_from=100000000",
        "a key": "/samples?key=77777",
        "a key, deep": f"/samples?source={large}&key=7777&after={deep}",
        "no such key": "/samples?key=nothing-like-it",
        "longest of a source": "/samples?source=ocr&order=longest",
        "how many": "/samples/count?tokens_from=3000",
        "how many of a key": "/samples/count?source=ocr&key=77",
        "by its key": f"/sources/ocr/keys/ocr-{sources['ocr'] // 3:09d}",
        "rejected": f"/sources/{large}/rejected",
        "deletions and holds": "/governance",
    }


@contextmanager
def served(root: Path, facts: Path) -> Iterator[tuple[int, str]]:
    """Run the command; yield its process id and the address that it prints."""
    env = os.environ | {"KIMI_PRETRAIN_FACTS": str(facts)}
    env.pop("KIMI_PRETRAIN_CATALOG", None)
    words = [sys.executable, "-m", "launch.cli", "data", "serve", str(root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("open "):
                raise SystemExit("the server did not start")
            yield process.pid, line.split()[1]
        finally:
            process.terminate()


class Person:
    """A signed-in user of the page."""

    def __init__(self, address: str) -> None:
        split = urlsplit(address)
        self._where = split.netloc
        self._connection = http.client.HTTPConnection(self._where, timeout=600)
        self._cookie = ""
        kind = "application/x-www-form-urlencoded"
        ours = {"Origin": f"{split.scheme}://{split.netloc}", "Content-Type": kind}
        self._connection.request("POST", split.path, split.fragment, ours)  # token=...
        status, _, headers = self._answer()
        assert status == 303
        self._cookie = headers["set-cookie"].partition(";")[0]

    def get(self, path: str) -> float:
        """Return the seconds that an answer takes."""
        seconds, (status, body, _) = timed(lambda: self._ask(path))
        if status not in (200, 303):
            raise SystemExit(f"{path}: {status}: {body[-300:]!r}")
        return seconds

    def _ask(self, path: str) -> tuple[int, bytes, http.client.HTTPMessage]:
        self._connection.request("GET", path, headers={"Cookie": self._cookie})
        return self._answer()

    def _answer(self) -> tuple[int, bytes, http.client.HTTPMessage]:
        answer = self._connection.getresponse()
        return answer.status, answer.read(), answer.headers


def most_memory(pid: int) -> int:
    """Return the peak resident memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


def measure(samples: int, work: Path) -> dict[str, Any]:
    root, facts = work / "corpus", work / "facts"
    sources = made_sources(samples)
    for name, count in sources.items():
        if not (root / name / "manifest.json").exists():
            write_source(root, name, count)
    sources[PHOTOS] = samples // 10
    if not (root / PHOTOS / "manifest.json").exists():
        write_photos(root, sources[PHOTOS])
    begin = time.perf_counter()
    with served(root, facts):
        first_s = time.perf_counter() - begin
    begin = time.perf_counter()
    with served(root, facts) as (pid, address):
        start_s = time.perf_counter() - begin
        category = read_manifest(FolderStore(root), "grounding")["category"]
        person, asked = Person(address), addresses(sources, category)
        order = [(name, address) for name, every in asked.items() for address in every]
        random.Random(0).shuffle(order)
        taken: dict[str, list[float]] = {name: [] for name in asked}
        for name, address in order:
            taken[name].append(person.get(address))
        memory = most_memory(pid)
        statistics_s = person.get("/statistics/counted")
        again_s = person.get("/statistics/counted")
        after = most_memory(pid)
    every = np.concatenate([np.array(one) for one in taken.values()])
    p50, p95 = (float(np.quantile(every, share)) for share in (0.5, 0.95))
    whole = samples >= 10_000_000
    return {
        "samples": sum(sources.values()),
        "first_start_s": first_s,
        "start_s": start_s,
        "pages": {
            name: {"p50": float(np.median(one)), "most": max(one)} for name, one in taken.items()
        },
        "p50_s": p50,
        "p95_s": p95,
        "memory_bytes": memory,
        "statistics_s": statistics_s,
        "statistics_again_s": again_s,
        "memory_after_bytes": after,
        "targets": [
            target("p95 of a page, s", p95, PAGE_S, p95 <= PAGE_S if whole else None),
            target(
                "memory of the server, MB",
                max(memory, after) / 1e6,
                MEMORY_BYTES / 1e6,
                max(memory, after) <= MEMORY_BYTES if whole else None,
            ),
        ],
    }


def page(found: dict[str, Any]) -> str:
    rows = [
        [name, f"{1000 * one['p50']:.0f}", f"{1000 * one['most']:.0f}"]
        for name, one in found["pages"].items()
    ]
    lines = [
        "# The page of the data platform at size",
        "",
        f"{found['samples']:,} samples, made up; {found['machine']}, {found['processor']}; load "
        f"when it began {found['load']:.1f}; {named(found['versions'])}; {found['date']}. Each "
        f"page {ROUNDS} times, one after the other in an order of chance.",
        "",
        *verdicts(
            found["targets"], {"what": "", "found": "found", "wanted": "wanted", "met": "met"}
        ),
        f"Half of the pages within {1000 * found['p50_s']:.0f} ms. Start with all facts to be "
        f"written {found['first_start_s']:.0f} s, later ones {found['start_s']:.1f} s. Memory "
        f"{found['memory_bytes'] / 1e6:,.0f} MB; after all statistics, which another process "
        f"counts in {found['statistics_s']:.1f} s (again "
        f"{1000 * found['statistics_again_s']:.0f} ms), "
        f"{found['memory_after_bytes'] / 1e6:,.0f} MB.",
        "",
        *table(["page", "p50, ms", "most, ms"], rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000_000, help="in all sources")
    parser.add_argument("--quick", action="store_true", help="60,000 samples")
    parser.add_argument("--work", type=Path, help="folder for 2 GB, reused; else a temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve_cpu.json")
    args = parser.parse_args()
    head = {
        "date": date.today().isoformat(),
        "versions": versions("duckdb", "starlette", "pyarrow"),
        "machine": cores(),
        "processor": processor(),
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(60_000 if args.quick else args.samples, args.work or Path(temporary))
    result = head | found
    write(result, args.out, page(result))


if __name__ == "__main__":
    main()
