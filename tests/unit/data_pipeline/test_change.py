"""Mid-run changes of weights and sources: past rows stay, and the rest follows one fixed order."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from data_pipeline.access import open_fetcher, shard_versions
from data_pipeline.augment.config import AugmentConfig
from data_pipeline.config import BlendStage
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.plan.change import change, renumbered
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from data_pipeline.workers.workers import Workers
from tests.unit.data_pipeline.every_kind import WORDS, sentence
from tests.unit.data_pipeline.plain import made_index
from tests.unit.data_pipeline.test_order_grid import stream
from tests.unit.data_pipeline.test_quarantine_rules import PLANNED
from tests.unit.data_pipeline.test_tombstones import listed, run

MADE = {
    name: made_index(name, sizes, seed, media=media, text=(3, 200))
    for name, sizes, seed, media in (
        ("area", [60, 50], 3, 0.0),
        ("shots", [50, 60, 40], 2, 0.6),
        ("web", [80, 60, 40], 1, 0.0),
        ("zone", [70], 4, 0.6),
    )
}
FIRST = PLANNED.replace(sources={"shots": 1.0, "web": 1.0}, vision_token_ratio=None)
SECOND = {"area": 1.0, "shots": 1.0, "web": 2.0}
THIRD = {"shots": 1.0, "zone": 3.0}
PAST = {"area": 1.0, "web": 2.0}


def planner_of(sources, **more):
    config = FIRST.replace(sources=sources, **more)
    return Planner([MADE[name] for name in config.source_names], config)


def rows(planner, plans):
    """Return (source name, sample, part, position, row, start, length) of each sample, by step."""
    columns = ("index", "part", "position", "epoch", "row", "start", "length")
    return [
        [
            (planner.indices[source].name, *one)
            for source, *one in zip(
                plan.samples.source.tolist(),
                *(getattr(plan.samples, column).tolist() for column in columns),
                strict=True,
            )
        ]
        for plan in plans
    ]


def changed(sources, state, **more):
    planner = planner_of(sources, **more)
    told = change(planner, state)
    return planner, told


@pytest.mark.parametrize("steps", [0, 5, 9, 14])
def test_the_past_and_the_window_in_progress_stay_and_a_source_comes_in(steps):
    old = planner_of(FIRST.sources)
    before, states = run(old, steps + 30)
    old.load_state_dict(states[steps])
    planner, told = changed(SECOND, states[steps])
    assert told is not None
    assert told.sources == ["area"]
    plans, _ = run(planner, 40)
    mine, theirs = rows(planner, plans), rows(old, before)
    border = told.position
    assert border % FIRST.pack_window == 0
    both = zip(mine, theirs[steps:], strict=False)
    for found, expected in both:
        kept = [one for one in expected if one[3] < border]
        assert [one for one in found if one[3] < border] == kept
        if len(kept) < len(expected):
            break
    first = next(n for n, found in enumerate(mine) if any(one[3] >= border for one in found))
    assert steps + first + 1 == told.step
    late = [one for found in mine for one in found if one[3] >= border]
    assert {one[0] for one in late} == {*SECOND}
    assert sum(told.shares.values()) == pytest.approx(1)
    # Every old source continues after its last draw; a new source begins with its first.
    everything = [one for found in (*theirs[:steps], *mine) for one in found]
    everything.sort(key=lambda one: one[3])
    full = 64 * (max(one[3] for one in everything) // 64)
    for source in planner.sources:
        drawn = [one[1] for one in everything if one[0] == source.index.name and one[3] < full]
        expected = source.draw(np.arange(len(drawn)), []).sample.tolist()
        assert len(drawn) > 10
        assert drawn == expected


def test_twice_and_back_again_with_quarantine_tombstones_and_redaction(tmp_path):
    web = MADE["web"]
    gone = listed(tmp_path, [("web", web.key_of(n), 4) for n in range(20)])
    old = planner_of(FIRST.sources, tombstones=gone)
    assert old.quarantine(1, 30, 2)
    _, states = run(old, 12)
    state = old.with_quarantine(states[12])
    second, told = changed(SECOND, state, tombstones=gone)
    assert told is not None
    begun = second.state_dict()
    assert begun["quarantine"] == [[2, 30, 2]]
    assert begun["tombstones"] == state["tombstones"]
    assert begun["changes"] == [[told.step, told.position, ["area"]]]
    plans, after = run(second, 30)
    assert not {("web", n) for n in range(20)} & {
        one[:2] for found in rows(second, plans) for one in found
    }
    third, again = changed(THIRD, after[30], tombstones=gone, past_sources=PAST)
    assert again is not None
    assert again.sources == ["zone"]
    assert third.state_dict()["changes"] == [
        *begun["changes"],
        [again.step, again.position, ["zone"]],
    ]
    late = [one for found in rows(third, run(third, 40)[0]) for one in found]
    assert {one[0] for one in late if one[3] >= again.position} == {*THIRD}
    assert {one[0] for one in late if one[3] < again.position} <= {*SECOND}
    _, states = run(third, 20)
    back, last = changed(SECOND, states[20], tombstones=gone, past_sources={"zone": 1.0})
    assert last is not None
    assert last.sources == []
    assert len(json.dumps(back.state_dict())) < 1400
    assert {one[0] for found in rows(back, run(back, 40)[0]) for one in found} >= {*SECOND}


def test_a_source_of_a_later_stage_comes_in_with_it():
    _, states = run(planner_of(FIRST.sources), 9)
    late = [BlendStage(after_tokens=60_000, sources={"shots": 1.0, "zone": 1.0})]
    planner, told = changed(FIRST.sources, states[9], schedule=late)
    assert told is not None
    assert (told.sources, {*told.shares}) == (["zone"], {*FIRST.sources})
    found = rows(planner, run(planner, 60)[0])
    first = next(n for n, one in enumerate(found) if "zone" in {name for name, *_ in one})
    assert 9 + first > told.step
    assert planner.state_dict()["changes"] == [[told.step, told.position, ["zone"]]]


def test_redacted_samples_stay_those_of_their_sources():
    """New sources that sort before the existing sources do not shift their redactions."""
    web = replace(MADE["web"], redacted=(9, 3), made_as=MADE["web"].content_hash)
    shots = replace(MADE["shots"], redacted=(4,), made_as=MADE["shots"].content_hash)
    mine, old = {**MADE, "web": web, "shots": shots}, planner_of(FIRST.sources)
    _, states = run(old, 12)
    planner = Planner([mine[name] for name in ("shots", "web")], old.config)
    planner.load_state_dict(states[12])
    _, states = run(planner, 2)
    names = ("area", "shots", "web", "zone")
    assert renumbered(states[2], names)["redacted"] == states[2]["redacted"]
    second = Planner([mine[name] for name in sorted(SECOND)], planner_of(SECOND).config)
    assert change(second, states[2]) is not None
    assert second.tombstones.since == ((12, (0, 1, 2)),)
    assert second.state_dict()["redacted"] == states[2]["redacted"]


def test_a_restart_with_the_same_command_changes_nothing_more():
    _, states = run(planner_of(FIRST.sources), 9)
    planner, told = changed(SECOND, states[9])
    assert told is not None
    plans, after = run(planner, 20)
    for number in (0, 1, 7, 20):
        fresh, none = changed(SECOND, after[number])
        assert none is None
        assert fresh.state_dict() == after[number]
    once_more, same = changed(SECOND, states[9])  # killed before the first save
    assert same == told
    assert rows(once_more, run(once_more, 20)[0]) == rows(planner, plans)
    plain = planner_of(SECOND)
    plain.load_state_dict(after[7])  # and without the flag from then on
    assert rows(plain, run(plain, 5)[0]) == rows(planner, plans[7:12])
    # A second change before the first has begun replaces it.
    fresh, instead = changed({"shots": 1.0, "web": 5.0}, after[0], past_sources={"area": 1.0})
    assert instead is not None
    assert instead.position == told.position
    assert len(fresh.state_dict()["changes"]) == 1


def test_without_the_flag_it_is_refused_and_says_how():
    _, states = run(planner_of(FIRST.sources), 9)
    for sources, told in (
        (SECOND, "source 'area' is new.*--change-data"),
        ({"shots": 1.0, "web": 3.0}, "state field 'blend'.*--change-data"),
    ):
        with pytest.raises(ValueError, match=told):
            planner_of(sources).load_state_dict(states[9])


def test_what_cannot_be_changed_is_named():
    _, states = run(planner_of(FIRST.sources), 9)
    state = states[9]
    with pytest.raises(ValueError, match="source 'web' is part of this run's past and no longer"):
        changed({"area": 1.0, "shots": 1.0}, state)
    other = made_index("web", [80, 60, 40], 9, text=(3, 200))
    planner = Planner([MADE["shots"], other], FIRST.replace(sources={"shots": 1.0, "web": 9.0}))
    with pytest.raises(ValueError, match="source 'web' is .* what a run has drawn from never"):
        change(planner, state)
    bounds = {"shots": 1.0, "web": {"share": 1.0, "max_tokens": 50}}
    with pytest.raises(ValueError, match="source 'web' is .*max_tokens=50"):
        changed(bounds, state)
    with pytest.raises(ValueError, match="state field 'packing.seq_len'"):
        changed(SECOND, state, seq_len=200)
    with pytest.raises(ValueError, match="state field 'seed'"):
        changed(SECOND, state, seed=6)
    with pytest.raises(ValueError, match="state field 'sources' is missing"):
        changed(SECOND, {key: one for key, one in state.items() if key != "sources"})
    with pytest.raises(ValueError, match="past_sources names web, which is drawn from"):
        planner_of(FIRST.sources, past_sources={"web": 1.0})
    with pytest.raises(ValueError, match="state field 'changes' is"):
        planner_of(FIRST.sources).load_state_dict(state | {"changes": [[1, 3, ["web"]]]})


def test_a_new_source_may_be_augmented_and_one_of_the_past_not_otherwise():
    assert "shots" in FIRST.augment
    _, states = run(planner_of(FIRST.sources), 9)
    some = AugmentConfig(flip=0.25)
    planner, told = changed(
        {"shots": 1.0, "web": 1.0, "zone": 1.0}, states[9], augment=FIRST.augment | {"zone": some}
    )
    assert told is not None
    assert rows(planner, run(planner, 9)[0])
    for augment in ({}, {"shots": some}):
        with pytest.raises(ValueError, match="state field 'packing.augment'"):
            changed({"shots": 1.0, "web": 9.0}, states[9], augment=augment)


def test_a_state_of_the_schema_before_is_read():
    planner = planner_of(FIRST.sources)
    plans, states = run(planner, 9)
    old = {key: one for key, one in states[5].items() if key != "changes"} | {"schema": 2}
    planner.load_state_dict(old)
    assert planner.state_dict() == states[5]
    assert rows(planner, run(planner, 4)[0]) == rows(planner, plans[5:])
    changed_, told = changed(SECOND, old)
    assert told is not None
    assert changed_.state_dict()["schema"] == 3
    with pytest.raises(ValueError, match="state field 'schema' is 4"):
        planner.load_state_dict(states[5] | {"schema": 4})
    with pytest.raises(ValueError, match="state has fields"):
        planner.load_state_dict(old | {"schema": 3})


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Build three text sources in a folder."""
    folder = tmp_path_factory.mktemp("texts")
    store, rng = FolderStore(folder), np.random.default_rng(2)
    ranks = train_ranks([WORDS * 3], 300)
    store.put("words.tiktoken", ranks)
    tokenizer = Tokenizer(ranks, "words")
    found = {}
    for name, count in (("area", 200), ("notes", 300), ("web", 300)):
        given = [CrudeSample(f"{name}{i}", [TextSegment(sentence(rng))]) for i in range(count)]
        found[name] = ingest(given, store, name, tokenizer, 30_000)
    config = FIRST.replace(
        root=str(folder), tokenizer="words.tiktoken", augment={}, pack_window=48, rows_per_step=4,
        seq_len=120, sources={"notes": 1.0, "web": 1.0},
    )  # fmt: skip
    return config, tokenizer, found


SLOW = pytest.param((1, 2, 4), (0, 1, 2), 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("worlds", "workers", "stride"), [((1, 2, 4), (0, 2), 5), SLOW])
def test_one_digest_in_every_world_and_after_every_resume(texts, worlds, workers, stride):
    """A run changes after 6 and 13 of 24 steps, in several worlds and with several resumes."""
    config, tokenizer, found = texts
    stages = [
        (6, config),
        (13, config.replace(sources={"area": 2.0, "notes": 1.0, "web": 1.0})),
        (24, config.replace(sources={"notes": 3.0, "web": 1.0}, past_sources={"area": 2.0})),
    ]

    def planner_at(stage, state):
        config = stages[stage][1]
        planner = Planner([found[name] for name in config.source_names], config)
        if state is not None:
            change(planner, state)
        return planner

    def whole(pool, world, state=None, stage=0, done=0):
        """Return digests of the remaining steps, and the states before each and after the last."""
        digests, states = [], []
        for number in range(stage, len(stages)):
            planner = planner_at(number, state)
            told = stream(planner, planner.state_dict(), pool, world, stages[number][0] - done)
            states += [planner.state_dict(), *(after for _, after in told[:-1])]
            digests += [digest for digest, _ in told]
            state, done = told[-1][1], stages[number][0]
        return digests, [*states, state]

    reference: list[str] = []
    for number in workers:
        setup = partial(open_fetcher, config, shard_versions([*found.values()]), tokenizer.hash)
        with Workers(setup, number) as pool:
            for world in worlds:
                digests, states = whole(pool, world)
                assert len(set(digests)) == 24
                assert digests == (reference := reference or digests)
            for stop in range(1, 24, stride):
                stage = next(n for n, (end, _) in enumerate(stages) if stop < end)
                world = worlds[stop % len(worlds)]
                rest, _ = whole(pool, world, states[stop], stage, stop)
                assert rest == reference[stop:]
