"""`python -m tests.fault.campaign`: injects real faults into training jobs and writes the table.

The runs are tiny but not simulated: `kimi-pretrain train` as a user starts it, torchrun, two or
four ranks over gloo, writer processes, folders, and a real S3 server behind a proxy that breaks its
answers. After each fault the run is resumed and compared with an uninterrupted run: every number in
its metrics except times, and the SHA-256 of its whole state.

    python -m tests.fault.campaign                  all, 40 minutes on two cores; writes the docs
    python -m tests.fault.campaign --only two_runs  some, by name; writes nothing but --json
"""

import argparse
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

from launch.local.s3_server import S3Server
from tests.fault.campaign import intruders, kills, signals, storage, strangers, surroundings, table
from tests.fault.campaign.runs import Campaign, Result
from tests.fault.fault_proxy import FaultProxy

BUCKET = "campaign"


def cases(campaign: Campaign, proxy: FaultProxy) -> dict[str, Callable[[], object]]:
    """Return name -> case function, in the order of the table."""
    s3 = (campaign, proxy, BUCKET)
    return {
        "kills_of_ranks": partial(kills.kills_of_ranks, campaign),
        "kills_in_uploads": partial(kills.kills_in_uploads, *s3),
        **{
            case.__name__: partial(case, campaign)
            for case in (
                *(signals.restarts, signals.asked_to_stop, signals.stopped_for_too_long),
                *(signals.dead_writer, signals.dead_node, signals.dead_launchers),
                *(signals.two_runs, intruders.second_starts, intruders.bare_ranks),
                *(storage.damaged, storage.lost, storage.torn),
                *(surroundings.clock_jumps, surroundings.disk_errors, surroundings.redacted),
                *(strangers.hostile_manifests, strangers.held_connections),
                *(storage.disk_full, storage.numbers_gone_bad, storage.spikes),
            )
        },
        "server_slow": partial(storage.server_slow, *s3),
        "server_odd": partial(storage.server_odd, *s3),
        "server_away": partial(storage.server_away, *s3),
    }


def main(arguments: list[str]) -> int:
    """Run the campaign; return 0 if every case went as promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything here")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        campaign = Campaign(Path(given.folder or temporary).resolve(), given.seed)
        _run(campaign, given.only)
    found = campaign.dump() | {"about": _about(time.monotonic() - begun)}
    if given.json:
        given.json.write_text(table.json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if not given.only:
        table.write(found)
    wrong = [result for result in campaign.results if not result.sound]
    print(f"{len(campaign.results) - len(wrong)} of {len(campaign.results)} as promised")
    for name, reason in campaign.skipped.items():
        print(f"not done: {name}: {reason}")
    return 1 if wrong else 0


def _run(campaign: Campaign, only: list[str]) -> None:
    campaign.folder.mkdir(parents=True, exist_ok=True)
    campaign.build()
    with S3Server(campaign.folder / "s3", BUCKET) as server, FaultProxy(server.endpoint) as proxy:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        os.environ.update(server.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint})
        every = cases(campaign, proxy)
        if unknown := sorted(set(only) - set(every)):
            raise SystemExit(f"no case {unknown}; there are {', '.join(every)}")
        for name, case in every.items():
            if only and name not in only:
                continue
            try:
                case()
            except Exception as error:  # the remaining cases are still worth running
                traceback.print_exc()
                told = f"the case itself failed: {type(error).__name__}: {error}"
                campaign.add(Result(name, "", "", wrong=[told[:500]]), time.monotonic())
            proxy.faults = []


def _about(seconds: float) -> dict[str, object]:
    from importlib.metadata import version

    return {
        "date": date.today().isoformat(),
        "seconds": round(seconds),
        "cores": len(os.sched_getaffinity(0)),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
