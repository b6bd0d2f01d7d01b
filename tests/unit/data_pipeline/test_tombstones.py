"""Tombstones: earlier rows stay unchanged, and later rows hold none of the listed samples."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from data_pipeline.access import open_fetcher, shard_versions
from data_pipeline.config import DataConfig
from data_pipeline.index.manifest import sources_at
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.plan.once import once
from data_pipeline.plan.planner import DataUsedUp, Planner
from data_pipeline.plan.tombstones import (
    Entry,
    parse_entries,
    recorded_tombstones,
    tombstones_of,
)
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from data_pipeline.workers.workers import Workers
from tests.unit.data_pipeline.every_kind import WORDS, sentence
from tests.unit.data_pipeline.plain import made_index
from tests.unit.data_pipeline.test_order_grid import stream
from tests.unit.data_pipeline.test_quarantine_rules import PLANNED

CONFIG = PLANNED.replace(shard_window=2)
STEPS, FROM = 30, 13  # FROM counts from 1


@pytest.fixture(scope="module")
def made():
    return [
        made_index("shots", [25, 30, 20], 2, media=0.6, text=(3, 60)),
        made_index("web", [40, 30, 2], 1, text=(3, 500)),
    ]


def listed(folder, entries, name="list.jsonl"):
    """Write a list of (source, key, from_step); return its path."""
    keys = ("source", "key", "from_step")
    lines = (json.dumps(dict(zip(keys, one, strict=True))) for one in entries)
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def run(planner, steps, state=None):
    """Return the plans of the steps, and the states before each and after the last."""
    states, plans = [state or planner.state_dict()], []
    for _ in range(steps):
        plan, after = planner.plan(states[-1])
        plans.append(plan)
        states.append(json.loads(json.dumps(after)))
    return plans, states


def drawn(plans, since=0):
    """Return (source, sample) of the plans from `since` on."""
    pairs = set()
    for plan in plans[since:]:
        pairs |= set(zip(plan.samples.source.tolist(), plan.samples.index.tolist()))
    return pairs


@pytest.mark.parametrize("pack_window", [16, 64, 400])
def test_rows_before_are_the_same_and_none_is_drawn_after(made, tmp_path, pack_window):
    """Windows shorter than a step, of a few steps, and longer than the run so far."""
    config = CONFIG.replace(pack_window=pack_window)
    plain, states = run(Planner(made, config), STEPS)
    rng = np.random.default_rng(0)
    out = {(s, int(n)) for s in (0, 1) for n in rng.choice(made[s].num_samples, 20, replace=False)}
    out |= {(1, 70), (1, 71)}  # a whole shard
    path = listed(tmp_path, [(made[s].name, made[s].key_of(n), FROM) for s, n in sorted(out)])
    planner = Planner(made, config.replace(tombstones=path))
    plans, found = run(planner, STEPS)
    before = [plan.content_hash() for plan in plain[: FROM - 1]]
    assert [plan.content_hash() for plan in plans[: FROM - 1]] == before
    assert found[:FROM] == states[:FROM]
    assert drawn(plans[: FROM - 1]) & out
    assert len(drawn(plain, FROM - 1) & out) > 30
    assert not drawn(plans, FROM - 1) & out
    assert found[FROM]["tombstones"][0][:2] == [FROM - 1, len(out)]
    for plan in plans:
        check_rows(planner, plan)
    for step in range(STEPS):
        assert Planner(made, planner.config).state_at(step) == found[step]


def check_rows(planner, plan):
    """Check that samples fill a row without gaps, and that media are inside their samples."""
    samples, items = plan.samples, plan.items
    assert np.all(np.diff(samples.row) >= 0)
    first = np.concatenate([[True], np.diff(samples.row) > 0])[: len(samples)]
    before = np.concatenate([[0], (samples.start + samples.length)[:-1]])[: len(samples)]
    assert np.array_equal(samples.start, np.where(first, 0, before))
    owner = items.sample
    assert np.array_equal(items.row, samples.row[owner])
    assert np.all(items.start >= samples.start[owner])
    ends = samples.start + samples.length
    assert np.all(items.start + items.tokens < ends[owner])
    for source, index in enumerate(planner.indices):
        mine = samples.source[owner] == source
        at = samples.index[owner[mine]]
        lines = items.index_line[mine]
        assert np.all((index.item_ptr[at] <= lines) & (lines < index.item_ptr[at + 1]))
    for row in range(plan.num_rows):
        assert np.all(np.diff(plan.cu_seqlens(row)) > 0)


def test_in_a_window_that_is_in_progress_rows_lose_the_sample_and_nothing_else(made, tmp_path):
    config = CONFIG.replace(pack_window=400)
    plain, _ = run(Planner(made, config), 3)
    victim = int(plain[1].samples.index[0]), int(plain[1].samples.source[0])
    key = made[victim[1]].key_of(victim[0])
    path = listed(tmp_path, [(made[victim[1]].name, key, 2)])
    plan = run(Planner(made, config.replace(tombstones=path)), 2)[0][1]
    kept = (plain[1].samples.index != victim[0]) | (plain[1].samples.source != victim[1])
    for column in ("source", "index", "part", "position", "epoch", "varied", "row", "length"):
        found = getattr(plan.samples, column)
        assert np.array_equal(found, getattr(plain[1].samples, column)[kept])
        assert found.dtype == getattr(plain[1].samples, column).dtype
    assert plan.samples.start[0] == 0 != plain[1].samples.start[1]
    assert plan.num_tokens < plain[1].num_tokens


def test_a_run_goes_on_with_tombstones_that_came_in_while_it_was_away(made, tmp_path):
    """They apply from the earliest possible step; steps recorded from then on must stay."""
    _, states = run(Planner(made, CONFIG), 12)
    entry = ("web", made[1].key_of(3), 13)
    added = CONFIG.replace(tombstones=listed(tmp_path, [entry]))
    planner = Planner(made, added)
    planner.load_state_dict(states[12])
    plans, after = run(planner, 10)
    assert [plan.content_hash() for plan in plans] == [
        plan.content_hash() for plan in run(Planner(made, added), 22)[0][12:]
    ]
    late = listed(tmp_path, [(*entry[:2], 12)], "late.jsonl")
    for config, state, told in (
        (CONFIG.replace(tombstones=late), states[12], "is from_step=13"),
        (CONFIG.replace(tombstones=late), states[12], "1 samples from step 12 on, but 12 steps"),
        (CONFIG, after[-1], "put those lines back"),
        (
            CONFIG.replace(tombstones=listed(tmp_path, [entry, ("web", "made up", 13)][:1] * 2)),
            after[-1],
            None,
        ),
        (
            CONFIG.replace(
                tombstones=listed(tmp_path, [entry, ("web", made[1].key_of(4), 13)], "more.jsonl")
            ),
            after[-1],
            r"2 samples from step 13 on, but 22 steps are done, with 1 \(.*is from_step=23",
        ),
    ):
        if told is None:
            Planner(made, config).load_state_dict(state)
            continue
        with pytest.raises(ValueError, match=told):
            Planner(made, config).load_state_dict(state)
        with pytest.raises(ValueError, match=told):
            Planner(made, config).plan(state)


def test_tombstones_are_not_counted_by_max_quarantined(made, tmp_path):
    entries = [("web", made[1].key_of(n), 1) for n in range(30)]
    path = listed(tmp_path, entries)
    planner = Planner(made, CONFIG.replace(tombstones=path, max_quarantined=1))
    assert planner.quarantine(0, 3, 0)
    assert not drawn(run(planner, 20)[0]) & {(1, n) for n in range(30)}
    assert planner.notices()[-1] == "data.tombstones: 30 samples are not drawn from step 1 on"


def test_a_source_of_which_nothing_is_left_is_told(made, tmp_path):
    path = listed(tmp_path, [("web", made[1].key_of(n), 2) for n in range(made[1].num_samples)])
    planner = Planner(made, CONFIG.replace(tombstones=path))
    with pytest.raises(DataUsedUp, match="'web': every sample .* has a tombstone"):
        run(planner, 40)


def test_of_held_out_samples_none_is_measured(made, tmp_path):
    entries = [("shots", made[0].key_of(n), 99) for n in range(5)]
    data = CONFIG.replace(
        sources={"web": 1.0}, heldout={"shots": 1.0}, augment={}, vision_token_ratio=None,
        tombstones=listed(tmp_path, [*entries, ("web", made[1].key_of(0), 1)]),
    )  # fmt: skip
    out = tombstones_of(data, made[:1])
    assert len(out.listed) == 5
    plans = once(Planner(made[:1], data.of_heldout(), out), 10**9, 1)
    plain = once(Planner(made[:1], data.of_heldout()), 10**9, 1)
    assert drawn(plans) == drawn(plain) - {(0, n) for n in range(5)} < drawn(plain)
    assert Planner(made[1:], data).tombstones.filled() == {(1 - 1, 0)}


def counts(state):
    """Return (step, number of samples of each source) of the redactions in a state."""
    return [
        (step, {name: n for name, (n, _) in noted.items()}) for step, noted in state["redacted"]
    ]


def redacted_as(made, *order):
    """Return the sources, with samples of "web" redacted in some order."""
    return [made[0], replace(made[1], redacted=order, made_as=made[1].content_hash)]


def test_a_root_with_other_redactions_first_is_refused_and_named(made):
    """Samples redacted between two starts may come in any order, but no other redactions may."""
    planner = Planner(redacted_as(made, 9, 3), CONFIG)
    _, states = run(planner, 10)
    middle = Planner(redacted_as(made, 9, 3, 1, 5), CONFIG)
    middle.load_state_dict(states[10])
    plans, after = run(middle, 10)
    same = Planner(redacted_as(made, 3, 9, 5, 1), CONFIG)
    same.load_state_dict(after[5])
    again, end = run(same, 5)
    assert [one.content_hash() for one in again] == [one.content_hash() for one in plans[5:]]
    assert end[-1] == after[-1]
    told = (
        r"^state field 'redacted', from step 1 on: source 'web' has 2 redacted samples, and the "
        r"first 2 redacted in this root are others: it has them in another order.*data sync$"
    )
    for order in ((1, 3, 5, 9), (9, 1, 3, 5), (3, 1, 9)):
        with pytest.raises(ValueError, match=told):
            Planner(redacted_as(made, *order), CONFIG).load_state_dict(after[-1])
    with pytest.raises(ValueError, match="from step 11 on: source 'web' has 4 redacted samples"):
        Planner(redacted_as(made, 9, 3, 1, 20), CONFIG).load_state_dict(after[-1])
    for odd in ([[10, [0, 2]]], [[1, {"wep": [1, "x"]}]], 7, [[0, {"web": 3}]]):
        with pytest.raises(ValueError, match=r"field 'redacted' is .*expected \[\[step, {source"):
            planner.load_state_dict(states[10] | {"redacted": odd})


def test_a_record_brings_the_same_back_whatever_list_and_sources_say_by_now(made, tmp_path):
    path = listed(tmp_path, [("web", made[1].key_of(n), 4 + n) for n in range(9)])
    planner = Planner(redacted_as(made, 30, 12), CONFIG.replace(tombstones=path))
    planner.load_state_dict(run(planner, 6)[1][6])
    text = json.dumps(planner.tombstones.record())
    plans, states = run(planner, 9)
    now = redacted_as(made, 30, 12, 11)
    back = Planner(now, CONFIG, recorded_tombstones("the file", text, now))
    again, found = run(back, 9, states[0])
    assert [one.content_hash() for one in again] == [one.content_hash() for one in plans]
    assert found == states
    assert back.tombstones.record() == planner.tombstones.record()
    noted = json.loads(text)
    for key, value in (
        ("tombstones", [["web", 72, 3]]),
        ("tombstones", [["wep", 1, 3]]),
        ("tombstones", [["web", 1, -1]]),
        ("tombstones", [["web", 1, 2**70]]),
        ("tombstones", None),
    ):
        with pytest.raises(ValueError, match="the file: expected what a run on shots, web keeps"):
            recorded_tombstones("the file", json.dumps(noted | {key: value}), now)
    for text in ("[]", "{}", "nonsense"):
        with pytest.raises(ValueError, match="the file: expected what"):
            recorded_tombstones("the file", text, now)


def test_of_two_lines_and_a_redaction_of_one_sample_the_earliest_step_counts(made, tmp_path):
    """The line may come first or the redaction, and the lines may have any order."""
    web = made[1]
    steps = {3: (9, 5), 4: (5, 9), 6: (12,), 7: (3,)}
    entries = [("web", web.key_of(n), step) for n, some in steps.items() for step in some]
    sources = [made[0], replace(web, redacted=(6, 7), made_as=web.content_hash)]
    config = CONFIG.replace(tombstones=listed(tmp_path, entries))
    out = replace(tombstones_of(config, sources), since=((6, (0, 2)),))
    assert out.listed.tolist() == [[1, 3, 4], [1, 4, 4], [1, 6, 11], [1, 7, 2]]
    for step, wanted in ((1, set()), (2, {7}), (4, {7, 3, 4}), (5, {7, 3, 4}), (6, {*steps})):
        assert out.filled(step) == {(1, n) for n in wanted}
    assert out.filled() == {(1, n) for n in steps}


def test_redacted_samples_are_out_from_where_a_run_finds_them_so(made):
    _, states = run(Planner(made, CONFIG), 20)
    once_more = [made[0], replace(made[1], redacted=(3, 9), made_as=made[1].content_hash)]
    planner = Planner(once_more, CONFIG)
    planner.load_state_dict(states[10])
    plans, after = run(planner, 10)
    assert counts(after[-1]) == [(10, {"web": 2})]
    assert not drawn(plans) & {(1, 3), (1, 9)}
    assert "redacted and count as tombstones, from step 11 on" in planner.notices()[-1]
    # Resume in between: the state records the step of the redaction.
    middle = Planner(once_more, CONFIG)
    middle.load_state_dict(after[5])
    again, end = run(middle, 5)
    assert [one.content_hash() for one in again] == [one.content_hash() for one in plans[5:]]
    assert end[-1] == after[-1]
    # Later redactions are accepted; fewer redactions than recorded are refused.
    more = Planner([made[0], replace(once_more[1], redacted=(3, 9, 1))], CONFIG)
    more.load_state_dict(after[5])
    plans, last = run(more, 10)
    assert counts(last[-1]) == [(10, {"web": 2}), (15, {"web": 3})]
    told = (
        "source 'web': 3 samples were redacted and count as tombstones, 2 from step 11 on, 1 from"
    )
    assert more.notices()[-1].startswith(f"{told} step 16 on: ")
    assert not drawn(plans) & {(1, 1), (1, 3), (1, 9)}
    with pytest.raises(ValueError, match="replaced by an older one"):
        Planner(once_more, CONFIG).load_state_dict(last[-1])
    fresh = Planner(once_more, CONFIG)
    plans, found = run(fresh, 30)
    assert counts(found[0]) == [(0, {"web": 2})]
    assert not drawn(plans) & {(1, 3), (1, 9)}
    assert Planner(once_more, CONFIG).state_at(30) == found[30]


def test_a_list_that_other_runs_share_is_taken(texts, tmp_path):
    """Lines of other sources are reported; a line that seems meant for this run is refused."""
    config, tokenizer, indices, _ = texts
    store, alone = FolderStore(config.root), config.replace(sources={"web": 1.0})
    if "web_2" not in sources_at(store):
        reindex(store, "web", "web_2", tokenizer)  # the same samples
    mine, web = ("web", "web3", 5), indices[1:]

    def found(*entries, config=alone, indices=web):
        return tombstones_of(config.replace(tombstones=listed(tmp_path, entries)), indices)

    others = [("notes", "notes3", 1), ("clips", "web3", 1), ("web.2024", "c1", 1), ("a/b", "c", 1)]
    out = found(mine, *others)
    assert out.listed.tolist() == [[0, 3, 4]]
    told = "data.tombstones: lines of sources that this run does not read count for nothing here: "
    under = f"(not under {config.root})"
    names = f"a/b {under}, clips {under}, notes, web.2024 {under}"
    assert out.notices()[-1] == told + names
    for name, why in (
        ("wep", f"is not under {config.root}"),
        ("web_2", "is not read by this run and shares shards"),
    ):
        with pytest.raises(ValueError, match=f"line 2: source '{name}' {why}.*an 'web'.*'web4'"):
            found(mine, (name, "web4", 5))
        # the sample also has a line of its own source
        assert found(mine, (name, "web3", 1)).listed.tolist() == [[0, 3, 4]]
        assert found(mine, (name, "no such key", 1)).passed_over[0].startswith(name)
    heldout = config.replace(sources={"notes": 1.0}, heldout={"web": 1.0})
    assert found(mine, ("wep", "web4", 1), config=heldout, indices=indices[:1]).passed_over
    with pytest.raises(ValueError, match="did you mean 'web'"):  # with the held-out sources read
        found(mine, ("wep", "web4", 1), config=heldout, indices=web)


def test_a_line_of_a_list_ends_where_a_line_of_json_does():
    entry = {"source": "web", "key": "x", "from_step": 3, "request": "by \u2028 post\x85"}
    line = json.dumps(entry, ensure_ascii=False)
    found = parse_entries("list", f"{line}\r\n\n{line}")
    assert found == [(1, Entry("web", "x", 3)), (3, Entry("web", "x", 3))]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "line 1: 'nonsense'; expected {"),
        ('{"source": "web", "key": "x"}', "line 1: .*expected {"),
        ('{"source": "web", "key": 3, "from_step": 1}', "line 1: key is 3; expected"),
        ('{"source": "web", "key": "x", "from_step": 0}', "from_step is 0; expected the first"),
        ('{"source": "web", "key": "x", "from_step": true}', "from_step is True"),
        (f'{{"source": "web", "key": "x", "from_step": {2**62}}}', f"from_step is {2**62}"),
        ('\n{"source": "web", "key": "x", "from_step": 1}', "line 2: source 'web' has no sample"),
        ('{"source": "web", "key": "x", "from_step": 1, "why": 1}', "line 1: .*expected {"),
    ],
)
def test_bad_lists_are_told_in_one_line(made, tmp_path, text, told):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ValueError, match=told) as error:
        Planner(made, CONFIG.replace(tombstones=str(tmp_path / "bad.jsonl")))
    assert "bad.jsonl" in str(error.value)


# A thousand tombstones, read --------------------------------------------------------------------

GRID = DataConfig(
    root="a folder",
    sources={"notes": 1.0, "web": 2.0},
    seq_len=64,
    rows_per_step=16,
    pack_window=96,
    seed=4,
    tokenizer="words.tiktoken",
    tombstones="deletions/2026-11.jsonl",
    prefetch_steps=2,
    fetch_threads=2,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Build sources of 1,500 samples, and a list under their root of 1,000 from step 9 on."""
    folder = tmp_path_factory.mktemp("texts")
    store, rng = FolderStore(folder), np.random.default_rng(2)
    ranks = train_ranks([WORDS * 3], 300)
    store.put("words.tiktoken", ranks)
    tokenizer = Tokenizer(ranks, "words")
    indices = [
        ingest(
            [CrudeSample(f"{name}{i}", [TextSegment(sentence(rng))]) for i in range(count)],
            store, name, tokenizer, 100_000,
        )
        for name, count in (("notes", 500), ("web", 1000))
    ]  # fmt: skip
    chosen = rng.choice(1500, 1000, replace=False)
    pairs = {(0, int(n)) if n < 500 else (1, int(n) - 500) for n in chosen}
    folder.joinpath("deletions").mkdir()
    entries = [(indices[s].name, indices[s].key_of(n), 9) for s, n in sorted(pairs)]
    listed(folder / "deletions", entries, "2026-11.jsonl")
    return GRID.replace(root=str(folder)), tokenizer, indices, pairs


SLOW = pytest.param((1, 2, 4), (0, 1, 2), 40, range(0, 38, 3), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("worlds", "workers", "steps", "stops"), [((1, 2, 4), (0, 2), 16, (7, 8, 9, 12)), SLOW]
)
def test_a_thousand_from_a_step_on_in_every_world(texts, worlds, workers, steps, stops):
    """Every world reads the same digest per step; no listed sample is drawn where all would be."""
    config, tokenizer, indices, out = texts
    plain, _ = run(Planner(indices, config.replace(tombstones=None)), 60)
    plans, states = run(Planner(indices, config), 60)
    hashes = [[plan.content_hash() for plan in one] for one in (plain, plans)]
    assert hashes[0][:8] == hashes[1][:8]
    assert drawn(plain, 8) >= out
    assert not drawn(plans, 8) & out
    reference: list[str] = []
    for number in workers:
        setup = partial(open_fetcher, config, shard_versions(indices), tokenizer.hash)
        with Workers(setup, number) as pool:
            for world in worlds:
                planner = Planner(indices, config)
                found = stream(planner, planner.state_dict(), pool, world, steps)
                digests = [digest for digest, _ in found]
                assert digests == (reference := reference or digests)
                assert [state for _, state in found] == states[1 : steps + 1]
            for stop in stops:
                fresh = Planner(indices, config)
                fresh.load_state_dict(states[stop])
                found = stream(fresh, fresh.state_dict(), pool, worlds[stop % len(worlds)], 2)
                assert [digest for digest, _ in found] == reference[stop : stop + 2]
