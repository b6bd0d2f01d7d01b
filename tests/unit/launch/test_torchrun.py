"""torchrun's command line: golden pieces, checked once more by torchrun's own parser."""

import json

import pytest
from torch.distributed.run import parse_args

from launch.job import Job
from launch.torchrun import SHUTDOWN_SECONDS, Nodes, command, environment, spread

JOB = Job("configs/tiny_cpu.yaml", "runs/a b", ("train.steps=3", "data.root=s3://x"), "latest")

# After a restart torch would look for the ranks at the addresses that they had before.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def parsed(arguments: list[str]):
    assert arguments[1:3] == ["-m", "torch.distributed.run"]
    return parse_args(arguments[3:])


def test_one_node_meets_on_loopback():
    line = command(JOB, Nodes(4), python="/env/bin/python")
    assert line[0] == "/env/bin/python"
    args = parsed(line)
    assert (args.nnodes, args.nproc_per_node) == ("1", "4")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "127.0.0.1:0")
    assert args.local_addr == "127.0.0.1"
    assert args.max_restarts == 0
    assert args.shutdown_timeout == SHUTDOWN_SECONDS > 60  # a save comes to its end
    assert parsed(command(JOB, Nodes(4), max_restarts=3)).max_restarts == 3


def test_several_nodes_meet_where_they_are_told():
    args = parsed(command(JOB, Nodes(8, 32, "n1:29400", "job-7")))
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("32", "8", "job-7")
    assert args.rdzv_endpoint == "n1:29400"
    # Each node has its own address; the loopback would be wrong here.
    assert args.local_addr is None


def test_the_worker_gets_the_whole_job_as_its_only_argument():
    args = parsed(command(JOB, Nodes(2)))
    assert args.module
    assert args.training_script == "launch.worker"
    assert len(args.training_script_args) == 1
    assert Job.parse(args.training_script_args[0]) == JOB
    assert json.loads(args.training_script_args[0])["run_dir"] == "runs/a b"


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(2, 4, "1"), (64, 8, "8"), (9, 4, "2"), (1, 1, "1")]
)
def test_threads_share_the_cores(cores, processes, threads):
    env = environment({"HOME": "/h"}, processes, cores)
    assert env == {"HOME": "/h", "OMP_NUM_THREADS": threads, **OWN_STORE}


def test_the_user_s_number_of_threads_stays():
    given = {"OMP_NUM_THREADS": "3"}
    assert environment(given, 4, 64) == given | OWN_STORE


def test_spread_over_nodes():
    assert spread(256, 32, "n1:1") == Nodes(8, 32, "n1:1")
    assert spread(4, 1, None) == Nodes(4)
    with pytest.raises(ValueError, match=r"4 processes .* over 3 nodes"):
        spread(4, 3, "n1:1")
    with pytest.raises(ValueError, match="--rendezvous HOST:PORT"):
        spread(4, 2, None)
