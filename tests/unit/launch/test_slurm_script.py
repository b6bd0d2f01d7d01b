"""Tests that run the sbatch script under stand-ins for SLURM and check the job's outcome."""

import fcntl
import getpass
import signal
from pathlib import Path

import pytest

from launch.local.job import Job
from tests.unit.launch.slurm_stand_in import UNTIL_TOLD, Cluster


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_every_task_becomes_a_rank(cluster):
    code, said = cluster.run(cluster.stands("finished"))
    assert code == 0, said
    assert "finished" in said
    assert cluster.requeued() == 0
    ranks = [line.split() for line in (cluster.folder / "ranks").read_text().splitlines()]
    assert [line[:4] + line[6:] for line in ranks] == [
        [str(rank), str(rank % 2), "4", "2", "3"] for rank in range(4)
    ]
    (address,), (port,) = {line[4] for line in ranks}, {line[5] for line in ranks}
    assert address == "n2"
    assert 20_000 + 12345 % 10_000 <= int(port) < 30_100
    argv = (cluster.folder / "argv").read_text().splitlines()
    assert argv[:2] == ["-m", "launch.local.worker"]
    assert Job.parse(argv[2]).resume == "latest"


def test_ranks_of_one_node_meet_in_a_folder_that_nobody_else_can_open(tmp_path):
    """Otherwise rank 0 would listen on all addresses and unpickle the data it receives."""
    cluster = Cluster(tmp_path, nodes=1)
    look = 'stat -c "%a %U %n" "$KIMI_PRETRAIN_MEETING" >> $FOLDER/meetings\n'
    code, said = cluster.run(look + cluster.stands("finished"))
    assert code == 0, said
    lines = (tmp_path / "meetings").read_text().splitlines()
    assert len(lines) == 4
    assert len(set(lines)) == 1
    mode, owner, folder = lines[0].split()
    assert (mode, owner) == ("700", getpass.getuser())
    assert not Path(folder).exists()


def test_ranks_run_in_the_container(tmp_path):
    """This holds on one node, too, where the container cannot see a private rendezvous folder."""
    cluster = Cluster(tmp_path, nodes=1, container="/a b.sqsh", mounts=("/data:/data",))
    code, said = cluster.run(cluster.stands("finished"))
    assert code == 0, said
    mounts = f"--container-mounts=/data:/data,{cluster.run_dir}:{cluster.run_dir}"
    assert (tmp_path / "srun_options").read_text().splitlines() == [
        "--overlap|",
        f"--kill-on-bad-exit=1|--container-image=/a b.sqsh|{mounts}|",
    ]
    assert {line.split()[4] for line in (tmp_path / "ranks").read_text().splitlines()} == {"n2"}


def test_an_element_of_an_array_trains_its_own_seed(tmp_path):
    cluster = Cluster(tmp_path, seeds=(3, 5))
    cluster.env |= {"SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": "5"}
    own = cluster.run_dir / "seed_5"
    code, said = cluster.run(f'echo \'{{"state": "finished"}}\' > {own}/status.json\n')
    assert code == 0, said
    job = Job.parse((tmp_path / "argv").read_text().splitlines()[2])
    assert (job.run_dir, job.overrides) == (str(own), ("train.seed=5",))


def test_a_requeue_of_an_element_leaves_the_rest_of_its_array_alone(tmp_path):
    """The last element to start has the id of the array as its SLURM_JOB_ID."""
    cluster = Cluster(tmp_path, seeds=(3, 5))
    cluster.env |= {"SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": "5"}
    code, said = cluster.run("exit 75")
    assert (code, cluster.requeued("12345_5")) == (0, 1), said
    assert "job 12345_5: failed (exit code 75); newest checkpoint: none; restart 1 of 3" in said
    assert (cluster.run_dir / "seed_5/logs/failures-12345_5").read_text() == "1 0\n"
    # A later start of the same element ends a script that outlived its job.
    code, said = cluster.run(f"echo 1 > {cluster.folder}/starts; exit 75")
    assert (code, cluster.requeued("12345_5")) == (1, 1), said
    assert "a later start goes on already" in said


def test_ranks_take_nothing_over_from_a_job_in_which_theirs_was_submitted(cluster):
    cluster.env["KIMI_PRETRAIN_MEETING"] = "/of/that/job"
    cluster.env |= {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    look = 'echo "${KIMI_PRETRAIN_MEETING-}${!TORCHELASTIC_*}" >> $FOLDER/inherited\n'
    code, said = cluster.run(look + cluster.stands("finished"))
    assert code == 0, said
    assert (cluster.folder / "inherited").read_text() == 4 * "\n"


def test_usr1_reaches_the_ranks_and_the_job_goes_back_when_they_have_ended(cluster):
    stopped = cluster.stands("stopped", "signal SIGUSR1 at rank 0")
    code, said = cluster.run(UNTIL_TOLD + stopped, told=True)
    assert code == 0, said
    assert (cluster.folder / "told").is_file()
    assert "got USR1" in said
    assert "told to make room: back into the queue" in said
    assert cluster.requeued() == 1
    assert len((cluster.folder / "ranks").read_text().splitlines()) == 4
    assert not cluster.failures.exists()


def test_a_signal_does_not_end_a_rank_that_does_not_know_it_yet(cluster):
    cluster.program(
        "python-of-the-job",
        "#!/bin/bash\ntouch $FOLDER/ranks\n"
        'kill -USR1 $$; echo ended >> $FOLDER/well\n[ "$RANK" = 3 ]\n',
    )
    assert cluster.run("")[0] == 0
    assert (cluster.folder / "well").read_text() == 4 * "ended\n"


def test_a_save_that_fails_at_a_stop_is_a_failure_like_others(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=2)
    cannot = cluster.stands("failed", "stopped (signal SIGUSR1), but ...", saved=4) + "exit 75"
    for start in range(2):
        code, said = cluster.run(UNTIL_TOLD + cannot, start, told=True)
        assert (code, cluster.requeued()) == (0, start + 1), said
        told = f"failed (exit code 75); newest checkpoint: step 4; restart {start + 1} of 2"
        assert told in said
    code, said = cluster.run(UNTIL_TOLD + cannot, 2, told=True)
    assert (code, cluster.requeued()) == (75, 2), said
    assert "2 restarts got no further" in said


def test_a_save_that_can_never_work_ends_the_job_though_it_was_told_to_stop(cluster):
    code, said = cluster.run(UNTIL_TOLD + "exit 2", told=True)
    assert (code, cluster.requeued()) == (2, 0), said


def test_ranks_that_do_not_stop_in_time_are_given_up_and_counted(tmp_path):
    cluster = Cluster(tmp_path, save_seconds=2, max_restarts=1)
    forever = "while true; do sleep .2; done"
    code, said = cluster.run(forever, told=True)
    assert (code, cluster.requeued()) == (0, 1), said
    assert "did not stop within 1 s (--save-seconds); newest checkpoint: none" in said
    assert "restart 1 of 1: back into the queue" in said
    assert cluster.run(forever, 1, told=True)[0] == 1
    assert cluster.requeued() == 1


def test_ranks_of_a_job_that_is_not_requeued_are_never_given_up(tmp_path):
    """The save may take longer than the stop limit: here it takes 2.5 s, and the limit is 1 s."""
    cluster = Cluster(tmp_path, save_seconds=2, requeue=False)
    save = "until [ $(cat $FOLDER/sleeps 2>/dev/null | wc -l) -ge 25 ]; do /bin/sleep .1; done\n"
    stopped = cluster.stands("stopped", "signal SIGUSR1 at rank 0")
    code, said = cluster.run(UNTIL_TOLD + save + stopped, told=True)
    assert (code, cluster.requeued()) == (1, 0), said
    assert "told to make room: not requeued (--no-requeue)" in said


def test_usr1_before_the_ranks_have_begun_starts_none(cluster):
    wait = f"until [ -e {cluster.folder}/sent ]; do /bin/sleep .05; done"
    cluster.program("hostname", f"#!/bin/bash\ntouch {cluster.folder}/asked; {wait}; echo n2\n")
    with cluster.start(cluster.stands("finished")) as job:
        cluster.tell(job, signal.SIGUSR1, cluster.folder / "asked")
        (cluster.folder / "sent").touch()
        assert job.wait(50) == 0
    assert cluster.requeued() == 1
    assert not (cluster.folder / "ranks").exists()
    assert not cluster.failures.exists()


def test_a_job_ended_by_request_is_no_success_and_not_requeued(cluster):
    code, said = cluster.run(cluster.stands("stopped", "signal SIGTERM at rank 0"))
    assert code == 143, said
    assert cluster.requeued() == 0


def test_ranks_told_without_the_script_make_room_all_the_same(cluster):
    code, said = cluster.run(cluster.stands("stopped", "signal SIGUSR1 at rank 0"))
    assert (code, cluster.requeued()) == (0, 1), said


@pytest.mark.parametrize("others", [2, 137], ids=["all", "others were killed"])
def test_what_the_user_must_mend_is_never_tried_again(cluster, others):
    file = f"{cluster.run_dir}/logs/error_rank_1.txt"
    word = f'printf "no such data\\nexit code 2, start %s\\n" $KIMI_PRETRAIN_START > {file}\n'
    code, said = cluster.run(f"if [ $RANK = 1 ]; then {word} exit 2; fi; exit {others}")
    assert code == 2, said
    assert cluster.requeued() == 0
    assert "does not mend" in said


@pytest.mark.parametrize("start", ["12345.1.1", "112345.0.1", "1234500.1"])
def test_the_report_of_another_start_counts_for_nothing_and_stays(cluster, start):
    """The report may belong to a run that is active in the folder."""
    word = cluster.run_dir / "logs" / "error_rank_0.txt"
    word.write_text(f"of another\nexit code 2, start {start}\n")
    code, said = cluster.run("exit 1")
    assert (code, cluster.requeued()) == (0, 1), said
    assert word.is_file()


@pytest.mark.parametrize(("job", "ends"), [("99", (2, 0)), ("12345", (0, 1))])
def test_a_job_whose_folder_another_run_holds_is_not_tried_again(cluster, job, ends):
    """The refused rank writes no report, and srun returns the code of the ranks that it killed."""
    lock = cluster.run_dir / "lock"
    lock.write_text(f'{{"pid": 1, "job": "{job}", "id": "{job}.0.0"}}\n')
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, said = cluster.run("exit 137")
    assert (code, cluster.requeued()) == ends, said


def test_failures_are_tried_again_while_the_run_gets_further(tmp_path):
    cluster, last = Cluster(tmp_path, max_restarts=2), 75
    for start, (saved, number) in enumerate([(4, 1), (4, 2), (109, 1), (109, 2)]):
        # Steps without a checkpoint do not count as progress.
        (cluster.run_dir / "metrics.jsonl").write_text(f'{{"step": {200 + start}}}\n')
        code, said = cluster.run(cluster.stands("failed", saved=saved) + f"exit {last}", start)
        assert code == 0, said
        told = f"failed (exit code {last}); newest checkpoint: step {saved}; restart {number} of 2"
        assert told in said
        assert cluster.requeued() == start + 1
    code, said = cluster.run(f"exit {last}", restart=4)  # the third failure in a row
    assert code == last
    assert "2 restarts got no further" in said
    assert cluster.requeued() == 4


def test_a_run_that_saves_nothing_gets_no_further(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=1)
    act = cluster.stands("running") + "exit 1"
    code, said = cluster.run(act)
    assert (code, cluster.requeued()) == (0, 1), said
    assert "newest checkpoint: none; restart 1 of 1" in said
    assert cluster.run(act, 1)[0] == 1


@pytest.mark.parametrize("text", ["", "2", "2 ", "x y\n", "\0\0", "08 1\n"])
def test_a_torn_count_of_failures_begins_anew(cluster, text):
    cluster.failures.write_text(text)
    code, said = cluster.run("exit 1")
    assert (code, cluster.requeued()) == (0, 1), said
    assert "restart 1 of 3" in said
    assert cluster.failures.read_text() == "1 0\n"
    assert [file.name for file in cluster.failures.parent.iterdir()] == ["failures-12345"]


def test_where_nothing_can_be_counted_slurm_s_starts_are(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=2)
    cluster.failures.mkdir()  # not even root can replace it by a file
    (cluster.failures / "full").touch()
    cluster.program("mv", "#!/bin/bash\nexit 1\n")
    for start in range(2):
        code, said = cluster.run("exit 1", start)
        assert (code, cluster.requeued()) == (0, start + 1), said
    assert cluster.run("exit 1", 2)[0] == 1
    assert cluster.requeued() == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"setup": ("true", "test -d /nothing", "true")}, ": test -d /nothing;"),
        ({"setup": ("check() { false; true; }", "check")}, ": check;"),
        ({"setup": ("[ -d /nothing ] || exit 1",)}, ": [ -d /nothing ] || exit 1;"),
        ({"setup": ("source /nothing/activate",)}, ": source /nothing/activate;"),
        ({"setup": ("if false; then", "false; else", "test -d /no; fi")}, ": test -d /no; fi;"),
        ({"setup": ("exit 0",)}, "(exit code 0): exit 0;"),  # no step ran
        ({"modules": ("cuda/12",)}, ": module load cuda/12;"),
    ],
    ids=["command", "function", "exit", "source", "over lines", "exit 0", "module"],
)  # fmt: skip
def test_a_setup_that_fails_is_tried_again_and_named(tmp_path, options, told):
    cluster = Cluster(tmp_path, max_restarts=1, **options)
    code, said = cluster.run("exit 1")
    assert (code, cluster.requeued()) == (0, 1), said
    assert told in said
    assert "restart 1 of 1: back into the queue" in said
    code, said = cluster.run("exit 1", 1)
    assert (code != 0, cluster.requeued()) == (True, 1), said
    assert told in said
    assert not (cluster.folder / "ranks").exists()


def test_a_node_that_cannot_use_the_run_folder_is_a_failure_like_others(cluster):
    cluster.program("mkdir", "#!/bin/bash\nexit 1\n")
    code, said = cluster.run("exit 1")
    assert (code, cluster.requeued()) == (0, 1), said
    assert f"mkdir of {cluster.run_dir}/logs; newest" in said
    assert not (cluster.folder / "ranks").exists()


def test_a_setup_that_is_ended_by_request_is_no_failure(tmp_path):
    cluster = Cluster(tmp_path, setup=("sleep 40",))
    cluster.program("sleep", "#!/bin/bash\n/bin/kill -TERM $PPID; exit 143\n")  # acts like scancel
    code, said = cluster.run("")
    assert (code, cluster.requeued()) == (143, 0), said
    assert not cluster.failures.exists()


def test_a_setup_may_use_the_script_s_names(tmp_path):
    cluster = Cluster(tmp_path, setup=("job=1 run_dir=/nowhere code=7",))
    assert cluster.run(cluster.stands("finished"))[0] == 0


def test_without_restarts_the_ranks_exit_code_is_the_job_s(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=0)
    assert cluster.run("exit 3")[0] == 3
    assert cluster.requeued() == 0


def test_ranks_that_end_well_before_the_last_step_do_not_make_a_success(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=0)
    code, said = cluster.run(cluster.stands("running"))
    assert code == 1, said


def test_a_job_that_may_not_be_requeued_ends_badly_when_told_to_make_room(tmp_path):
    cluster = Cluster(tmp_path, requeue=False)
    code, said = cluster.run(cluster.stands("stopped", "signal SIGUSR1 at rank 0"))
    assert (code, cluster.requeued()) == (1, 0)
    assert "--no-requeue" in said


def test_a_start_that_was_given_up_leaves_the_next_one_alone(cluster):
    code, said = cluster.run(f"echo 1 > {cluster.folder}/starts; exit 1")
    assert (code, cluster.requeued()) == (1, 0)
    assert "a later start goes on already" in said


def test_a_refused_requeue_is_tried_again_and_then_told(cluster):
    program = cluster.folder / "bin" / "scontrol"
    program.write_text(
        f'#!/bin/bash\n[ "$1" = requeue ] && echo >> {cluster.folder}/tries && exit 1\n'
        'echo "JobId=12345 Restarts=0 BatchFlag=1"\n'
    )
    without_waiting(cluster)
    code, said = cluster.run("exit 1")
    assert code == 1
    assert "the requeue was refused" in said
    assert (cluster.folder / "tries").read_text().count("\n") == 6


def test_a_controller_that_is_away_for_a_moment_is_asked_again(cluster):
    program = cluster.folder / "bin" / "scontrol"
    away = f"[ $(cat {cluster.folder}/tries | wc -l) -lt 3 ] && exit 1"
    count = f"echo >> {cluster.folder}/tries"
    program.write_text(program.read_text().replace("#!/bin/bash", f"#!/bin/bash\n{count}\n{away}"))
    without_waiting(cluster)
    assert cluster.run("exit 1")[0] == 0
    assert cluster.requeued() == 1


def without_waiting(cluster):
    sleep = cluster.folder / "bin" / "sleep"
    sleep.write_text("#!/bin/bash\n")
    sleep.chmod(0o755)


def test_no_word_of_where_to_meet_is_a_failure_like_others(cluster):
    (cluster.folder / "bin" / "hostname").write_text("#!/bin/bash\nexit 1\n")
    (cluster.folder / "bin" / "srun").write_text("#!/bin/bash\nexit 1\n")
    code, said = cluster.run("exit 0")
    assert (code, cluster.requeued()) == (0, 1), said
    assert not (cluster.folder / "ranks").exists()
