"""Faults in the environment of a run: clock jumps, disk errors, redacted data."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.govern.redact import carry_out
from data_pipeline.index.manifest import read_index
from data_pipeline.store.open import FolderStore
from kimi_pretrain.reliability.exit_report import NO_PROGRESS
from tests.fault.campaign.compare import difference, difference_of_lines, read_lines
from tests.fault.campaign.processes import Training, wait_until
from tests.fault.campaign.runs import LATEST, Campaign, Result, after_strike

_DAY = 86400


def clock_jumps(campaign: Campaign) -> None:
    """Make the wall clock of all processes jump by days, forward and back, between steps."""
    begun, run_dir, file = time.monotonic(), campaign.folder / "clock", campaign.folder / "jump"
    straight, settings = campaign.straight(), campaign.settings()
    result = Result("the clock jumps, 400 days ahead and 3 back", "", "")
    file.symlink_to("0")
    moments = []
    with Training(run_dir, settings, environment={"CAMPAIGN_CLOCK": str(file)}) as training:
        for step, jump in ((2, 400 * _DAY), (4, -3 * _DAY), (6, 0)):
            training.wait_for_step(step)
            moments.append(f"step {training.steps + 1}")
            _point(file, str(jump))
        code = training.wait()
        result.wrong += [f"left running: {told}" for told in training.left_over()]
        result.wrong += [training.output[-800:]] if code else []
    result.moment, result.happened = ", ".join(moments), f"exit {code}"
    negative = [
        name
        for line in read_lines(run_dir / "metrics.jsonl")
        for name, seconds in line.items()
        if "seconds" in name and isinstance(seconds, float) and not 0 <= seconds < _DAY
    ]
    result.wrong += [f"{name} is no time of a step" for name in negative]
    found = difference(run_dir, straight)
    result.equal, result.wrong = found is None, result.wrong + ([found] if found else [])
    campaign.add(result, begun)


def disk_errors(campaign: Campaign) -> None:
    """Fail corpus reads with EIO, for a while and permanently; then fail reads of status.json."""
    straight = campaign.straight()
    for name, fault, seconds in (
        ("eio_short", "EIO on reads of the corpus for 10 s", 10.0),
        ("eio", "EIO on reads of the corpus for good (data.patience=5)", None),
    ):
        begun, run_dir, file = (
            time.monotonic(),
            campaign.folder / name,
            campaign.folder / f"{name}_on",
        )
        settings = campaign.settings(*(() if seconds else ("data.patience=5",)))
        environment, result = {"CAMPAIGN_EIO": str(file)}, Result(fault, "", "")
        with Training(run_dir, settings, environment=environment) as training:
            training.wait_for_step(3)
            done, result.moment = training.steps, f"step {training.steps + 1}"
            struck = time.monotonic()
            with _failing(file, campaign.data_root):
                if seconds:
                    time.sleep(seconds)
                else:
                    wait_until(lambda: training.process.poll() is not None, "the end")
                noticed = round(time.monotonic() - struck, 1)
                told = (run_dir / "logs" / "rank_0.log").read_text()
            after_strike(training, result, straight, run_dir / "checkpoints", done)
            code = training.process.returncode
            if seconds:
                result.noticed_s, result.again = None, 0
                result.wrong += [] if code == 0 else [f"expected exit 0: {training.error}"]
                result.wrong += [] if "tried again" in told else ["no read failed"]
            elif code != NO_PROGRESS or ".tar" not in training.error:
                result.wrong.append(f"expected exit {NO_PROGRESS} and a file: {training.error}")
        if not seconds:
            result.noticed_s = noticed
            campaign.go_on(run_dir, settings, straight, result)
        found = difference(run_dir, straight)
        result.equal, result.wrong = found is None, result.wrong + ([found] if found else [])
        campaign.add(result, begun)
    _unread_status(campaign, straight)


def _unread_status(campaign: Campaign, straight: Path) -> None:
    begun, run_dir = time.monotonic(), campaign.copy_of_straight("eio_status")
    file = campaign.folder / "eio_status_on"
    result = Result("EIO on reads of status.json for 5 s", "a resume", "")
    environment = {"CAMPAIGN_EIO": str(file)}
    with (
        _failing(file, run_dir / "status.json"),
        Training(run_dir, campaign.settings(), *LATEST, environment=environment) as training,
    ):
        wait_until(lambda: "status.json: Input/output error; tried" in training.output, "a read")
        time.sleep(5.0)
        file.unlink()
        code = training.wait()
        result.happened = f"exit {code}"
        result.wrong += [] if code == 0 else [training.output[-800:]]
    result.equal = difference(run_dir, straight) is None
    campaign.add(result, begun)


def redacted(campaign: Campaign) -> None:
    """Redact a third of the samples during a run; the run continues without them."""
    begun, run_dir, root = (
        time.monotonic(),
        campaign.folder / "redacted",
        campaign.folder / "copied",
    )
    straight = campaign.straight()
    shutil.copytree(campaign.data_root, root)
    store, result = FolderStore(root), Result("data redact of a third of the samples", "", "")
    wanted = {}
    for name in ("pictures", "words"):
        index = read_index(store, name)
        wanted[name] = [index.key_of(n) for n in range(0, index.num_samples, 3)]
    settings = campaign.settings(f"data.root={root}")
    with Training(run_dir, settings) as training:
        training.wait_for_step(2)
        with training.held():
            result.moment = f"step {training.steps + 1}"
            removed = carry_out(store, wanted).removed
        code = training.wait()
        result.wrong += [f"left running: {told}" for told in training.left_over()]
        result.wrong += [training.output[-800:]] if code else []
    masked = read_lines(run_dir / "quarantine.jsonl")
    result.happened = (
        f"exit {code}; {len(removed)} shards were replaced and read on in their new places, "
        f"{len(masked)} redacted samples masked"
    )
    if not masked or any(one["key"] not in wanted[one["source"]] for one in masked):
        result.wrong.append(f"expected redacted samples in quarantine.jsonl: {masked[:3]}")
    lines = len(read_lines(run_dir / "metrics.jsonl"))
    first = min((one["step"] for one in masked), default=1)
    told = difference_of_lines(run_dir, straight) or ""
    if lines != 8 or not told.startswith(f"step {first}:"):
        result.wrong.append(f"{lines} steps; expected the first difference in step {first}: {told}")
    campaign.add(result, begun)


@contextmanager
def _failing(file: Path, prefix: Path) -> Iterator[None]:
    """Make reads of paths with a prefix fail meanwhile (`site/sitecustomize.py`)."""
    file.symlink_to(prefix)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _point(file: Path, target: str) -> None:
    """Change the target of a link atomically."""
    new = file.with_suffix(".new")
    new.symlink_to(target)
    new.replace(file)
