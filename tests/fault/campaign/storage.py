"""Faults of checkpoint storage: damaged and torn files, full disks, absent servers."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kimi_pretrain.reliability.exit_report import NO_PROGRESS
from tests.fault.campaign.processes import Training, wait_until
from tests.fault.campaign.runs import (
    EVERY,
    LATEST,
    STEPS,
    Campaign,
    Result,
    after_strike,
    newest,
)
from tests.fault.fault_proxy import ODD, Fault, FaultProxy


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"), key=lambda file: (file.stat().st_size, file.name))


def _flip(folder: Path) -> None:
    file = _largest(folder)
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 16
    file.write_bytes(bytes(data))


def _cut_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[: file.stat().st_size // 2])


# A misspelt endpoint gives these answers from the first request on. They count as a user error and
# are reported at once.
_OF_WRONG_ENDPOINTS = ("forbidden", "nothing", "redirect", "moved")

DAMAGES: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    ("flipped", "a flipped bit in a tensor file", _flip),
    ("missing", "a missing tensor file", lambda folder: _largest(folder).unlink()),
    ("cut", "a truncated manifest.json", _cut_manifest),
    ("index", "a missing index.json", lambda folder: (folder / "index.json").unlink()),
)


def damaged(campaign: Campaign) -> None:
    """Damage the newest checkpoint: it is refused by name, or skipped where fallback is allowed."""
    for name, fault, damage in DAMAGES:
        begun = time.monotonic()
        run_dir = campaign.copy_of_straight(name)
        (run_dir / "state_hashes.json").unlink()
        folder = run_dir / "checkpoints" / f"step_{STEPS:08d}"
        damage(folder)
        result = Result(fault, f"newest checkpoint (step {STEPS})", "")
        with Training(run_dir, campaign.settings(), *LATEST) as training:
            code = training.wait()
            result.noticed_s = round(time.monotonic() - begun, 1)
            result.happened = f"exit {code}; {training.error}"
            result.wrong += [f"left running: {told}" for told in training.left_over()]
            if code != 2 or f"step_{STEPS:08d}" not in training.error:
                result.wrong.append(
                    f"expected exit 2 and the file's name: {training.output[-800:]}"
                )
        campaign.add(result, begun)
        begun = time.monotonic()
        again = Result(
            f"{fault}, resume.fallback=true", "", f"goes on from step {STEPS - EVERY}", again=EVERY
        )
        allowed = campaign.settings("resume.fallback=true")
        campaign.go_on(run_dir, allowed, campaign.straight(), again)
        campaign.add(again, begun)


def lost(campaign: Campaign) -> None:
    """Delete the newest checkpoint: the run cannot know of it and resumes from the previous one."""
    begun = time.monotonic()
    run_dir = campaign.copy_of_straight("lost")
    (run_dir / "state_hashes.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / f"step_{STEPS:08d}")
    told = f"goes on from step {STEPS - EVERY}"
    result = Result("the newest checkpoint's folder is gone", "", told, again=EVERY)
    campaign.go_on(run_dir, campaign.settings(), campaign.straight(), result)
    campaign.add(result, begun)


def torn(campaign: Campaign) -> None:
    """Leave torn saves that are newer than every checkpoint: they are never loaded."""
    begun = time.monotonic()
    run_dir = campaign.copy_of_straight("torn")
    (run_dir / "state_hashes.json").unlink()
    place = run_dir / "checkpoints"
    last = place / f"step_{STEPS:08d}"
    last.rename(place / f"step_{STEPS:08d}.partial")  # complete except for its name
    without = place / f"step_{STEPS - 1:08d}"
    shutil.copytree(place / f"step_{STEPS - EVERY:08d}", without)
    (without / "manifest.json").unlink()
    told = f"neither is taken; goes on from step {STEPS - EVERY}"
    result = Result("a .partial folder and one without manifest.json", "", told, again=EVERY)
    campaign.go_on(run_dir, campaign.settings(), campaign.straight(), result)
    campaign.add(result, begun)


def disk_full(campaign: Campaign) -> None:
    """Fill the disk, so that the second checkpoint and all later ones fail."""
    name, place = "disk_full", campaign.folder / "small_disk"
    place.mkdir()
    sizes = (campaign.straight() / "checkpoints" / f"step_{STEPS:08d}").iterdir()
    one = sum(file.stat().st_size for file in sizes)
    options = f"size={int(one * 1.5)}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        campaign.skipped[name] = f"no tmpfs may be mounted here: {done.stderr.strip()}"
        return
    try:
        _fill_up(campaign, name, place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def _fill_up(campaign: Campaign, name: str, place: Path) -> None:
    begun, run_dir = time.monotonic(), campaign.folder / name
    straight = campaign.straight()
    settings = campaign.settings(f"checkpoint.place={place}", "checkpoint.failures=2")
    result = Result("disk full in a save", f"after the checkpoint of step {EVERY}", "")
    with Training(run_dir, settings) as training:
        after_strike(training, result, straight, place, 0)
        result.noticed_s, done = None, training.steps
        result.again = done - newest(place)
        if training.process.returncode == 0 or not training.error:
            result.wrong.append(f"expected an error: {training.output[-800:]}")
        result.happened = f"exit {training.process.returncode}; {training.error}"
    subprocess.run(["mount", "-o", "remount,size=1g", str(place)], check=True)
    campaign.go_on(run_dir, settings, straight, result)
    campaign.add(result, begun)


def server_away(campaign: Campaign, proxy: FaultProxy, bucket: str) -> None:
    """Make S3 unavailable during a save, for some seconds and permanently."""
    _away(campaign, proxy, f"s3://{bucket}/s3_short", "S3 away for 10 s in a save", 10.0)
    _away(campaign, proxy, f"s3://{bucket}/s3_gone", "S3 away in every save", None)


def _away(
    campaign: Campaign, proxy: FaultProxy, place: str, fault: str, seconds: float | None
) -> None:
    begun, run_dir = time.monotonic(), campaign.folder / place.rpartition("/")[2]
    straight = campaign.straight()
    settings = campaign.settings(f"checkpoint.place={place}", "checkpoint.failures=1")
    away = Fault("refuse", method="", path="safetensors", times=None, seconds=seconds)
    proxy.faults = [away]
    result = Result(fault, "", "")
    with Training(run_dir, settings) as training:
        wait_until(lambda: away.taken or training.process.poll() is not None, "an upload")
        result.moment = f"step {training.steps + 1}, first upload"
        after_strike(training, result, straight, place, 0)
        done = training.steps
    proxy.faults = []
    result.again = done - newest(place)
    if seconds is not None:
        result.noticed_s = None  # the run continued to its end
    elif training.process.returncode != NO_PROGRESS:
        result.wrong.append(f"expected exit {NO_PROGRESS}, not {training.process.returncode}")
    campaign.go_on(run_dir, settings, straight, result)
    campaign.add(result, begun)


def server_slow(campaign: Campaign, proxy: FaultProxy, bucket: str) -> None:
    """Make S3 answer late, and three of ten requests with 503."""
    begun, run_dir = time.monotonic(), campaign.folder / "s3_slow"
    straight, place = campaign.straight(), f"s3://{bucket}/s3_slow"
    settings = campaign.settings(f"checkpoint.place={place}")
    slow = Fault("slowdown", method="", times=None, p=0.3)
    proxy.faults = [slow, Fault("late", method="", times=None, delay=0.1)]
    result = Result("S3 slow, 503 to 3 of 10 requests", "all saves and the resume", "")
    with Training(run_dir, settings) as training:
        after_strike(training, result, straight, place, 0)
    result.noticed_s, result.again = None, 0
    if training.process.returncode:
        result.wrong.append(f"expected exit 0: {training.output[-800:]}")
    result.happened = f"exit {training.process.returncode}; {slow.taken} refusals, none felt"
    campaign.go_on(run_dir, settings, straight, result)
    proxy.faults = []
    campaign.add(result, begun)


def server_odd(campaign: Campaign, proxy: FaultProxy, bucket: str) -> None:
    """Replace some answers by non-S3 ones: pages, redirects, empty answers, a wrong clock."""
    begun, run_dir = time.monotonic(), campaign.folder / "s3_odd"
    straight, place = campaign.straight(), f"s3://{bucket}/s3_odd"
    settings = campaign.settings(f"checkpoint.place={place}")
    odd = [Fault("odd", method="", times=None, p=0.05, code=code) for code in ODD]
    result = Result("S3 answers wrong in form, 3 of 10", "all saves and the resume", "")
    asked = len(proxy.requests)
    with Training(run_dir, settings) as training:
        # The first answer proves an S3 server; otherwise odd answers would end the start at once.
        wait_until(lambda: len(proxy.requests) > asked + 1, "a first request")
        proxy.faults = odd
        training.wait()
        proxy.faults = []  # what follows reads the place from a process that has seen no S3 yet
        after_strike(training, result, straight, place, 0)
    result.noticed_s, result.again = None, 0
    if training.process.returncode:
        result.wrong.append(f"expected exit 0: {training.output[-800:]}")
    taken = sum(fault.taken for fault in odd)
    result.happened = f"exit {training.process.returncode}; {taken} odd answers, none felt"
    proxy.faults = [fault for fault in odd if fault.code not in _OF_WRONG_ENDPOINTS]
    campaign.go_on(run_dir, settings, straight, result)
    proxy.faults = []
    campaign.add(result, begun)


def numbers_gone_bad(campaign: Campaign) -> None:
    """Use a learning rate that makes all numbers infinite: steps are skipped, then the run ends."""
    begun, run_dir = time.monotonic(), campaign.folder / "nonfinite"
    bad = ("optim.lr=1e30", "optim.min_lr=1e29", "guard.skips_in_row=3")
    result = Result("losses and gradients that are not finite", "from step 2 on", "")
    with Training(run_dir, campaign.settings(*bad, steps=30)) as training:
        code = training.wait()
        result.happened = f"exit {code}; {training.error}"
        result.wrong += [f"left running: {told}" for told in training.left_over()]
        if code != 2 or "guard.skips_in_row" not in training.error:
            result.wrong.append(f"expected exit 2 and the key: {training.output[-800:]}")
    anomalies = run_dir / "anomalies.jsonl"
    lines = anomalies.read_text().splitlines() if anomalies.is_file() else []
    if len(lines) != 3 or not json.loads(lines[0])["samples"]:
        result.wrong.append(f"{len(lines)} lines in anomalies.jsonl, expected 3 with their samples")
    campaign.add(result, begun)


def spikes(campaign: Campaign) -> None:
    """Skip loss spikes; after a kill between them, the run makes the same decisions."""
    begun = time.monotonic()
    # The learning rate is almost zero, so that losses vary only with the data.
    rule = ("guard.spike=skip", "guard.spike_ratio=1.0001", "guard.spike_window=2")
    rule = (*rule, "optim.lr=1e-9", "optim.min_lr=1e-10")
    straight = campaign.straight(*rule, name="straight_spikes")
    settings, run_dir = campaign.settings(*rule), campaign.folder / "spikes"
    lines = (straight / "anomalies.jsonl").read_text().splitlines()
    assert 0 < len(lines) < STEPS, lines
    result = Result(f"loss spikes ({len(lines)} steps skipped), kill -9 between them", "", "")
    with Training(run_dir, settings) as training:
        training.wait_for_step(5)
        done, result.moment = training.steps, f"step {training.steps + 1}"
        training.ranks()[0].kill()
        after_strike(training, result, straight, os.fspath(run_dir / "checkpoints"), done)
    campaign.go_on(run_dir, settings, straight, result)
    if (run_dir / "anomalies.jsonl").read_text().splitlines() != lines:
        result.wrong.append("anomalies.jsonl differs from the uninterrupted run's")
    campaign.add(result, begun)
