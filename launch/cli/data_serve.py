"""Commands `kimi-pretrain data serve` and `data token`: the web page and its access tokens."""

import ipaddress
import os
import pwd
import socket
import ssl
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.cli.data_facts import FolderOption, facts_folder
from launch.cli.data_govern import configured_catalog
from launch.cli.data_inspect import SourceOption, UriArgument
from launch.cli.options import EndpointOption
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_pipeline.catalog.engine import Catalog
    from data_pipeline.config import DataConfig
    from data_pipeline.store.open import Store
    from launch.web.auth import Doorkeeper
    from launch.web.fresh import Fresh
    from launch.web.site import Site
    from launch.web.steps import Steps

TokensOption = Annotated[
    Path | None, typer.Option(help="File of tokens, as `data token` writes it.")
]
RoleOption = Annotated[str, typer.Option(help="viewer, curator or admin.")]
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def serve(
    uri: UriArgument,
    source: SourceOption = None,
    config: Annotated[
        str | None,
        typer.Option(help="Show steps of a run with this config, on the sources at URI."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Or those of this run, as it had them: its folder.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Folders of runs whose quarantine is shown; repeatable."),
    ] = None,
    where: Annotated[
        str | None, typer.Option("--catalog", help="Of sources; else KIMI_PRETRAIN_CATALOG.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Any but the loopback needs --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name that browsers know this machine by; repeatable."),
    ] = None,
    tokens: TokensOption = None,
    role: RoleOption = "viewer",
    certificate: Annotated[Path | None, typer.Option(help="For https: PEM file.")] = None,
    key: Annotated[Path | None, typer.Option(help="For https: PEM file of its key.")] = None,
    folder: FolderOption = None,
    endpoint: EndpointOption = None,
) -> None:
    """Show sources in a browser: samples, rows as the model gets them, statistics.

    By default the server listens only on this machine and prints an address with a
    one-time token. With a catalogue it also shows versions, their lineage, replicas
    and runs, and the audit log. It writes missing facts first, once for each content
    (`data facts`). It needs no network. --role sets the role of the printed address.

    \b
    kimi-pretrain data serve /data/corpus --config my.yaml
    kimi-pretrain data serve s3://corpus --run /shared/runs/mine --role curator
    kimi-pretrain data serve s3://corpus --host 0.0.0.0 --port 8443 \\
        --allow-host data.example.com --tokens tokens.jsonl \\
        --certificate host.pem --key host.key
    """
    with one_line_errors():
        _needs_packages()
        from data_pipeline.index.manifest import run_folders
        from launch.web.auth import Doorkeeper, Person, Role, digest, new_token, read_tokens

        mine = Role.named(role)
        outside = not _is_loopback(host)
        if outside and tokens is None:
            raise ValueError(
                f"--host {host}: whoever reaches this machine could ask; give --tokens FILE "
                "(`kimi-pretrain data token` makes one) and --allow-host NAME"
            )
        if outside and not allow_host:
            raise ValueError(f"--host {host}: give --allow-host NAME, as browsers call the machine")
        if (certificate is None) != (key is None):
            raise ValueError("--certificate and --key: give both, or neither")
        if certificate is not None and key is not None:
            _check_certificate(certificate, key)
        if config is not None and run is not None:
            raise ValueError("--config and --run: give one; a run has its own config")
        known = {} if tokens is None else read_tokens(tokens)
        hosts = frozenset(allow_host or ()) | (set() if outside else {*_LOOPBACK})
        with closing(_bound(host, port)) as listening, configured_catalog(where) as catalog:
            steps = _steps_of_run(run) if run is not None else None
            if config is not None:
                steps = _steps_of_config(config, uri, endpoint)
            number = listening.getsockname()[1]
            once = new_token()
            door = Doorkeeper(known, {} if outside else {digest(once): Person(_user(), mine)})
            about = (uri, tuple(source or ()), endpoint, folder)
            site = _site(about, steps, catalog, door, hosts, f"kimi-pretrain-{number}")
            site.secure = certificate is not None
            site.runs = tuple(run_folders([*(runs or ()), *([run] if run is not None else ())]))
            scheme = "https" if site.secure else "http"
            if outside:
                typer.echo(f"serving at {scheme}://{(allow_host or [host])[0]}:{number}/")
                if not site.secure:
                    typer.echo("tokens travel unencrypted: give --certificate and --key", err=True)
            else:
                name = f"[{host.strip('[]')}]" if ":" in host else host
                typer.echo(f"open {scheme}://{name}:{number}/login#token={once}")
            sys.stdout.flush()
            _run(site, listening, certificate, key)


def token(
    name: Annotated[str, typer.Argument(help="Of the person, for the audit.")],
    tokens: Annotated[Path, typer.Option(help="File to add it to; begun if it is not there.")],
    role: RoleOption = "viewer",
) -> None:
    """Create a token for a person and print it; the file stores only its SHA-256.

    To revoke a token, delete its line and restart the server.

    \b
    kimi-pretrain data token ann --role curator --tokens tokens.jsonl
    """
    with one_line_errors():
        _needs_packages()
        from launch.web.auth import Role, add_token

        typer.echo(add_token(tokens, name, Role.named(role)))


def _needs_packages() -> None:
    for name in ("duckdb", "sqlalchemy", "starlette", "jinja2", "uvicorn"):
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            from launch.local.versions import needs_extra

            raise needs_extra(error, "data serve") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_certificate(certificate: Path, key: Path) -> None:
    """Refuse an unusable certificate before anything is written."""
    told = None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is a subclass
        told = error.strerror or str(error)
    if told is not None:
        raise ValueError(f"--certificate {certificate} --key {key}: {told}")


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket, bound early so that a used port fails before any writing."""
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio turns off Nagle's delay (40 ms per answer) only for sockets with IPPROTO_TCP.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    told = None
    try:
        found.bind((address, port))
        found.listen(128)  # clients that connect before the server runs wait
    except OSError as error:
        found.close()
        told = error.strerror or str(error)
    if told is not None:  # outside `except`: a chained OSError counts as transient
        raise ValueError(f"--host {host} --port {port}: {told}")
    return found


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers often have a uid without a name
        return f"user-{os.getuid()}"


def _steps_of_config(config: str, uri: str, endpoint: str | None) -> "Fresh[Steps]":
    """Return the steps of a new run with this configuration on the sources at a URI."""
    from data_pipeline.access import open_data, open_tokenizer
    from data_pipeline.index.manifest import read_index
    from data_pipeline.plan.planner import Planner
    from data_pipeline.plan.tombstones import open_list
    from launch.cli.sources import open_sources
    from launch.local.versions import load_pinned
    from launch.web.steps import Steps

    root = open_sources(uri, endpoint, ())[0].uri
    given = (f"data.root={root}", *(() if endpoint is None else (f"data.endpoint={endpoint}",)))
    whole, _ = load_pinned(config, given)
    if whole.train.start_optimizer == "keep":
        raise ValueError(
            f"--config {config}: with train.start_optimizer=keep steps count on from the stage "
            "before, which no configuration says; give --run with the run's folder"
        )
    data = _for_pages(whole.data)

    def make() -> Steps:
        store = open_data(data)
        planner = Planner([read_index(store, name) for name in data.source_names], data)
        tokenizer = open_tokenizer(data, store)
        return Steps(Path(config).name, data, whole.train.steps, planner, store, tokenizer)

    return _fresh_steps(data, open_list(data), make)


def _for_pages(data: "DataConfig") -> "DataConfig":
    """Return a run's data section for a page: it reads in this process and gives up early."""
    from launch.web.corpus import PATIENCE_S

    alone = data.replace(workers=0, prefetch_steps=0, cache=None, requests_per_second=None)
    return alone.replace(patience=min(data.patience, PATIENCE_S))


def _fresh_steps(
    data: "DataConfig", listed: "tuple[Store, str] | None", make: "Callable[[], Steps]"
) -> "Fresh[Steps]":
    """Return steps that are read again when a source or the tombstone list changes.

    Args:
        listed: store and key of the tombstone list or of the run's copy; None without a list.
    """
    from data_pipeline.access import open_data
    from launch.web.fresh import Fresh, State, manifests_of, state_of

    store = open_data(data)

    def look() -> State:
        state = manifests_of(store, data.source_names)
        return state if listed is None else (*state, state_of(*listed))

    return Fresh("the data of the steps", look, make)


def _steps_of_run(run: Path) -> "Fresh[Steps]":
    """Return the steps of a run, replayed from its folder."""
    from data_pipeline.access import open_data, open_tokenizer
    from data_pipeline.index.manifest import RUN_TOMBSTONES
    from data_pipeline.store.open import FolderStore
    from kimi_pretrain.config import load_config
    from kimi_pretrain.tools.exposure import replay
    from launch.web.steps import Steps

    whole = load_config(run / "config.yaml")
    data = _for_pages(whole.data)

    def make() -> Steps:
        store = open_data(data)
        planner, begin = replay(run, whole, store)
        tokenizer = open_tokenizer(data, store)
        title = f"run {run.resolve().name}"
        return Steps(title, data, whole.train.steps, planner, store, tokenizer, begin)

    return _fresh_steps(data, (FolderStore(run.resolve()), RUN_TOMBSTONES), make)


def _site(
    about: tuple[str, tuple[str, ...], str | None, Path | None],
    steps: "Fresh[Steps] | None",
    catalog: "Catalog | None",
    door: "Doorkeeper",
    hosts: frozenset[str],
    cookie: str,
) -> "Site":
    """Return the site to serve, after writing missing facts."""
    from data_pipeline.store.open import open_store
    from launch.cli.progress import item_bar
    from launch.cli.sources import open_sources
    from launch.web.corpus import PATIENCE_S, Corpus
    from launch.web.media import Media
    from launch.web.records import Records
    from launch.web.site import Site
    from launch.web.statistics import Statistics
    from moonvit3d.geometry import PatchLimits

    uri, wanted, endpoint, folder = about
    found, names = open_sources(uri, endpoint, wanted)
    store = open_store(found.uri, endpoint=endpoint, patience=PATIENCE_S)
    config = None if steps is None else steps.last.config
    limits = PatchLimits() if config is None else config.limits
    place = facts_folder(folder)
    corpus = Corpus(
        store, endpoint, names, limits, place, lambda name: item_bar(f"facts of {name}")
    )
    choices = {} if config is None else {name: config.chosen(name) for name in names}
    statistics = Statistics(limits, None if config is None else config.seq_len, choices)
    records = None if catalog is None else Records(catalog)
    return Site(corpus, Media(), statistics, door, hosts, cookie, records=records, steps=steps)


def _run(
    site: "Site", listening: socket.socket, certificate: Path | None, key: Path | None
) -> None:
    """Serve until interrupted."""
    from launch.local.worker import allow_many_files
    from launch.web.app import application
    from launch.web.connections import web_server

    allow_many_files()  # each idle client holds a file descriptor
    try:
        web_server(application(site), certificate, key).run(sockets=[listening])
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
