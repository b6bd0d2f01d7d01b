"""Hostile parties: manifests that claim foreign objects, clients that hold connections."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from http.client import HTTPResponse
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, Request, build_opener

import psutil
from PIL import Image
from typer.testing import CliRunner

from data_pipeline.catalog.engine import Catalog
from data_pipeline.catalog.register import look, register
from data_pipeline.catalog.states import promote
from data_pipeline.index.manifest import (
    index_key,
    index_of,
    manifest_key,
    read_manifest,
    read_table,
)
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, ImageSegment
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer
from launch.cli.main import app
from tests import ROOT
from tests.fault.campaign.compare import difference
from tests.fault.campaign.processes import PATIENCE_S, Training, wait_until
from tests.fault.campaign.runs import Campaign, Result

_EVIL, _NEW = "evil", "redacted-0123456789ab"
_HALVES = (
    b"",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ",
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded"
    b"\r\nContent-Length: 1000\r\n\r\ntoken=",
)
_HELD, _PICTURES, _SIDE = 300, 6, 6_300
_MOST_MEMORY = 1_500 << 20


def hostile_manifests(campaign: Campaign) -> None:
    """Run all removing and copying commands on hostile manifests with valid hashes during a run."""
    begun, run_dir, root = (
        time.monotonic(),
        campaign.folder / "hostile",
        campaign.folder / "claimed",
    )
    straight = campaign.straight()
    shutil.copytree(campaign.data_root, root)
    store = FolderStore(root)
    reindex(store, "words", _EVIL, Tokenizer.from_store(store, "tokenizer.tiktoken"))
    _registered(campaign.folder / "claimed.sqlite", store, "words", "pictures")
    result = Result("manifests with right hashes that claim objects of others", "", "")
    refused = 0
    with Training(run_dir, campaign.settings(f"data.root={root}")) as training:
        training.wait_for_step(2)
        with training.held():
            result.moment = f"step {training.steps + 1}"
            good = store.get(manifest_key(_EVIL))
            for claim, change in _CLAIMS.items():
                store.put(manifest_key(_EVIL), good)
                change(store)
                refused += _refused(store, campaign.folder, claim, result)
            store.put(manifest_key(_EVIL), good)
            _collect_shards_of_others(store, campaign.folder, result)
        code = training.wait()
        result.wrong += [f"left running: {told}" for told in training.left_over()]
        result.wrong += [training.output[-800:]] if code else []
    result.happened = (
        f"exit {code}; {refused} commands refused {len(_CLAIMS)} manifests; "
        "a collection removed the files of the hostile source alone"
    )
    found = difference(run_dir, straight)
    result.equal, result.wrong = found is None, result.wrong + ([found] if found else [])
    campaign.add(result, begun)


def held_connections(campaign: Campaign) -> None:
    """Load the web page of a training run with partial requests and large pictures."""
    begun, run_dir, root = time.monotonic(), campaign.folder / "visited", campaign.folder / "served"
    straight = campaign.straight()
    shutil.copytree(campaign.data_root, root)
    store = FolderStore(root)
    tokenizer = Tokenizer.from_store(store, "tokenizer.tiktoken")
    ingest([_large(number) for number in range(_PICTURES)], store, "large", tokenizer)
    _registered(campaign.folder / "served.sqlite", store, "large")
    result = Result(
        f"{_HELD} half-sent requests and {_PICTURES} pictures of 40 Mpx at `data serve`", "", ""
    )
    settings = campaign.settings(f"data.root={root}")
    with Training(run_dir, settings) as training, ExitStack() as held:
        training.wait_for_step(2)
        result.moment = f"step {training.steps + 1}"
        with training.held():
            serving = _served(root, run_dir, campaign.folder / "served.out")
            server, address = held.enter_context(serving)
            port = int(address.split(":")[2].split("/")[0])
            for number in range(_HELD):
                client = socket.create_connection(("127.0.0.1", port), timeout=60)
                held.enter_context(client).sendall(_HALVES[number % len(_HALVES)])
        asked = time.monotonic()
        person = _signed_in(address)
        page = person.open(f"http://127.0.0.1:{port}/sources/large", timeout=PATIENCE_S)
        answered = time.monotonic() - asked
        paths = [f"http://127.0.0.1:{port}/thumbnails/large/{n}" for n in range(_PICTURES)]
        with ThreadPoolExecutor(_PICTURES) as threads:
            shown = list(threads.map(lambda path: _patient(person, path), paths))
        statuses = {page.status, *(one.status for one in shown)}
        result.wrong += [] if statuses == {200} else [f"answers {sorted(statuses)}"]
        most = sum(map(_peak, (server, *server.children(recursive=True))))
        if most > _MOST_MEMORY:
            result.wrong.append(f"the server took {most >> 20} MiB, more than {_MOST_MEMORY >> 20}")
        code = training.wait()
        result.wrong += [f"left running: {told}" for told in training.left_over()]
        result.wrong += [training.output[-800:]] if code else []
    result.happened = (
        f"exit {code}; another client's page came in {answered:.1f} s; the server took "
        f"{most >> 20} MiB at most"
    )
    found = difference(run_dir, straight)
    result.equal, result.wrong = found is None, result.wrong + ([found] if found else [])
    campaign.add(result, begun)


def _refused(store: FolderStore, folder: Path, claim: str, result: Result) -> int:
    """Run all commands on a root; return how many refused it and changed nothing."""
    before, target = _objects(store), folder / "target"
    commands = (
        ("redact", store.uri, "--source", _EVIL, "--key", "w0000", "--yes"),
        ("sync", store.uri, str(target)),
        ("collect", store.uri, "--plan", str(folder / "claimed.json")),
        ("verify", store.uri),
    )
    refused = 0
    for command in commands:
        done = _data(folder, *command)
        if done.exit_code not in (1, 2) or _EVIL not in done.output:
            result.wrong.append(f"{claim}: {command[0]} ends with {done.exit_code}: {done.output}")
        elif _objects(store) != before or target.exists():
            result.wrong.append(f"{claim}: {command[0]} changed objects")
        else:
            refused += 1
    return refused


def _collect_shards_of_others(store: FolderStore, folder: Path, result: Result) -> None:
    """Archive and collect a well-formed source whose shards belong to the run."""
    pictures = read_manifest(store, "pictures")["shards"]
    _put(store, shards=pictures[: len(read_manifest(store, _EVIL)["shards"])])
    _registered(folder / "claimed.sqlite", store, _EVIL)
    catalog = Catalog(str(folder / "claimed.sqlite"))
    promote(catalog, f"{_EVIL}@1", "archived")
    catalog.close()
    before, plan = _objects(store), str(folder / "collected.json")
    days = ("--grace-days", "0", "--keep-archived-days", "0")
    for command in (("--plan", plan, *days), ("--apply", plan)):
        done = _data(folder, "collect", store.uri, *command)
        if done.exit_code:
            result.wrong.append(f"collect {command[0]} ends with {done.exit_code}: {done.output}")
    left = _objects(store)
    gone = {key for key in before if key not in left}
    if not gone or not all(key.startswith(f"{_EVIL}/") for key in gone):
        result.wrong.append(f"collected: {sorted(gone)}")


def _registered(file: Path, store: FolderStore, *names: str) -> None:
    """Register sources in a catalogue, which the first call creates."""
    catalog = Catalog(str(file))
    for name in names:
        register(catalog, look(store, None, name))
    catalog.close()


def _data(folder: Path, *arguments: str):
    """Run `kimi-pretrain data ARGUMENTS` with the catalogue of the case."""
    environment = {"KIMI_PRETRAIN_CATALOG": str(folder / "claimed.sqlite")}
    return CliRunner().invoke(app, ["data", *arguments], env=environment)


def _objects(store: FolderStore) -> dict[str, str]:
    return {key: sha256(store.get(key)).hexdigest() for key in store.list()}


def _put(store: FolderStore, /, **changes: Any) -> None:
    """Change the manifest as an expert attacker would, with a correct content hash."""
    manifest = read_manifest(store, _EVIL) | changes
    try:
        index = index_of(
            read_table(store.get(index_key(_EVIL))), manifest, manifest["index_sha256"]
        )
        manifest["content_hash"] = index.content_hash
    except (KeyError, TypeError, ValueError):
        pass  # such a manifest has no content hash
    store.put(manifest_key(_EVIL), json.dumps(manifest).encode())


def _shard(store: FolderStore, key: str) -> dict[str, object]:
    data = store.get(key)
    return {"key": key, "size": len(data), "sha256": sha256(data).hexdigest(), "samples": 1}


def _redacted(store: FolderStore, *pairs: tuple[str, str]) -> None:
    """Declare objects replaced, as if a redaction had left them for removal."""
    replaced = [
        {**{k: v for k, v in _shard(store, key).items() if k != "samples"}, "by": by}
        for key, by in pairs
    ]
    made_as = read_manifest(store, _EVIL)["content_hash"]
    _put(store, redacted={"made_as": made_as, "samples": [0], "replaced": replaced})


def _circle(store: FolderStore) -> None:
    first, second = (f"words/000000.redacted-{n:012d}.tar" for n in (1, 2))
    about = {"size": 1, "sha256": f"{1:012d}{0:052d}"}
    replaced = [{"key": a, "by": b, **about} for a, b in ((first, second), (second, first))]
    _put(store, redacted={"made_as": "x", "samples": [], "replaced": replaced})


def _nested(store: FolderStore) -> None:
    text, nested = store.get(manifest_key(_EVIL)).decode(), "[" * 100_000 + "]" * 100_000
    store.put(manifest_key(_EVIL), text.replace('"samples"', f'"x": {nested}, "samples"').encode())


_CLAIMS: dict[str, Callable[[FolderStore], None]] = {
    "an index as a shard": lambda store: _put(
        store, shards=[_shard(store, "pictures/index.parquet")]
    ),
    "a tokenizer as a shard": lambda store: _put(
        store, shards=[_shard(store, "tokenizer.tiktoken")]
    ),
    "a replaced index": lambda store: _redacted(
        store, ("pictures/index.parquet", f"pictures/000000.{_NEW}.tar")
    ),
    "a circle of replacements": _circle,
    "a document nested deeply": _nested,
}


def _large(number: int) -> CrudeSample:
    """Return a picture of nearly 40 megapixels in a few kilobytes."""
    out = io.BytesIO()
    Image.new("1", (_SIDE, _SIDE), number % 2).save(out, "PNG")
    return CrudeSample(f"large-{number:02d}", [ImageSegment(out.getvalue(), "png")])


@contextmanager
def _served(root: Path, run_dir: Path, file: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run `kimi-pretrain data serve`; yield the process and the address it prints."""
    command = [
        sys.executable, "-P", "-m", "launch.cli", "data", "serve", str(root), "--source", "all",
        "--runs", str(run_dir), "--facts", str(file.with_suffix(".facts")),
    ]  # fmt: skip
    variables = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
        "KIMI_PRETRAIN_CATALOG": str(file.with_suffix(".sqlite")),
    }  # fmt: skip
    with file.open("w") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    try:
        found = wait_until(
            lambda: re.search(r"open (http\S+)", file.read_text()) or process.poll() is not None,
            "the server",
        )
        assert isinstance(found, re.Match), file.read_text()
        yield psutil.Process(process.pid), found[1]
    finally:
        process.terminate()
        process.wait(60)


def _signed_in(address: str) -> OpenerDirector:
    """Return a client with a session, as the login page creates it from the printed address."""
    place, _, token = address.partition("/login#token=")
    person = build_opener(HTTPCookieProcessor(CookieJar()))
    form = urlencode({"token": token}).encode()
    person.open(Request(f"{place}/login", form, {"Origin": place}), timeout=PATIENCE_S)
    return person


def _patient(person: OpenerDirector, path: str) -> HTTPResponse:
    """Retry while the server asks for it, because it decodes only a few pictures at a time."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return person.open(path, timeout=PATIENCE_S)
        except HTTPError as error:
            if error.code != 503 or time.monotonic() > end:
                raise
            time.sleep(float(error.headers["Retry-After"]))


def _peak(process: psutil.Process) -> int:
    """Return the peak memory of a process in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
