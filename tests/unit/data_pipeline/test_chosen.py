"""Samples selected by length: the order equals that of a source without the other samples."""

import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks.synthetic_index import synthetic_index
from data_pipeline.config import BlendStage, ChosenSource
from data_pipeline.inspect.stats import source_stats
from data_pipeline.plan.layout import lay_out
from data_pipeline.plan.once import once
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.source import Source
from tests.unit.data_pipeline.plain import made_index
from tests.unit.data_pipeline.test_plan import CONFIG, LIMITS, made_indices, row_stream, run

LONG = {"share": 1.0, "min_tokens": 90, "max_tokens": 260}
# Settings that decide whether a sample fits a row, alone and together with the bounds.
ROWS = ({}, {"seq_len": 120, "split_text": True}, {"seq_len": 120, "shrink_media": True})


def pictures(name: str, keep: np.ndarray | None = None, first: int = 30):
    """Return samples of a text with or without an image, in five shards; only those of `keep`.

    The texts of the first shard have `first` tokens.
    """
    rng = np.random.default_rng(3)
    text, side = rng.integers(3, 200, 150), rng.integers(20, 300, 150)
    shard, media = np.repeat(np.arange(5), 30), rng.random(150) < 0.5
    text[:30], media[:30] = first, False
    keep = np.ones(150, np.bool_) if keep is None else keep
    sides = side[keep & media]
    return synthetic_index(
        name, text[keep], shard=shard[keep], item_ptr=np.append(0, np.cumsum(media[keep])),
        item_height=sides, item_width=sides, item_prefix=np.full(sides.size, 3),
        shards=[type(SHARD)(f"{name}/{i}.tar", 0, "", int(n))
                for i, n in enumerate(np.bincount(shard[keep], minlength=5))],
    )  # fmt: skip


SHARD = synthetic_index("one", [3]).shards[0]


def lengths(index) -> np.ndarray:
    samples = np.arange(index.num_samples)
    return lay_out(index, LIMITS, samples, np.zeros(samples.size, np.int8)).length


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bounds", [{"min_tokens": 90}, {"max_tokens": 60}, LONG])
def test_the_order_is_that_of_an_index_without_the_others(rows, bounds):
    """Every epoch, with splitting and shrinking; no sample of the first shard is selected."""
    low, high = bounds.get("min_tokens", 0), bounds.get("max_tokens", 10**9)
    first = 1 if low else 10**6
    index = pictures("books", first=first)
    keep = (lengths(index) >= low) & (lengths(index) <= high)
    assert not keep[:30].any()
    changes = {"vision_token_ratio": None, **rows}
    whole = CONFIG.replace(sources={"books": {"share": 1.0, **bounds}}, **changes)
    alone = CONFIG.replace(sources={"books": 1.0}, **changes)
    chosen, removed = Source(index, whole), Source(pictures("books", keep, first), alone)
    assert 10 < chosen.num_units == removed.num_units
    assert chosen.totals == removed.totals
    draws = np.arange(3 * chosen.num_units)
    one, other = chosen.draw(draws), removed.draw(draws)
    assert one.sample.tolist() == np.flatnonzero(keep)[other.sample].tolist()
    for name in ("part", "epoch", "level"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    for name in ("length", "vision", "start", "grid"):
        assert getattr(one.layout, name).tolist() == getattr(other.layout, name).tolist(), name
    counted = {name: n for name, n in chosen.counts.items() if name != "samples"}
    assert counted == {name: removed.counts[name] for name in counted}
    assert chosen.counts["samples"] == 150


def planner_of(sources, **changes) -> Planner:
    config = CONFIG.replace(sources=sources, vision_token_ratio=None, **changes)
    return Planner([i for i in made_indices() if i.name in config.source_names], config)


def test_an_epoch_goes_through_what_is_chosen_once_and_through_nothing_else():
    planner = planner_of({"web": {"share": 1.0, "min_tokens": 40}, "captions": 1.0})
    (web,) = (source for source in planner.sources if source.index.name == "web")
    number = planner.sources.index(web)
    wanted = np.flatnonzero(lengths(web.index) >= 40)
    wanted = wanted[lengths(web.index)[wanted] <= CONFIG.seq_len]
    plans, _ = run(planner, 60)
    drawn = np.concatenate([p.samples.index[p.samples.source == number] for p in plans])
    times = np.bincount(drawn, minlength=web.index.num_samples)
    assert set(np.flatnonzero(times)) == set(wanted)
    assert times.sum() > 2 * wanted.size
    first = np.unique([p.samples.epoch[p.samples.source == number].max() for p in plans])
    assert first.size > 1
    assert web.num_units == wanted.size
    (told,) = (line for line in planner.notices() if "'web'" in line)
    assert told.startswith(f"source 'web': of {web.index.num_samples} samples {wanted.size} are ")
    assert "chosen by min_tokens=40" in told
    capped = planner_of(planner.config.sources, max_epochs={"web": 1.0}, pack_window=8)
    state, drawn = capped.state_dict(), list[int]()
    for _ in range(60):
        plan, state = capped.plan(state)
        drawn += plan.samples.index[plan.samples.source == number].tolist()
    assert len(drawn) == len(set(drawn))
    assert wanted.size - 8 < len(drawn) <= wanted.size


def test_shares_hold_for_what_is_chosen():
    """A quarter of the tokens come from long documents, which are rare in the source."""
    planner = planner_of({"web": {"share": 1.0, "min_tokens": 100}, "captions": 3.0})
    plans, _ = run(planner, 60)
    source, length = (
        np.concatenate([getattr(p.samples, name) for p in plans]) for name in ("source", "length")
    )
    web = [s.index.name for s in planner.sources].index("web")
    assert length[source == web].min() >= 100
    assert length[source == web].sum() / length.sum() == pytest.approx(0.25, abs=0.02)


def test_bounds_that_leave_all_samples_change_nothing_but_the_source():
    plain, every = planner_of({"web": 1.0}), planner_of({"web": {"share": 1.0, "min_tokens": 1}})
    assert row_stream(run(plain, 5)[0]) == row_stream(run(every, 5)[0])
    assert planner_of({"web": {"share": 1.0}}).manifest == plain.manifest


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"min_tokens": 9}, {"min_tokens": 8}, "by min_tokens=9, this run has min_tokens=8"),
        ({"min_tokens": 9}, {}, "by min_tokens=9, this run has no bounds"),
        ({}, {"max_tokens": 99}, "by no bounds, this run has max_tokens=99"),
    ],
)
def test_a_resume_with_other_bounds_is_refused_by_name(before, after, told):
    state = planner_of({"web": {"share": 1.0, **before}}).state_at(2)
    planner = planner_of({"web": {"share": 1.0, **after}})
    with pytest.raises(ValueError, match=f"'manifest'.* source 'web' was chosen {told}"):
        planner.load_state_dict(state)
    planner_of({"web": {"share": 2.0, **before}}).load_state_dict(state)


def test_no_document_long_enough_names_source_bound_and_longest():
    longest = lengths(next(i for i in made_indices() if i.name == "web")).max()
    with pytest.raises(ValueError, match=rf"data.sources.web: none of its .* samples is chosen by "
                       rf"min_tokens=5000: the longest has {longest} tokens"):  # fmt: skip
        planner_of({"web": {"share": 1.0, "min_tokens": 5000}})


def test_bounds_hold_in_all_stages_and_for_what_is_held_out():
    """Bounds are set once; a stage's plain share inherits them. Different bounds are refused."""
    given = {"share": 1.0, "min_tokens": 90}
    stage = {"after_tokens": 3000, "sources": {"web": 2.0, "captions": given}}
    config = CONFIG.replace(sources={"web": given}, schedule=[stage], vision_token_ratio=None,
                            heldout={"books": given}, split_text=True)  # fmt: skip
    for name in ("web", "captions", "books"):
        assert config.chosen(name).min_tokens == 90, name
    assert config.chosen("clips") is None
    assert isinstance(config.schedule[0], BlendStage)
    index = pictures("books")
    held = Planner([index], config.of_heldout())
    samples = np.concatenate([plan.samples.index for plan in once(held, 10**6, 1)])
    long = (lengths(index) >= 90) & (lengths(index) <= CONFIG.seq_len)
    assert set(samples.tolist()) == set(np.flatnonzero(long))
    with pytest.raises(ValidationError, match="'web' is chosen by min_tokens=80 and by min_tokens"):
        config.replace(schedule=[stage | {"sources": {"web": given | {"min_tokens": 80}}}])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"share": 1.0, "min_tokens": 9, "max_tokens": 8}, "no length is in between"),
        ({"share": 0.0, "min_tokens": 9}, "a finite share above 0"),
        ({"min_tokens": 9}, "share"),
        ({"share": 1.0, "min_token": 9}, "min_token"),
        ({"share": 1.0, "min_tokens": 0}, "greater than or equal to 1"),
        ("much", "valid number"),
    ],
)
def test_bounds_that_cannot_be_are_refused(given, told):
    with pytest.raises(ValidationError, match=told) as error:
        CONFIG.replace(sources={"web": given})
    assert len(error.value.errors()) == 1


def test_stats_count_what_is_chosen():
    index = made_index("books", [50, 40], 2, media=0.3)
    choice = ChosenSource(share=1.0, min_tokens=60)
    chosen = source_stats(index, LIMITS, None, choice)["chosen"]
    long = lengths(index)[lengths(index) >= 60]
    assert chosen == {"bounds": "min_tokens=60", "samples": long.size, "share": long.size / 90,
                      "tokens": long.sum()}  # fmt: skip
    assert "chosen" not in source_stats(index, LIMITS)
