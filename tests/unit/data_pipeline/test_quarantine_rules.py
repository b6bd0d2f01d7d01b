"""Rules of the quarantine, and the states that a loader accepts or refuses."""

import itertools
import json

import numpy as np
import pytest

from data_pipeline.augment.config import AugmentConfig
from data_pipeline.config import DataConfig
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.loader import Loader
from data_pipeline.plan.planner import QUARANTINE_DELAY, Planner
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import PatchLimits
from tests.resume import fingerprint
from tests.unit.data_pipeline.every_kind import WORDS, sentence
from tests.unit.data_pipeline.plain import made_index

# Quarantine -------------------------------------------------------------------------------------

TEXTS = DataConfig(
    root="a folder",
    sources={"notes": 1.0, "web": 2.0},
    seq_len=48,
    rows_per_step=2,
    pack_window=9,
    seed=4,
    prefetch_steps=0,
    fetch_threads=1,
)
LAST = QUARANTINE_DELAY + 30


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    store = FolderStore(tmp_path_factory.mktemp("texts"))
    tokenizer, rng = Tokenizer(train_ranks([WORDS * 3], 300), "test"), np.random.default_rng(2)
    indices = [
        ingest(
            [CrudeSample(f"{name}{i}", [TextSegment(sentence(rng))]) for i in range(count)],
            store, name, tokenizer, 20_000,
        )
        for name, count in (("notes", 5), ("web", 8))
    ]  # fmt: skip
    return store, tokenizer, indices


def text_loader(texts, **changes):
    store, tokenizer, indices = texts
    return Loader(TEXTS.replace(**changes), store, indices, tokenizer)


class Taken:
    """Output of a loader: digests; position -> (source, sample); window -> its first step."""

    def __init__(self):
        self.digests, self.at, self.opened = [], {}, {}

    def take(self, batch):
        samples = batch.plan.samples
        self.digests.append(fingerprint([batch.plan, batch.rows]))
        for source, index, position in zip(
            samples.source.tolist(), samples.index.tolist(), samples.position.tolist()
        ):
            self.at[position] = (source, index)
            self.opened.setdefault(position // TEXTS.pack_window, batch.plan.step)


def run_with_quarantine(texts, found_in=5, **changes):
    """Run to the end with a sample of step `found_in` in quarantine; also return the states."""
    taken, states, bad = Taken(), {}, None
    with text_loader(texts, **changes) as loader:
        for step in range(LAST):
            batch = next(loader)
            taken.take(batch)
            if step == found_in:
                samples = batch.plan.samples
                # A sample whose numbers in plan and index differ, and not from source 0.
                number = next(
                    n
                    for n in range(samples.index.size)
                    if samples.source[n] == 1 and samples.index[n] != n
                )
                bad = (1, int(samples.index[number]))
                [told] = loader.quarantine(batch.plan, [number])
                assert (told.source, told.step) == ("web", step)
                assert told.key == loader.indices[1].key_of(bad[1])
                assert loader.quarantine(batch.plan, [number]) == []
            states[step + 1] = json.loads(json.dumps(loader.state_dict()))
    return taken, states, bad


@pytest.fixture(scope="module")
def quarantined(texts):
    return run_with_quarantine(texts)


def test_a_sample_in_quarantine_is_missing_from_later_windows_and_nothing_else(texts, quarantined):
    taken, states, bad = quarantined
    clean = Taken()
    with text_loader(texts) as loader:
        for _ in range(LAST):
            clean.take(next(loader))
    assert states[5]["quarantine"] == []
    assert states[6]["quarantine"] == states[LAST]["quarantine"] == [[*bad, 5]]
    border = 5 + QUARANTINE_DELAY
    filled = kept = 0
    for position in sorted(set(clean.at) & set(taken.at)):
        late = taken.opened[position // TEXTS.pack_window] >= border
        if clean.at[position] == bad and late:
            assert taken.at[position] != bad
            assert taken.at[position][0] == bad[0]
            filled += 1
        else:
            assert taken.at[position] == clean.at[position]
            kept += clean.at[position] == bad
    assert filled > 3
    assert kept > 5
    begun = clean.opened[max(w for w, step in taken.opened.items() if step < border)]
    assert taken.digests[:begun] == clean.digests[:begun]


@pytest.mark.parametrize("prefetch", [1, 64])
def test_quarantine_is_the_same_however_far_ahead_steps_are_fetched(texts, quarantined, prefetch):
    taken, states, bad = run_with_quarantine(texts, prefetch_steps=prefetch)
    assert bad == quarantined[2]
    assert taken.digests == quarantined[0].digests
    assert states == quarantined[1]


@pytest.mark.parametrize("step", [6, 5 + QUARANTINE_DELAY - 1, 5 + QUARANTINE_DELAY + 6])
def test_a_resumed_run_keeps_to_the_quarantine(texts, quarantined, step):
    taken, states, _ = quarantined
    with text_loader(texts, prefetch_steps=3) as loader:
        loader.load_state_dict(states[step])
        rest = Taken()
        for _ in range(LAST - step):
            rest.take(next(loader))
        assert rest.digests == taken.digests[step:]
        assert loader.state_dict() == states[LAST]


def test_the_delay_of_quarantine_is_exact(texts):
    """A window opened QUARANTINE_DELAY steps after the finding, but no sooner, lacks the sample."""
    planner = Planner(texts[2], TEXTS)
    state, bad, opened = planner.state_dict(), (1, 3), []
    for _ in range(LAST):
        before = state
        plan, state = planner.plan(before)
        samples = plan.samples
        if before["row"] == 0 or state["window"] > before["window"]:
            window = before["window"] + (before["row"] > 0)
            mine = samples.position // TEXTS.pack_window == window
            here = samples.position[mine & (samples.source == 1) & (samples.index == bad[1])]
            opened += [(before, position) for position in here.tolist()]
    late = [(state, position) for state, position in opened if state["step"] >= QUARANTINE_DELAY]
    assert len(late) > 3
    for state, position in late:
        for sooner, stays in ((QUARANTINE_DELAY, False), (QUARANTINE_DELAY - 1, True)):
            other = Planner(texts[2], TEXTS)
            found = [[*bad, state["step"] - sooner]]
            other.load_state_dict({**state, "quarantine": found})
            # The rows of the window may be packed differently, so check all of them.
            after, drawn = other.state_dict(), {}
            for _ in range(6):
                plan, after = other.plan(after)
                table = plan.samples
                drawn |= dict(zip(table.position.tolist(), zip(table.source, table.index)))
            assert (drawn[position] == bad) == stays


# States -----------------------------------------------------------------------------------------

PLANNED = DataConfig(
    root="unused",
    sources={"shots": 1.0, "web": 1.0},
    seq_len=300,
    rows_per_step=7,
    vision_token_ratio=0.2,
    pack_window=64,
    seed=5,
    limits=PatchLimits(image=400, frame=100, side=512),
    augment={"shots": AugmentConfig(flip=0.5)},
)


@pytest.fixture(scope="module")
def made():
    return [
        made_index("shots", [25, 30], 2, media=0.6, text=(3, 60)),
        made_index("web", [40, 30], 1),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("augment", {"shots": AugmentConfig(flip=0.6)}),
        ("augment", {"web": AugmentConfig(flip=0.5)}),
        ("augment", {}),
        ("split_text", False),
        ("shrink_media", False),
        ("seq_len", 301),
        ("pack_window", 65),
        ("shard_window", 65),
        ("limits", PatchLimits(image=100)),
    ],
)
def test_a_state_of_a_run_with_other_rules_is_refused_by_field(made, field, value):
    one, other = Planner(made, PLANNED), Planner(made, PLANNED.replace(**{field: value}))
    for planner, state in ((one, other.state_dict()), (other, one.state_dict())):
        with pytest.raises(ValueError, match=f"state field 'packing.{field}'"):
            planner.load_state_dict(state)
        with pytest.raises(ValueError, match=f"state field 'packing.{field}'"):
            planner.plan(state)


def test_a_state_of_other_decoders_is_refused_unless_the_config_lets_it(made):
    strict, lenient = (Planner(made, PLANNED.replace(same_decoders=same)) for same in (True, False))
    state = strict.state_dict()
    assert "pillow" in state["decoders"]
    old = state | {"decoders": "pillow 1.0 av 2.0"}
    with pytest.raises(ValueError, match="state field 'decoders' is 'pillow 1.0 av 2.0'"):
        strict.load_state_dict(old)
    lenient.load_state_dict(old)
    # A state of a run without the comparison has no decoders: strict planners accept it.
    unnamed = Planner(made, PLANNED.replace(same_decoders=False)).state_dict()
    assert unnamed["decoders"] is None
    strict.load_state_dict(unnamed)


def test_quarantine_does_not_depend_on_the_order_it_came_in(made):
    found = [(1, 5, 3), (0, 2, 3), (1, 4, 2)]
    states = []
    for order in itertools.permutations(found):
        planner = Planner(made, PLANNED)
        for entry in order:
            assert planner.quarantine(*entry)
        states.append(planner.with_quarantine(planner.state_dict()))
    assert all(state == states[0] for state in states)
    assert sorted(map(tuple, states[0]["quarantine"])) == sorted(found)


def test_a_change_of_shares_keeps_the_quarantine(made):
    planner = Planner(made, PLANNED)
    planner.quarantine(1, 5, 0)
    _, state = planner.plan(planner.state_dict())
    state = planner.with_quarantine(state)
    other = Planner(made, PLANNED.replace(vision_token_ratio=0.1))
    moved = other.with_own_blend(state)
    assert moved["blend"] != state["blend"]
    assert moved["quarantine"] == [[1, 5, 0]]
    other.load_state_dict(moved)
    assert not other.quarantine(1, 5, 4)
    assert other.state_dict()["quarantine"] == [[1, 5, 0]]
