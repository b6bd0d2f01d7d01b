"""Job faults on a cluster: lost nodes, cancellations, failures, chains, arrays."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from tests.slurm import jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def overrides(data_root):
    return (f"data.root={data_root}", "train.steps=12", "checkpoint.every=3")


@pytest.fixture(scope="module")
def straight(lab, overrides, tmp_path_factory):
    """Results of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    job = jobs.submit(lab, folder / "run", *overrides)
    assert jobs.wait_end(lab, job).state == "COMPLETED", jobs.log_of(lab, job)
    return jobs.result(folder / "run")


def finishes_equal(lab, job, run_dir, straight, restarts=1):
    end = jobs.wait_end(lab, job)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), jobs.log_of(lab, job)
    assert end.restarts == restarts
    assert jobs.result(run_dir) == straight


def test_scancel_ends_in_order_with_a_checkpoint(lab, overrides, tmp_path, straight):
    """A user cancels the job after following its output and detaching."""
    run_dir = tmp_path / "run"
    more = ("--follow", "train.steps=1000", "checkpoint.every=null")
    watching = subprocess.Popen(
        jobs.command(run_dir, *overrides, *more),
        env=jobs.environment(lab), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watching.stdout is not None
    job = int(watching.stdout.readline().split(";")[0].removeprefix("job "))
    jobs.wait_steps(lab, job, run_dir, 2)
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=60)
    assert (watching.returncode, "goes on without this terminal" in said) == (130, True), said
    assert jobs.state(lab, job).state == "RUNNING"
    lab.run("scancel", str(job))
    assert jobs.wait_end(lab, job).state == "CANCELLED"
    stands = jobs.status(run_dir)
    assert (stands["state"], stands["checkpoint"]) == (
        "stopped", str(run_dir / "checkpoints" / f"step_{stands['step']:08d}")
    )  # fmt: skip
    assert "SIGTERM" in stands["reason"]
    jobs.wait(lambda: not jobs.rank_pids(run_dir), "end of the ranks", seconds=30)
    # A user resumes the run.
    more = f"train.steps={stands['step'] + 1}"
    job = jobs.submit(lab, run_dir, *overrides, "--resume=latest", more)
    assert jobs.wait_end(lab, job).state == "COMPLETED", jobs.log_of(lab, job)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_lost_node(node, lab, overrides, tmp_path, straight):
    """SLURM notices after SlurmdTimeout and requeues; the job starts when the node is back.

    n1 holds the batch script and rank 0, n2 only a rank.
    """
    run_dir = tmp_path / "run"
    job = jobs.submit(lab, run_dir, *overrides)
    jobs.wait_steps(lab, job, run_dir)
    lab.kill_node(node)
    requeued(lab, job)
    lab.start_node(node)
    finishes_equal(lab, job, run_dir, straight)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_killed_slurmd(node, lab, overrides, tmp_path, straight):
    """Only the daemon is killed; its processes survive and must not block the next start."""
    run_dir = tmp_path / "run"
    job = jobs.submit(lab, run_dir, *overrides)
    jobs.wait_steps(lab, job, run_dir, 4)
    # Suspend the ranks; otherwise the job would finish before SLURM notices the loss.
    jobs.signal_ranks(run_dir, signal.SIGSTOP)
    lab.kill_node(node, everything=False)
    requeued(lab, job)
    lab.start_node(node)
    finishes_equal(lab, job, run_dir, straight)


def requeued(lab, job):
    jobs.wait(
        lambda: jobs.state(lab, job).restarts == 1,
        f"requeue of {job}",
        lambda: jobs.log_of(lab, job),
    )


def test_a_killed_rank_is_a_failure_that_is_tried_again(lab, overrides, tmp_path, straight):
    run_dir = tmp_path / "run"
    job = jobs.submit(lab, run_dir, *overrides)
    jobs.wait_steps(lab, job, run_dir, 4)
    os.kill(max(jobs.rank_pids(run_dir)), signal.SIGKILL)
    finishes_equal(lab, job, run_dir, straight)
    assert "restart 1 of 3" in jobs.log_of(lab, job)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (("--save-seconds=10", "train.timeout_seconds=300"), "the ranks did not stop within 5 s"),
        (("--save-seconds=240", "train.timeout_seconds=40"), "failed (exit code"),
    ],
    ids=["given up by the script", "ended by the watchdog"],
)
def test_a_stop_without_a_save_is_a_failure(lab, overrides, tmp_path, straight, limits, why):
    """A stop that cannot save, with suspended writers, is retried as a failure, not a TIMEOUT."""
    run_dir = tmp_path / "run"
    job = jobs.submit(lab, run_dir, *overrides, *limits)
    jobs.preempt(lab, job, run_dir, 4, save=False)
    writers = jobs.writer_pids(run_dir)
    assert len(writers) == 2
    finishes_equal(lab, job, run_dir, straight)
    said = jobs.log_of(lab, job)
    assert "got USR1: the ranks finish their step, save and stop\n" in said
    assert why in said
    assert "restart 1 of 3: back into the queue" in said
    assert "told to make room" not in said
    # SLURM has ended the suspended writers.
    assert not any(psutil.pid_exists(pid) for pid in writers)


def test_a_setup_that_fails_on_a_bad_node_is_tried_again(lab, overrides, tmp_path):
    """It is retried as often as other failures, and the message names it."""
    need = f"test -e {tmp_path}/good"
    more = ("train.steps=2", "--max-restarts=1", f"--setup={need}")
    once, never = tmp_path / "once", tmp_path / "never"
    job = jobs.submit(lab, once, *overrides, *more)
    jobs.wait(
        lambda: f"{need}; newest checkpoint: none; restart 1 of 1" in jobs.log_of(lab, job),
        "a requeue",
    )
    other = jobs.submit(lab, never, *overrides, *more[:2], "--setup=test -e /nothing")
    (tmp_path / "good").touch()
    assert jobs.wait_end(lab, job).state == "COMPLETED", jobs.log_of(lab, job)
    assert jobs.state(lab, job).restarts == 1
    end = jobs.wait_end(lab, other)
    assert (end.state, end.exit_code, end.restarts) == ("FAILED", 1, 1), jobs.log_of(lab, other)
    assert "test -e /nothing; newest checkpoint: none; 1 restarts" in jobs.log_of(lab, other)


def test_room_for_a_partition_that_goes_first(lab, overrides, tmp_path, straight):
    """SLURM preempts the job: signal, time to save, the other job, requeue."""
    run_dir = tmp_path / "run"
    job = jobs.submit(lab, run_dir, *overrides, "--partition=low", "--sbatch=exclusive")
    jobs.wait_steps(lab, job, run_dir)
    lab.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    finishes_equal(lab, job, run_dir, straight)
    assert "told to make room" in jobs.log_of(lab, job)


def test_what_the_user_must_mend_ends_the_job_at_once(lab, overrides, tmp_path):
    done = subprocess.run(
        jobs.command(
            tmp_path / "run", *overrides, "--follow", "--unchecked", "data.root=/nothing"
        ),
        env=jobs.environment(lab), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "a restart does not mend" in done.stdout
    assert "/nothing: no such folder" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("FAILED, exit code 2")


def test_a_chain_of_two_stages(lab, overrides, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    first = jobs.submit(lab, one, *overrides, "train.steps=4")
    stage = (*overrides, "train.steps=3", "train.seed=9", f"train.start_from={one}")
    second = jobs.submit(lab, two, *stage, f"--after={first}")
    assert jobs.state(lab, second).reason == "Dependency"
    for job in (first, second):
        assert jobs.wait_end(lab, job).state == "COMPLETED", jobs.log_of(lab, job)
    trained, fresh = jobs.result(two)[0][0][1], jobs.result(one)[0][0][1]
    assert trained < fresh - 0.3  # loss of the first step; the stage does not start from scratch


def test_a_failed_stage_cancels_the_next(lab, overrides, tmp_path):
    first = jobs.submit(lab, tmp_path / "one", *overrides, "--unchecked", "data.root=/nothing")
    second = jobs.submit(lab, tmp_path / "two", *overrides, f"--after={first}")
    assert jobs.wait_end(lab, first).state == "FAILED"
    assert jobs.wait_end(lab, second).state == "CANCELLED"
    assert not (tmp_path / "two" / "metrics.jsonl").exists()


def test_an_element_of_an_array_that_makes_room_leaves_the_others_alone(
    lab, overrides, tmp_path, straight
):
    """The preempted element has the id of the whole array."""
    sweep = tmp_path / "sweep"
    job = jobs.submit(lab, sweep, *overrides, "--seeds=0,5,7")

    def number_of_array() -> list[str]:
        told = lab.run("squeue", "-h", "-t", "R", "-j", str(job), "-o", "%A %K").splitlines()
        return [seed for number, seed in map(str.split, told) if number == str(job)]

    jobs.wait(lambda: bool(number_of_array()), "an element with the array's number")
    (last,) = number_of_array()
    jobs.preempt(lab, f"{job}_{last}", sweep / f"seed_{last}")

    def ended() -> bool:
        return all(one.ended for one in jobs.states(lab, job))

    jobs.wait(ended, "the end of the array", lambda: str(jobs.states(lab, job)))
    ends = {one.label: (one.state, one.restarts) for one in jobs.states(lab, job)}
    assert ends == {f"{job}_{seed}": ("COMPLETED", int(seed == last)) for seed in ("0", "5", "7")}
    assert jobs.result(sweep / "seed_0") == straight
    assert jobs.result(sweep / "seed_5")[0] != straight[0]
    logs = sorted(path.parent.name for path in sweep.glob("seed_*/slurm-*.out"))
    assert logs == ["seed_0", "seed_5", "seed_7"]


def test_the_time_limit(lab, overrides, tmp_path):
    """Takes two to three minutes, the shortest SLURM limit that leaves time for the signal."""
    run_dir = tmp_path / "run"
    limits = ("--time=3", "--save-seconds=40")
    job = jobs.submit(lab, run_dir, *overrides, "train.steps=100000", *limits)
    began = time.monotonic()
    jobs.wait(
        lambda: jobs.state(lab, job).restarts == 1, "its requeue", lambda: jobs.log_of(lab, job)
    )
    assert time.monotonic() - began < 180
    assert "told to make room" in jobs.log_of(lab, job)
    stands = jobs.status(run_dir)
    assert (stands["state"], "SIGUSR1" in stands["reason"]) == ("stopped", True)
    lab.run("scancel", str(job))
    assert jobs.wait_end(lab, job).state == "CANCELLED"
