"""`train --resume latest --change-data`: a run switches to other weights and a new source."""

import json
import shutil
from pathlib import Path

import pytest

from kimi_pretrain.tools.exposure import exposure
from tests.dist.jobs import layout, read_metrics, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

FIRST = (*layout(), "data.pack_window=8", "checkpoint.every=2", "data.vision_token_ratio=null")
HELDOUT = ("data.heldout={pictures_heldout: 1}", "train.validate_every=9", "data.heldout_tokens=99")
SECOND = "data.sources={pictures: 1, words: 1, words_heldout: 3}"


def going_on(folder, *overrides):
    return train(folder, *FIRST, *overrides, resume=Path("latest"))


@pytest.fixture(scope="module")
def run(data_root, tmp_path_factory):
    """Two steps, a change and two more in another layout, then four more without the flag.

    Only the first start is validated.
    """
    folder = tmp_path_factory.mktemp("changed") / "run"
    done = train(folder, *FIRST, *HELDOUT, f"data.root={data_root}", "train.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(folder, folder.with_name("begun"))
    root = f"data.root={data_root}"
    refused = going_on(folder, root, "train.steps=4", SECOND)
    two = (*layout(dp=2), root, "train.steps=4", "--change-data", SECOND)
    changed = going_on(folder, *two)
    assert changed.returncode == 0, changed.stdout + changed.stderr
    rest = going_on(folder, root, "train.steps=8", SECOND)
    assert rest.returncode == 0, rest.stdout + rest.stderr
    return folder, refused, changed, rest


def test_it_says_where_and_what_follows_holds_to_it(run, data_root):
    folder, refused, changed, rest = run
    assert refused.returncode == 2
    assert "source 'words_heldout' is new" in refused.stderr
    assert "--change-data" in refused.stderr
    noted = json.loads((folder / "mixtures.json").read_text())
    [[first, position, new]] = noted["changes"]
    assert new == ["words_heldout"]
    told = f"another mixture from step {first} on (position {position}): of the draws"
    assert told in " ".join(changed.stderr.split())
    assert "another mixture" not in rest.stderr
    assert [start for start, _ in noted["blend"]] == [0, position]
    assert [{*shares} for _, shares in noted["blend"]] == [
        {"pictures", "words"}, {"pictures", "words", "words_heldout"},
    ]  # fmt: skip
    sources = json.loads((folder / "sources.json").read_text())
    since = {one["name"]: one["from_step"] for one in sources}
    assert since == {"pictures": 1, "words": 1, "words_heldout": first, "pictures_heldout": 1}
    assert sources[-1]["use"] == "heldout"  # read by the validations of the first start
    assert exposure(folder, {"pictures_heldout": ["p0000"]}).heldout == ["pictures_heldout"]
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [*range(1, 9)]
    with_new = [
        line["step"] for line in lines if line["loss_tokens_by_source"].get("words_heldout")
    ]
    assert 2 < first <= min(with_new) <= 8
    [use, *_] = exposure(folder, {"words_heldout": ["h0000", "h0001", "h0002"]}).uses
    assert use.step == min(with_new)
    steps = {use.step for use in exposure(folder, {"words_heldout": ["h0002"]}).uses}
    assert steps <= {*with_new}


def test_straight_on_it_is_the_same(run, data_root):
    """A changed run without another stop, in one process, draws the same rows at every step."""
    folder, *_ = run
    other = folder.with_name("begun")
    done = going_on(other, f"data.root={data_root}", "train.steps=8", "--change-data", SECOND)
    assert done.returncode == 0, done.stdout + done.stderr
    for one, two in zip(read_metrics(folder), read_metrics(other), strict=True):
        for key in ("step", "loss_tokens_by_source", "items"):
            assert one[key] == two[key]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    assert (other / "mixtures.json").read_text() == (folder / "mixtures.json").read_text()
    alone = train(other.with_name("alone"), *FIRST, f"data.root={data_root}", "--change-data")
    assert alone.returncode == 2
    assert "--change-data is for a run that goes on: add --resume latest" in alone.stderr
