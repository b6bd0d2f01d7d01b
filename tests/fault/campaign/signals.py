"""Process faults: signals, stops, dead writers, launchers and nodes, two runs in one folder."""

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.fault.campaign.compare import difference
from tests.fault.campaign.kills import partials
from tests.fault.campaign.processes import Training, wait_until
from tests.fault.campaign.runs import LATEST, Campaign, Result, after_strike

# Injects a fault and returns its moment; None means the current step.
Strike = Callable[[Training], str | None]


def _at(training: Training) -> str:
    return f"step {training.steps + 1}"


def _struck(
    campaign: Campaign, name: str, fault: str, strike: Strike, *more: str, at: int = 3
) -> None:
    """Run once, inject the fault after step `at`, and resume to the end."""
    begun, run_dir = time.monotonic(), campaign.folder / name
    straight, settings = campaign.straight(), campaign.settings(*more)
    with Training(run_dir, settings) as training:
        training.wait_for_step(at)
        done, result = training.steps, Result(fault, strike(training) or _at(training), "")
        after_strike(training, result, straight, run_dir / "checkpoints", done)
    campaign.go_on(run_dir, settings, straight, result)
    campaign.add(result, begun)


def asked_to_stop(campaign: Campaign) -> None:
    """Send SIGTERM to the command, or SIGUSR1 to a rank: all ranks save and stop after one step."""
    strikes: tuple[tuple[str, str, Strike], ...] = (
        ("term", "SIGTERM to the command", lambda t: t.process.terminate()),
        ("usr1", "SIGUSR1 to rank 1", lambda t: t.ranks()[1].send_signal(signal.SIGUSR1)),
    )
    for name, fault, strike in strikes:
        _struck(campaign, name, fault, strike)
        result = campaign.results[-1]
        status = json.loads((campaign.folder / name / "status.json").read_text())
        if not result.happened.startswith("exit 0"):
            result.wrong.append(f"expected exit 0, stopped in order: {result.happened}")
        if result.again:
            result.wrong.append(f"{result.again} steps lost by a stop in order")
        if status["state"] != "finished":
            result.wrong.append(f"status.json at the end: {status}")


def stopped_for_too_long(campaign: Campaign) -> None:
    """Suspend a rank beyond the timeout: the watchdog ends the run and names the rank."""

    def stop(training: Training) -> str:
        rank = training.ranks()[1]
        phase = training.phase_of(rank)
        rank.send_signal(signal.SIGSTOP)
        return f"{_at(training)}, {phase}"

    _struck(campaign, "stopped", "SIGSTOP of rank 1 for good", stop, "train.timeout_seconds=20")
    result, run_dir = campaign.results[-1], campaign.folder / "stopped"
    if "exit 75" not in result.happened or "rank 1" not in result.happened:
        result.wrong.append("expected exit 75 and a line that names rank 1")
    if not list(run_dir.glob("logs/stacks_rank_*.txt")):
        result.wrong.append("no stacks in logs/")


def dead_writer(campaign: Campaign) -> None:
    """Kill a checkpoint writer process during a save."""

    def kill(training: Training) -> str:
        saving = partials(training.run_dir / "checkpoints")
        wait_until(lambda: saving() or training.steps > 5, "a save")
        writer, under_way = campaign.draw("writer").choice(training.writers()), saving()
        writer.kill()
        return f"{_at(training)}, {under_way or 'between saves'}"

    _struck(campaign, "dead_writer", "kill -9 of a writer process", kill, at=1)
    result, log = campaign.results[-1], campaign.folder / "dead_writer" / "logs" / "rank_0.log"
    told = [line for line in log.read_text().splitlines() if "could not be written" in line]
    saved = (campaign.folder / "dead_writer/checkpoints/step_00000002/manifest.json").is_file()
    if not result.happened.startswith("exit 0"):
        result.wrong.append(f"expected the run's end, exit 0: {result.happened}")
    if told and "was killed by signal 9" not in told[0]:
        result.wrong.append(f"expected the signal in the log: {told[0]}")
    if not told and not saved:
        result.wrong.append("expected the checkpoint of step 2, or a failed save in the log")
    result.noticed_s = None  # it ran to its end
    result.happened = (
        "the log reports it; that save failed, the next one was written"
        if told
        else "it had written its part; the next save started another writer"
    )


def dead_node(campaign: Campaign) -> None:
    """Kill everything at once: command, torchrun, ranks, writers."""

    def kill(training: Training) -> None:
        for process in training.family():
            with suppress(psutil.Error):
                process.kill()

    _struck(campaign, "dead_node", "kill -9 of all processes at once", kill)


def dead_launchers(campaign: Campaign) -> None:
    """Kill torchrun, or the command: the ranks may save, but must not continue without it."""
    _orphaned(campaign, "no_torchrun", "kill -9 of torchrun alone", lambda t: t.torchrun().kill())
    command = "kill -9 of kimi-pretrain train alone"
    _orphaned(campaign, "no_command", command, lambda t: t.process.kill())


def _orphaned(campaign: Campaign, name: str, fault: str, strike: Strike) -> None:
    begun, run_dir = time.monotonic(), campaign.folder / name
    straight, settings = campaign.straight(), campaign.settings()
    with Training(run_dir, settings) as training:
        training.wait_for_step(1)
        done, result = training.steps, Result(fault, strike(training) or _at(training), "")
        struck = time.monotonic()
        wait_until(lambda: not training.family(), "the end of all processes")
        gone, after = round(time.monotonic() - struck, 1), training.steps
        after_strike(training, result, straight, run_dir / "checkpoints", after)
        result.noticed_s = gone
        if after > done + 2:
            result.wrong.append(f"the ranks went on to step {after}")
    campaign.go_on(run_dir, settings, straight, result)
    campaign.add(result, begun)


def restarts(campaign: Campaign) -> None:
    """Kill ranks under --max-restarts: the run recovers without intervention."""
    begun, run_dir = time.monotonic(), campaign.folder / "restarts"
    straight, settings = campaign.straight(), campaign.settings()
    result = Result("kill -9 of two ranks, --max-restarts 2", "steps", "")
    with Training(run_dir, settings, "--max-restarts", "2") as training:
        moments = []
        for at, rank in ((3, 1), (5, 0)):
            training.wait_for_step(at)
            moments.append(f"rank {rank} in {_at(training)}")
            training.ranks()[rank].kill()
            gone = training.steps
            wait_until(lambda gone=gone: training.steps != gone, "the restart")
        result.moment = ", ".join(moments)
        code = training.wait()
        result.happened = f"exit {code}, without a person"
        result.wrong += [f"left running: {told}" for told in training.left_over()]
    found = difference(run_dir, straight)
    result.equal = found is None
    result.wrong += [found] if found else []
    campaign.add(result, begun)


def two_runs(campaign: Campaign) -> None:
    """Start a second run in an active run's folder, and one with another run's checkpoint place."""
    run_dir, place = campaign.folder / "held", campaign.folder / "shared_place"
    straight = campaign.straight()
    settings = campaign.settings(f"checkpoint.place={place}")
    with Training(run_dir, settings) as first:
        first.wait_for_step(1)
        second_started = first.steps
        for fault, folder in (
            ("a second run in the same folder", run_dir),
            ("another run with this one's checkpoint.place", campaign.folder / "other"),
        ):
            begun = time.monotonic()
            result = Result(fault, f"step {second_started + 1} of the first", "")
            with first.held(), Training(folder, settings, *LATEST) as second:
                code = second.wait()
                result.noticed_s = round(time.monotonic() - begun, 1)
                result.happened = f"exit {code}; {second.error}"
                result.wrong += [f"left running: {told}" for told in second.left_over()]
                if code != 2 or not second.error:
                    result.wrong.append(f"expected exit 2 and one line: {second.output[-500:]}")
            campaign.add(result, begun)
        begun = time.monotonic()
        code = first.wait()
        undisturbed = Result("... and the first run", "", f"exit {code}, undisturbed")
        undisturbed.equal = difference(run_dir, straight) is None
        undisturbed.wrong += [f"left running: {told}" for told in first.left_over()]
        campaign.add(undisturbed, begun)
