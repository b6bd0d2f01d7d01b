"""Tests of torchrun's command line against fixed arguments and torchrun's own parser."""

import json
import os
import stat
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from kimi_pretrain.parallel import rendezvous
from kimi_pretrain.reliability.start_identity import REPORTS, START
from launch.local.job import MEETING as NAME
from launch.local.job import Job
from launch.local.torchrun import SHUTDOWN_SECONDS, Nodes, command, environment, prepared, spread

JOB = Job("configs/tiny_cpu.yaml", "runs/a b", ("train.steps=3", "data.root=s3://x"), "latest")

# With a shared store, torch would use outdated rank addresses after a restart.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
HERE = Path("/private")
MEETING = {NAME: "/private"}


def parsed(arguments: list[str]):
    assert arguments[1:3] == ["-m", "torch.distributed.run"]
    return parse_args(arguments[3:])


def test_one_node_meets_in_a_file():
    line = command(JOB, Nodes(4), HERE, python="/env/bin/python")
    assert line[0] == "/env/bin/python"
    args = parsed(line)
    assert (args.nnodes, args.nproc_per_node) == ("1", "4")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "/private/torchrun")
    assert "store_type=file" in args.rdzv_conf.split(",")
    assert args.local_addr == "127.0.0.1"
    assert args.max_restarts == 0
    assert args.shutdown_timeout == SHUTDOWN_SECONDS > 60  # long enough for a save
    assert parsed(command(JOB, Nodes(4), HERE, max_restarts=3)).max_restarts == 3


def test_several_nodes_meet_where_they_are_told():
    args = parsed(command(JOB, Nodes(8, 32, "n1:29400", "job-7"), HERE))
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("32", "8", "job-7")
    assert args.rdzv_endpoint == "n1:29400"
    assert args.rdzv_conf == ""
    # With several nodes, the loopback address would be wrong.
    assert args.local_addr is None


def test_the_worker_gets_the_whole_job_as_its_only_argument():
    args = parsed(command(JOB, Nodes(2), HERE))
    assert args.module
    assert args.training_script == "launch.local.worker"
    assert len(args.training_script_args) == 1
    assert Job.parse(args.training_script_args[0]) == JOB
    assert json.loads(args.training_script_args[0])["run_dir"] == "runs/a b"


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(2, 4, "1"), (64, 8, "8"), (9, 4, "2"), (1, 1, "1")]
)
def test_threads_share_the_cores(cores, processes, threads):
    env = environment({"HOME": "/h"}, Nodes(processes), cores, HERE)
    assert env == {"HOME": "/h", "OMP_NUM_THREADS": threads, **OWN_STORE, **MEETING}
    inherited = {"HOME": "/h", NAME: "/of/another/job", START: "another", REPORTS: "/of/it"}
    env = environment(inherited, Nodes(processes, 2, "n1:29400"), cores, HERE)
    # Machines that share a rendezvous form one start.
    start = {START: "kimi-pretrain@n1:29400"}
    assert env == {"HOME": "/h", "OMP_NUM_THREADS": threads, **OWN_STORE, **start}


def test_the_user_s_number_of_threads_stays():
    given = {"OMP_NUM_THREADS": "3"}
    assert environment(given, Nodes(4), 64, HERE) == given | OWN_STORE | MEETING


def test_the_folder_of_one_node_is_private_and_goes_again():
    assert NAME == rendezvous.FOLDER
    before = os.umask(0)
    try:
        with prepared(JOB, Nodes(2)) as (line, env):
            folder = Path(env[NAME])
            assert parsed(line).rdzv_endpoint == str(folder / "torchrun")
            status = folder.stat()
            assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.getuid())
    finally:
        os.umask(before)
    assert not folder.exists()


def test_spread_over_nodes():
    assert spread(256, 32, "n1:1") == Nodes(8, 32, "n1:1")
    assert spread(4, 1, None) == Nodes(4)
    with pytest.raises(ValueError, match=r"4 processes .* over 3 nodes"):
        spread(4, 3, "n1:1")
    with pytest.raises(ValueError, match="--rendezvous HOST:PORT"):
        spread(4, 2, None)
