"""Tests of storage in `plan --step`: reads against the fetcher's, stalls computed by hand."""

import numpy as np
import pytest

from data_pipeline.access import open_tokenizer
from data_pipeline.fetch import Fetcher, Needs, resolve
from data_pipeline.index.manifest import read_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import load_config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.memory.states import divide_config
from kimi_pretrain.tools.step_storage import checkpoint_bytes
from tests.unit.launch.plan_command import (
    NO_MEDIA,
    RANKS,
    SMALL,
    STAGES_OF_TWO,
    found_by,
    run,
)

LAYOUTS = {
    "stages and replicas": STAGES_OF_TWO,
    "one stage": (*STAGES_OF_TWO, "layout.pp=1", "layout.dp=4"),
    "shared rows": (*STAGES_OF_TWO, "layout.dp=1", "layout.cp=2"),
    "shared items": (*STAGES_OF_TWO, "dep.max_split=2"),
    "text": (*STAGES_OF_TWO, *NO_MEDIA),
}


def spans_of_ranks(root, steps: int, *overrides: str, fetcher: bool = False):
    """Yield for each step a list with (spans, requests sent) of each rank.

    First and last stages need the rows of their replica; each rank needs the items it encodes.
    """
    config = load_config("tiny_cpu", [*SMALL, *overrides])
    layout, store = config.layout, FolderStore(root)
    planner = Planner([read_index(store, name) for name in config.data.source_names], config.data)
    fetch = Fetcher(store, open_tokenizer(config.data, store), 1) if fetcher else None
    state, vision = planner.state_dict(), VisionPlanner(config)
    shared = layout.cp * layout.tp
    for _ in range(steps):
        plan, state = planner.plan(state)
        encoded, ranks = vision.plan(plan).rank, []
        for rank in range(RANKS):
            stage, replica = rank // (shared * layout.dp), rank // shared % layout.dp
            each = plan.num_rows // layout.dp
            text = stage in (0, layout.pp - 1)
            rows = range(replica * each, (replica + 1) * each) if text else range(0)
            items = [item for item, one in enumerate(encoded) if one == rank]
            needs = Needs(np.array(rows, np.int64), np.array(items, np.int64))
            request = resolve(planner, plan, needs)
            spans = {one.span for one in (*request.texts, *request.files)}
            sent = fetch(request).requests if fetch else None
            ranks.append((spans, sent))
        yield ranks
    if fetch:
        fetch.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_and_requests_are_those_of_the_fetcher(root, name):
    """Requests match the count of the fetcher's store; bytes match a count span by span."""
    overrides = (*LAYOUTS[name], "data.requests_per_second=null")
    found = found_by(root, "--step", "--steps", "2", *overrides)
    for step, ranks in zip(
        found["loader"], spans_of_ranks(root, 2, *overrides, fetcher=True), strict=True
    ):
        size = []
        for spans, _ in ranks:
            read, reach, object_ = 0, -1, None
            for key, begin, length in sorted(spans):
                if key != object_ or begin > reach + 65536:
                    object_, reach = key, begin
                read += max(0, begin + length - reach)
                reach = max(reach, begin + length)
            size.append(read)
        sent = [one for _, one in ranks]
        assert (step["bytes"], step["requests"]) == (sum(size), sum(sent))
        nodes = [(size[n] + size[n + 1], sent[n] + sent[n + 1]) for n in (0, 2)]  # 2 ranks each
        assert step["node_bytes"] == max(one for one, _ in nodes)
        assert step["node_requests"] == max(one for _, one in nodes)
        assert step["seconds"] == 0.0  # no storage speed is given
    assert found["mean"]["loader"] == 0.0


def test_a_node_s_cache_reads_each_block_once(root, tmp_path):
    block = 4096
    cache = f"data.cache={{folder: {tmp_path}, block_bytes: {block}, disk_bytes: 1000000}}"
    found = found_by(root, "--step", "--steps", "3", *STAGES_OF_TWO, cache)
    store, have = FolderStore(root), [set(), set()]
    for step, ranks in zip(found["loader"], spans_of_ranks(root, 3, *STAGES_OF_TWO), strict=True):
        size, sent = [0, 0], [0, 0]
        for node in range(2):
            wanted = {
                (key, number)
                for spans, _ in ranks[2 * node : 2 * node + 2]
                for key, begin, length in spans
                for number in range(begin // block, (begin + length - 1) // block + 1)
            } - have[node]
            for key, number in wanted:
                size[node] += min(block, store.head(key).size - number * block)
                sent[node] += (key, number - 1) not in wanted
            have[node] |= wanted
        assert (step["bytes"], step["requests"]) == (sum(size), sum(sent))
        assert (step["node_bytes"], step["node_requests"]) == (max(size), max(sent))
    assert found["loader"][0]["bytes"] > found["loader"][2]["bytes"]


def test_a_run_of_blocks_is_cut_where_a_request_would_be_too_long(root, tmp_path, monkeypatch):
    """With at most two blocks per request, a run of n blocks takes n / 2 requests, rounded up."""
    monkeypatch.setattr("kimi_pretrain.tools.step_storage.RUN_BYTES", 8192)
    cache = f"data.cache={{folder: {tmp_path}, block_bytes: 4096, disk_bytes: 1000000}}"
    (step,) = found_by(root, "--step", "--steps", "1", *STAGES_OF_TWO, cache)["loader"]
    sent = 0
    (ranks,) = spans_of_ranks(root, 1, *STAGES_OF_TWO)
    for node in range(2):
        wanted = sorted({
            (key, number)
            for spans, _ in ranks[2 * node : 2 * node + 2]
            for key, begin, length in spans
            for number in range(begin // 4096, (begin + length - 1) // 4096 + 1)
        })  # fmt: skip
        run_length = 0
        for place, (key, number) in enumerate(wanted):
            follows = place and wanted[place - 1] == (key, number - 1)
            run_length = run_length + 1 if follows else 1
            sent += run_length % 2
    assert step["requests"] == sent


def test_a_slow_store_is_waited_for_and_said_to_bind(root):
    """A step waits for the slowest node's bytes or requests as far as they outlast the step."""
    given = ("--step", "--steps", "2", *STAGES_OF_TWO, "dep.flops_per_second=1e12",
             "checkpoint.every=null", "data.requests_per_second=null")  # fmt: skip
    plain = found_by(root, *given)
    for more, key, rate in (
        (("--storage=1e5",), "node_bytes", 1e5),
        (("data.requests_per_second=20",), "node_requests", 20.0),
    ):
        found = found_by(root, *given, *more)
        for step, before, reads in zip(
            found["steps"], plain["steps"], found["loader"], strict=True
        ):
            assert reads["seconds"] == pytest.approx(reads[key] / rate)
            assert reads["seconds"] > before["total"]
            assert step["loader"] == pytest.approx(reads["seconds"] - before["total"])
            assert step["total"] == pytest.approx(reads["seconds"])
        assert found["advice"][0].startswith("loader: ")
        assert "data.cache" in found["advice"][0]
        assert found["drawn"]["lanes"][0]["intervals"][0]["kind"] == "wait for data"
        first = found["drawn"]["lanes"][0]["intervals"][0]["end"]
        assert first == pytest.approx(max(step["loader"] for step in found["steps"]))
        last = max(one["end"] for lane in found["drawn"]["lanes"] for one in lane["intervals"])
        slowest = found["steps"][found["drawn"]["step"] - 1]
        assert last == pytest.approx(slowest["total"])
        assert "storage does not keep up" in run(root, *given, *more).output
    unfetched = found_by(root, *given, "--storage=1e9", "data.prefetch_steps=0")
    for step, reads in zip(unfetched["steps"], unfetched["loader"], strict=True):
        assert step["loader"] == pytest.approx(reads["node_bytes"] / 1e9)  # no prefetch
    enough = run(root, *given, "--storage=1e9").output
    assert "storage keeps up" in enough
    assert "whether storage keeps up is not known" in run(root, *given).output


SAVES = ("--step", "--steps", "1", *STAGES_OF_TWO, "dep.flops_per_second=1e10", *NO_MEDIA,
         "checkpoint.every=4", "data.requests_per_second=null")  # fmt: skip


def test_a_save_stalls_for_what_its_copy_outlasts_the_step(root):
    update = (
        "dep.update_cost={vocabulary: 0.1, dense_layer: 0, expert_layer: 0, expert: 0, encoder: 0}"
    )
    overrides = [one for one in SAVES[3:] if not one.startswith("--")]
    config = load_config("tiny_cpu", [*SMALL, *overrides])
    written = checkpoint_bytes(config, divide_config(config))
    plain = found_by(root, *SAVES, update, "checkpoint.every=null")["steps"][0]
    assert plain["checkpoint"] == 0.0
    assert found_by(root, *SAVES, update)["steps"][0]["checkpoint"] == 0.0  # hidden by a step
    host = float(written.max()) / (3 * plain["total"])  # the copy takes 3 steps
    found = found_by(root, *SAVES, update, f"--host={host}")
    assert found["checkpoint"]["rank_bytes"] == written.max()
    assert found["checkpoint"]["bytes"] == written.sum()
    assert found["checkpoint"]["copying"] == pytest.approx(3 * plain["total"])
    assert found["checkpoint"]["writing"] is None
    (step,) = found["steps"]
    stall = 3 * plain["total"] - (plain["total"] - plain["update"])
    assert step["checkpoint"] == pytest.approx(stall / 4)
    assert step["total"] == pytest.approx(plain["total"] + stall / 4)
    assert found["advice"][0].startswith("checkpoint: ")
    assert "asynchronous" not in found["advice"][0]
    drawn = found["drawn"]["lanes"][0]["intervals"][-1]
    assert drawn["kind"] == "checkpoint"
    assert drawn["end"] - drawn["begin"] == pytest.approx(stall / 4)
    assert drawn["end"] == pytest.approx(step["total"])


def test_a_save_that_is_not_written_before_the_next_is_waited_for(root):
    """The node whose two ranks write the most bytes determines the wait."""
    config = load_config("tiny_cpu", [*SMALL, *SAVES[3:]])
    written = checkpoint_bytes(config, divide_config(config)).tolist()
    plain = found_by(root, *SAVES)["steps"][0]["total"]
    storage = max(written[0] + written[1], written[2] + written[3]) / (10 * plain)
    found = found_by(root, *SAVES, f"--storage={storage}")
    assert found["checkpoint"]["writing"] == pytest.approx(10 * plain)
    copying = found["checkpoint"]["copying"]
    assert copying == pytest.approx(max(written) / 40e9)
    loader = found["steps"][0]["loader"]
    assert found["steps"][0]["checkpoint"] == pytest.approx((copying + 6 * plain) / 4)
    assert found["steps"][0]["total"] == pytest.approx(plain + (copying + 6 * plain) / 4 + loader)
    waits = found_by(root, *SAVES, f"--storage={storage}", "checkpoint.asynchronous=false")
    assert waits["steps"][0]["checkpoint"] == pytest.approx((copying + 10 * plain) / 4)
    assert any("checkpoint.asynchronous=true" in line for line in waits["advice"])
    told = found_by(root, *SAVES, f"--storage={storage}", "--save-stall=0.5")
    assert told["steps"][0]["checkpoint"] == pytest.approx(0.5 / 4)


def test_what_storage_does_is_printed(root):
    output = run(root, *SAVES, "--storage=1e6", "--save-stall=0.25").output
    (line,) = [one for one in output.splitlines() if one.startswith("checkpoint: every")]
    assert "checkpoint: every 4 steps " in line
    assert line.endswith("; a save stalls 0.25 s")
    assert "--storage 1e+06 bytes/s, --save-stall 0.25 s" in output
    assert (
        "checkpoint: none is written on its own"
        in run(root, *SAVES, "checkpoint.every=null").output
    )
    alone = run(root, "--storage", "1e9", "--host", "1e9", code=2).stderr
    assert "--host, --storage without --step" in alone
