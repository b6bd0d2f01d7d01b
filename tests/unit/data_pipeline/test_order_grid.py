"""I1: one SHA-256 of the row stream for any world, worker count, and resume in another layout.

Ranks are simulated: each requests its rows and items, as a replica and an encoder would, and their
union is the step. Workers are real processes with their own stores. The corpus has every kind of
sample, augmentation, split texts, a schedule and an epoch cap.
"""

import hashlib
import json
from functools import partial

import numpy as np
import pytest

from data_pipeline.access import open_fetcher, shard_versions
from data_pipeline.fetch import Needs, resolve
from data_pipeline.loader import Loader
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from data_pipeline.workers.workers import Workers
from tests.unit.data_pipeline.every_kind import CONFIG, build

WORLDS = (1, 2, 3, 4, 8, 64)
STEPS = 6
ROWS = 192  # per step; divisible by every world size


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every kind")
    tokenizer, indices = build(FolderStore(folder))
    config = CONFIG.replace(root=str(folder), rows_per_step=ROWS, prefetch_steps=3)
    return config, tokenizer, indices


def needs_of(plan, rank, world):
    """Assign rows by replica, and media by a rule unrelated to the rows."""
    rows = plan.num_rows // world
    return Needs(
        np.arange(rank * rows, (rank + 1) * rows),
        np.flatnonzero((plan.items.tokens + plan.items.index_line) % world == rank),
    )


def digest_of(plan, parts):
    """Return one SHA-256 of each row's tokens, labels and mask and of each item, in order."""
    sha = hashlib.sha256(plan.content_hash().encode())
    for part in parts:
        assert not part.bad
        for row in range(part.rows.tokens.shape[0]):
            for values in (part.rows.tokens, part.rows.labels, part.rows.loss_mask):
                sha.update(values[row].tobytes())
    media = {item: patches for part in parts for item, patches in part.media.items()}
    assert sorted(media) == list(range(len(plan.items)))
    for item in sorted(media):
        sha.update(media[item].tobytes())
    return sha.hexdigest()


def stream(planner, state, workers, world, steps):
    """Return digests of `steps` steps as `world` ranks hold them, and the state after each step."""
    plans = []
    for _ in range(steps):
        plan, state = planner.plan(state)
        plans.append((plan, state))
    jobs = (
        (resolve(planner, plan, needs_of(plan, rank, world)), 1)
        for plan, _ in plans
        for rank in range(world)
    )
    run = workers.run(jobs, max_bytes=1000, max_jobs=8)
    return [
        (digest_of(plan, [next(run) for _ in range(world)]), json.loads(json.dumps(after)))
        for plan, after in plans
    ]


@pytest.fixture(scope="module")
def reference(corpus):
    """Return digests and states before each step from one process without workers."""
    config, tokenizer, indices = corpus
    digests, states = [], []
    with Loader(
        config.replace(prefetch_steps=0), FolderStore(config.root), indices, tokenizer
    ) as loader:
        for _ in range(STEPS + 2):
            states.append(loader.state_dict())
            batch = next(loader)
            digests.append(digest_of(batch.plan, [batch]))
    assert len(set(digests)) == len(digests)
    return digests, states


# By default two workers run three worlds with stops and resumes; the full grid takes 25 s of a core
# per worker count.
SLOW = [pytest.param(number, WORLDS, 3, 13, marks=pytest.mark.slow) for number in (0, 1, 2, 4)]


@pytest.mark.parametrize(
    ("num_workers", "worlds", "steps", "resumes"), [(2, (1, 3, 64), 1, 3), *SLOW]
)
def test_one_stream_for_every_world_and_number_of_workers(
    corpus, reference, num_workers, worlds, steps, resumes
):
    config, tokenizer, indices = corpus
    digests, states = reference
    rng = np.random.default_rng(num_workers)
    setup = partial(open_fetcher, config, shard_versions(indices), tokenizer.hash)
    with Workers(setup, num_workers) as workers:
        planner = Planner(indices, config)
        for world in worlds:
            found = stream(planner, planner.state_dict(), workers, world, steps)
            assert [digest for digest, _ in found] == digests[:steps], world
        for _ in range(resumes):
            step, world = int(rng.integers(0, STEPS)), int(rng.choice(WORLDS))
            fresh = Planner(indices, config)
            fresh.load_state_dict(states[step])
            [(digest, after)] = stream(fresh, fresh.state_dict(), workers, world, 1)
            assert digest == digests[step], (step, world)
            assert after == states[step + 1]


def test_the_corpus_has_everything_in_it(corpus):
    """Without every feature the grid would prove little."""
    config, _, indices = corpus
    planner = Planner(indices, config)
    state, seen, kinds = planner.state_dict(), set(), set()
    for _ in range(STEPS):
        plan, state = planner.plan(state)
        seen |= {"split"} if plan.samples.part.any() else set()
        seen |= {"varied"} if plan.samples.varied.any() else set()
        seen |= {"epochs"} if plan.samples.epoch.max() > 1 else set()
        kinds |= set(plan.items.kind.tolist())
        seen |= {"chunks"} if plan.items.chunk.any() else set()
        seen |= {"shrunk"} if plan.items.level.any() else set()
    assert len(state["blend"]) > 1
    assert seen == {"split", "varied", "epochs", "chunks", "shrunk"}
    assert kinds == {0, 1}
    assert planner.sources[0].index.region_shape.size
    assert len(json.dumps(state)) < 1024


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loader_with_workers_gives_the_same_and_resumes_with_another_number(
    corpus, reference, num_workers
):
    config, tokenizer, indices = corpus
    digests, states = reference
    store = FolderStore(config.root)
    with Loader(config.replace(workers=num_workers), store, indices, tokenizer) as loader:
        for step in range(3):
            batch = next(loader)
            assert digest_of(batch.plan, [batch]) == digests[step]
        saved = loader.state_dict()
        assert saved == states[3]
    other = config.replace(workers=3 - num_workers, prefetch_steps=1)
    with Loader(other, store, indices, tokenizer) as loader:
        loader.load_state_dict(saved)
        batch = next(loader)
        assert digest_of(batch.plan, [batch]) == digests[3]
