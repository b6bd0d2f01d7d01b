import json
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.augment.config import (
    AffineConfig,
    AugmentConfig,
    ColourConfig,
    CropConfig,
    JpegConfig,
)
from data_pipeline.config import DataConfig
from data_pipeline.plan.once import once as take_once
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.report import blend_report
from moonvit3d.geometry import PatchLimits
from tests.resume import assert_resumes_anywhere
from tests.unit.data_pipeline.plain import made_index, slow_sample, slow_substitute, slow_window

LIMITS = PatchLimits(image=400, frame=100, side=512)
CONFIG = DataConfig(
    root="unused",
    sources={"web": 3.0, "captions": 1.0, "clips": 2.0},
    seq_len=300,
    rows_per_step=7,
    vision_token_ratio=0.2,
    pack_window=64,
    shard_window=2,
    seed=5,
    limits=LIMITS,
    split_text=False,
    shrink_media=False,
)


def made_indices():
    return [
        made_index("web", [40, 30, 50], 1),
        made_index("captions", [25, 0, 10, 30], 2, media=0.6, text=(3, 60)),
        made_index("clips", [12, 12], 3, media=0.7, video=0.9, side=300),
    ]


@pytest.fixture(scope="module")
def indices():
    return made_indices()


@pytest.fixture(scope="module")
def planner(indices):
    return Planner(indices, CONFIG)


def weights_of(planner):
    return planner.mixture.segments[0].weights


def run(planner, steps, state=None):
    state = state or planner.state_dict()
    plans = []
    for _ in range(steps):
        plan, state = planner.plan(state)
        plans.append(plan)
    return plans, state


def row_stream(plans):
    """Return each row of the steps as bytes: samples and items without step and row numbers."""
    rows = []
    for plan in plans:
        for row in range(plan.num_rows):
            parts = []
            for table in (plan.samples, plan.items):
                here = table.row == row
                for name, column in vars(table).items():
                    if name not in ("row", "sample"):
                        parts.append(column[here].tobytes())
            rows.append(b"|".join(parts))
    return rows


def test_rows_equal_the_slow_twin(planner):
    plans, _ = run(planner, 12)
    got = []
    for plan in plans:
        table = plan.samples
        columns = (table.source, table.index, table.position, table.epoch, table.start)
        for row in range(plan.num_rows):
            here = table.row == row
            got.append(list(zip(*(c[here].tolist() for c in (*columns, table.length)))))
    expected, window = [], 0
    while len(expected) < len(got):
        expected += slow_window(planner.indices, CONFIG, weights_of(planner), window)
        window += 1
    assert window > 2
    assert got == expected[: len(got)]


def test_media_stand_where_the_samples_tokens_say(planner):
    plans, _ = run(planner, 6)
    seen = {"image": 0, "chunk": 0}
    for plan in plans:
        items, samples = plan.items, plan.samples
        assert (np.diff(items.row * 10**6 + items.start) > 0).all()
        place = 0
        for sample in range(samples.index.size):
            index = planner.indices[samples.source[sample]]
            symbols, slow_items = slow_sample(index, samples.index[sample], LIMITS)
            assert len(symbols) == samples.length[sample]
            for item, start, pads, shape in slow_items:
                assert items.sample[place] == sample
                assert items.index_line[place] == item
                assert items.row[place] == samples.row[sample]
                assert items.start[place] == samples.start[sample] + start
                assert items.tokens[place] == pads
                got = (items.frames[place], items.grid_h[place], items.grid_w[place])
                assert got == tuple(shape)
                assert items.patches[place] == np.prod(shape)
                assert items.kind[place] == index.item_kind[item]
                assert items.media[place] == index.item_media[item]
                assert items.chunk[place] == index.item_chunk[item]
                seen["chunk" if items.kind[place] else "image"] += 1
                place += 1
        assert place == len(items)
        assert plan.vision_tokens == items.tokens.sum()
        assert plan.text_tokens + plan.vision_tokens == plan.num_tokens == samples.length.sum()
    assert min(seen.values()) > 10


def test_cu_seqlens_cover_the_row(planner):
    plan = run(planner, 1)[0][0]
    for row in range(plan.num_rows):
        here = plan.samples.row == row
        ends = np.cumsum(plan.samples.length[here])
        expected = [0, *ends] if ends[-1] == plan.seq_len else [0, *ends, plan.seq_len]
        assert plan.cu_seqlens(row).tolist() == expected
        assert plan.cu_seqlens(row).dtype == np.int32
    full = replace(plan, seq_len=int(plan.cu_seqlens(0)[-2]))
    assert full.cu_seqlens(0)[-1] == full.seq_len
    assert np.unique(full.cu_seqlens(0)).size == full.cu_seqlens(0).size
    with pytest.raises(ValueError, match="row 7 of a step of 7 rows"):
        plan.cu_seqlens(7)


@pytest.mark.parametrize("rows_per_step", [1, 3, 5, 40])
def test_the_row_stream_does_not_depend_on_the_batch(indices, planner, rows_per_step):
    whole = row_stream(run(planner, 18)[0])  # 126 rows
    other = Planner(indices, CONFIG.replace(rows_per_step=rows_per_step))
    got = row_stream(run(other, 126 // rows_per_step)[0])
    assert got == whole[: len(got)]


def test_nothing_but_data_and_seed_enters(indices, planner):
    hashes = [plan.content_hash() for plan in run(planner, 4)[0]]
    mixed = dict(reversed(CONFIG.sources.items()))
    other = CONFIG.replace(sources=mixed, prefetch_steps=9, fetch_threads=1, root="s3://else")
    again = Planner(indices[::-1], other)
    assert [plan.content_hash() for plan in run(again, 4)[0]] == hashes
    seeded = Planner(indices, CONFIG.replace(seed=6))
    assert seeded.plan(seeded.state_dict())[0].content_hash() not in hashes
    assert len(set(hashes)) == 4


class Steps:
    """A planner driven like a loader, for the shared resume test."""

    def __init__(self, indices, config):
        self.planner = Planner(indices, config)
        self.state = self.planner.state_dict()

    def __next__(self):
        plan, self.state = self.planner.plan(self.state)
        return plan.content_hash()

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.planner.load_state_dict(json.loads(json.dumps(state)))
        self.state = self.planner.state_dict()


def test_resumes_anywhere(indices):
    assert_resumes_anywhere(lambda: Steps(indices, CONFIG), 11)


def test_any_step_can_be_asked_for_first(indices, planner):
    state = planner.state_dict()
    fresh = Planner(indices, CONFIG)
    for step in range(12):
        assert fresh.state_at(step) == state
        _, state = planner.plan(state)
    assert len(json.dumps(state)) < 1024


def test_plan_keeps_the_state_it_is_given(planner):
    state = planner.state_dict()
    before = json.dumps(state)
    planner.plan(state)
    assert json.dumps(state) == before
    assert planner.plan(state)[0].content_hash() == planner.plan(state)[0].content_hash()


def test_epochs_use_every_sample_once(indices):
    planner = Planner(indices, CONFIG.replace(seq_len=2000, rows_per_step=3))
    assert not any(source["refused"] for source in blend_report(planner)["sources"].values())
    plans, state = run(planner, 60)
    assert state["window"] > 10
    columns = [(p.samples.source, p.samples.index, p.samples.epoch) for p in plans]
    source, index, epoch = (np.concatenate(c) for c in zip(*columns))
    for number, content in enumerate(planner.indices):
        mine = source == number
        last = epoch[mine].max()
        assert last >= 1
        for e in range(last):
            seen = np.sort(index[mine & (epoch == e)])
            # the window in progress may still hold samples of the epoch before last
            assert np.unique(seen).size == seen.size
            assert e == last - 1 or seen.tolist() == list(range(content.num_samples))


def test_the_report_of_a_blend_counts_lengths_and_draws(indices, planner):
    """Compare with sums over the slow reference of each sample, and with the rows of a long run."""
    report, expected, weights = blend_report(planner), {}, weights_of(planner)
    for number, index in enumerate(planner.indices):
        samples = [slow_sample(index, i, LIMITS) for i in range(index.num_samples)]
        lengths = [len(symbols) for symbols, _ in samples]
        taken = [slow_substitute(index, i, lengths, CONFIG.seq_len) for i in range(len(samples))]
        samples = [samples[i] for i in taken]  # substitutes replace the samples that do not fit
        tokens = sum(len(symbols) for symbols, _ in samples)
        vision = sum(pads for _, items in samples for _, _, pads, _ in items)
        expected[index.name] = (
            tokens / len(samples), vision / tokens, weights[number] / sum(weights)
        )  # fmt: skip
    rates = {name: mean * share for name, (mean, _, share) in expected.items()}
    whole = 0.0
    assert {*report["sources"]} == {*expected}
    for name, (mean, inside, share) in expected.items():
        found, of_tokens = report["sources"][name], rates[name] / sum(rates.values())
        assert found["mean_tokens"] == pytest.approx(mean)
        assert found["vision_share"] == pytest.approx(inside)
        assert found["draw_share"] == pytest.approx(share)
        assert found["token_share"] == pytest.approx(of_tokens)
        whole += of_tokens * inside
    assert report["vision_token_ratio"] == pytest.approx(whole)
    assert report["blend"] == [[0, list(weights)]]
    assert (report["ends_at"], report["manifest"]) == (None, planner.manifest)
    plans, _ = run(planner, 60)
    source = np.concatenate([plan.samples.source for plan in plans])
    for number, index in enumerate(planner.indices):
        share = report["sources"][index.name]["draw_share"]
        assert (source == number).mean() == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_vision_share_of_a_long_run_is_the_ratio(indices, ratio):
    config = CONFIG.replace(vision_token_ratio=ratio, pack_window=512, rows_per_step=400)
    planner = Planner(indices, config)
    assert blend_report(planner)["vision_token_ratio"] == pytest.approx(ratio, abs=1e-5)
    plans, _ = run(planner, 8)
    vision, total = sum(p.vision_tokens for p in plans), sum(p.num_tokens for p in plans)
    assert vision / total == pytest.approx(ratio, rel=0.05)


def test_too_long_samples_are_replaced_inside_their_shard(indices):
    config = CONFIG.replace(seq_len=90, vision_token_ratio=None)
    planner = Planner(indices, config)
    report = blend_report(planner)["sources"]
    assert all(report[name]["refused"] > 0 for name in config.sources)
    assert report["web"]["longest"] > 90
    plans, _ = run(planner, 30)
    rows = []
    for window in range(4):
        rows += slow_window(planner.indices, config, weights_of(planner), window)
    got = np.concatenate([p.samples.index for p in plans])
    expected = [sample[1] for row in rows for sample in row]
    assert got.size > len(expected) == 4 * 64
    assert got[: len(expected)].tolist() == expected
    assert max(p.samples.length.max() for p in plans) <= 90
    captions = indices[1]
    lengths = [len(slow_sample(captions, i, LIMITS)[0]) for i in range(captions.num_samples)]
    bounds = rf"\(shortest {min(lengths)}, longest {max(lengths)}\)"
    told = rf"'captions': all 65 samples .* row of 3 tokens {bounds}"
    with pytest.raises(ValueError, match=told):
        Planner(indices, config.replace(seq_len=3))


def test_a_source_with_a_whole_shard_too_long_takes_the_next_shards_samples():
    index = made_index("a", [3, 4], text=(3, 9))
    text = np.array([500, 500, 500, 5, 600, 6, 7], np.int32)
    index = replace(index, piece_tokens=text)
    config = CONFIG.replace(sources={"a": 1.0}, vision_token_ratio=None)
    planner = Planner([index], config)
    drawn = [p.samples.index.tolist() for p in run(planner, 1)[0]]
    assert set(sum(drawn, [])) == {3, 5, 6}
    assert slow_window([index], config, weights_of(planner), 0)[0][0][1] == drawn[0][0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 1),
        ("manifest", "0" * 64),
        ("seed", 6),
        ("window", -1),
        ("row", 1.5),
        ("step", True),
        ("blend", []),
        ("blend", None),
        ("blend", [[7, [1]]]),
        ("quarantine", [[9, 0, 0]]),
        ("quarantine", [[0, -1, 0]]),
        ("quarantine", [[0, 99999, 0]]),
        ("quarantine", [[3, 0, 0]]),
        ("quarantine", [[-1, 0, 0]]),
        ("quarantine", [[0, 65, 0]]),  # captions has 65 samples, numbered from 0
        ("quarantine", [[0]]),
        ("tokens", 5),
        ("tokens", [5]),
        ("tokens", [5, 6, 7]),
        ("tokens", [5, -1]),
        ("tokens", [True, 1]),
        ("tokens", [1.0, 1]),
        ("changes", [[0, 64, []]]),
        ("changes", [[1, 63, []]]),
        ("changes", [[1, 64]]),
        ("packing", None),
    ],
)
def test_a_wrong_state_is_refused_by_field(planner, field, value):
    state = planner.state_dict() | {field: value}
    with pytest.raises(ValueError, match=f"state field '{field}"):
        planner.load_state_dict(state)
    with pytest.raises(ValueError, match=f"state field '{field}"):
        planner.plan(state)


def test_a_state_at_every_bound_is_taken(planner):
    """The last sample, the first step of a change, no tokens yet."""
    bounds = {"quarantine": [[0, 64, 0], [2, 0, 0]], "changes": [[1, 64, []]], "tokens": [0, 0]}
    planner.plan(planner.state_dict() | bounds)


def test_other_data_and_missing_fields_are_refused(indices, planner):
    other = Planner([made_index("web", [40, 30, 51], 1), *indices[1:]], CONFIG)
    with pytest.raises(ValueError, match="source 'web' holds other data than it did") as error:
        other.load_state_dict(planner.state_dict())
    assert "captions' " not in str(error.value)  # the other sources are the same
    state = planner.state_dict()
    del state["row"]
    with pytest.raises(ValueError, match="state has fields"):
        planner.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'row' is 9999, but window 0 has \d+ rows"):
        planner.plan(planner.state_dict() | {"row": 9999})
    with pytest.raises(
        ValueError, match=r"sources captions, clips, web; indices are of captions, clips$"
    ):
        Planner(indices[1:], CONFIG)


def test_sources_that_come_and_go_are_named(indices, planner):
    shares = {"captions": 0.5, "clips": 0.2, "webs": 0.3}
    renamed = made_index("webs", [40, 30, 50], 1)
    other = Planner([renamed, *indices[1:]], CONFIG.replace(sources=shares))
    with pytest.raises(ValueError, match="'web' is no longer .* 'webs' is new") as error:
        other.load_state_dict(planner.state_dict())
    assert "other data" not in str(error.value)


def test_a_state_that_does_not_name_the_sources_goes_on(planner):
    state = planner.state_dict()
    del state["sources"]  # as in states of earlier versions
    (ours, after), (theirs, later) = planner.plan(planner.state_dict()), planner.plan(state)
    assert ours.samples.index.tolist() == theirs.samples.index.tolist()
    assert after == later
    with pytest.raises(ValueError, match="the state does not say which source differs"):
        planner.load_state_dict(state | {"manifest": "0" * 64})


def test_a_change_of_shares_keeps_the_past_and_the_window_in_progress(indices, planner):
    changed = Planner(indices, CONFIG.replace(vision_token_ratio=0.05))
    _, state = run(planner, 5)
    assert state["row"] > 0
    with pytest.raises(ValueError, match=r"state field 'blend' ends with weights"):
        changed.plan(state)
    moved = changed.with_own_blend(state)
    changed.load_state_dict(moved)
    border = (state["window"] + 1) * CONFIG.pack_window
    old, new = run(planner, 9, state)[0], run(changed, 40, moved)[0]
    old_rows, new_rows = row_stream(old), row_stream(new)
    kept = planner._content(state["window"], planner.mixture, 0)
    left = kept.packed.num_rows - state["row"]
    assert new_rows[:left] == old_rows[:left]
    assert new_rows[left:][:30] != old_rows[left:][:30]
    later = [p for p in new if p.samples.position.min() >= border]
    share = sum(p.vision_tokens for p in later) / sum(p.num_tokens for p in later)
    assert share < 0.09
    first_own = min(p.samples.position.min() for p in later)
    assert first_own >= border
    assert len(json.dumps(moved)) < 1024
    assert changed.with_own_blend(moved) == moved
    # a change before the first row replaces the only segment
    fresh = changed.with_own_blend(planner.state_dict())
    assert fresh == Planner(indices, changed.config).state_dict()


def test_config_names_field_value_and_allowed():
    for change, message in [
        ({"seq_len": 1}, "seq_len\n.* greater than or equal to 3"),
        ({"rows_per_step": True}, "rows_per_step\n.* valid integer"),
        ({"vision_token_ratio": 1.0}, "vision_token_ratio\n.* allowed: between 0 and 1"),
        ({"sources": {}}, "sources\n.* empty; name"),
        ({"sources": {"a": 0}}, "'a' is 0.0; allowed"),
        ({"sources": {"a": float("nan")}}, "'a' is nan; allowed"),
        ({"root": ""}, "root is empty"),
        ({"seed": -1}, "seed\n.* greater than or equal to 0"),
        ({"fetch_threads": 0}, "fetch_threads\n"),
        ({"prefetch_steps": 2.0}, "prefetch_steps\n.* valid integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            CONFIG.replace(**change)


def test_the_hash_of_the_augmentation_stays_what_checkpoints_hold():
    """A different text for the same settings would make every augmented run refuse to resume."""
    settings = AugmentConfig(
        flip=0.5,
        affine=AffineConfig(degrees=10.0, scale=(0.5, 1.5)),
        crop=CropConfig(area=(0.25, 1.0)),
        colour=ColourConfig(brightness=0.1),
        jpeg=JpegConfig(quality=(60, 95)),
        variants=True,
    )
    augment = {"web": settings, "captions": AugmentConfig(turn=0.1, min_visible=1e-05)}
    planner = Planner(made_indices(), CONFIG.replace(augment=augment))
    assert planner.state_dict()["packing"]["augment"] == "990ecca6fdc114a2"


def once(tokens, group=1, **changes):
    config = CONFIG.replace(vision_token_ratio=None, **changes)
    planner = Planner(made_indices(), config)
    return planner, take_once(planner, tokens, group)


@pytest.mark.parametrize("split", [False, True])
def test_once_takes_every_unit_that_fits_a_row_once(split):
    planner, plans = once(10**9, split_text=split)
    found = [
        unit
        for plan in plans
        for unit in zip(*(getattr(plan.samples, c).tolist() for c in ("source", "index", "part")))
    ]
    assert len(found) == len(set(found))
    expected = 0
    for number, source in enumerate(planner.sources):
        drawn = source.draw(np.arange(source.num_units))
        expected += len({*zip(drawn.sample.tolist(), drawn.part.tolist())})
        assert {i for s, i, _ in found if s == number} == {*drawn.sample.tolist()}
    assert len(found) == expected
    assert all(plan.num_rows == CONFIG.rows_per_step for plan in plans[:-1])
    assert [plan.step for plan in plans] == list(range(len(plans)))


def test_once_is_the_same_in_steps_of_other_rows():
    def units(plans):
        of = [(p.samples.source, p.samples.index, p.samples.start, p.samples.length) for p in plans]
        return [np.concatenate(column).tolist() for column in zip(*of, strict=True)]

    (_, some), (_, others) = once(5000), once(5000, rows_per_step=2, pack_window=16)
    assert units(some) == units(others)
    assert len(others) > len(some)


@pytest.mark.parametrize(("group", "sizes"), [(1, [9, 1]), (3, [9, 3]), (9, [9, 9])])
def test_once_takes_no_more_rows_than_samples_and_layout_want(group, sizes):
    """At 262,144 tokens, a row without samples costs more attention than all samples."""
    rows = 9
    _, plans = once(3200, group, rows_per_step=rows)
    used = sum(len(np.unique(plan.samples.row)) for plan in plans)
    assert used == rows + 1
    assert [plan.num_rows for plan in plans] == sizes


def test_held_out_samples_do_not_depend_on_how_training_draws():
    held = [
        CONFIG.replace(sources={"books": 1.0}, heldout=CONFIG.sources, vision_token_ratio=None,
                       seed=seed, shard_window=window).of_heldout()
        for seed, window in ((5, 2), (6, 1))
    ]  # fmt: skip
    ours, others = (
        [[plan.samples.index.tolist(), plan.items.row.tolist()] for plan in take_once(one, 3000, 1)]
        for one in (Planner(made_indices(), config) for config in held)
    )
    assert ours == others


def test_once_divides_the_tokens_by_the_shares_and_takes_one_unit_at_least():
    planner, plans = once(6000)
    sums = np.zeros(3)
    for plan in plans:
        sums += np.bincount(plan.samples.source, plan.samples.length, minlength=3)
    for source, total in zip(planner.sources, sums, strict=True):
        share = CONFIG.sources[source.index.name] / sum(CONFIG.sources.values())
        assert 6000 * share - 300 < total <= 6000 * share
    # The exact number of units fits; one token less gives one unit less.
    sources = {"sources": {"web": 1.0}}
    web = [index for index in made_indices() if index.name == "web"]
    alone = Planner(web, CONFIG.replace(vision_token_ratio=None, **sources))
    plans = take_once(alone, 6000, 1)
    whole = sum(plan.num_tokens for plan in plans)
    assert sum(plan.num_tokens for plan in take_once(alone, whole, 1)) == whole
    assert sum(plan.num_tokens for plan in take_once(alone, whole - 1, 1)) < whole
    assert len(once(1)[1]) == 1
    assert sorted(once(1)[1][0].samples.source.tolist()) == [0, 1, 2]
