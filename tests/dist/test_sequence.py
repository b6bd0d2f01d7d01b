"""Rows shared by several ranks equal one process, also with a frozen language model."""

import numpy as np
import pytest

from kimi_pretrain.config import ITEMSIZE, ConfigError, load_config
from kimi_pretrain.parallel.sequence import SequenceParts
from tests.dist.jobs import SMALL, run_jobs
from tests.dist.test_layouts import assert_same_losses

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

# The balance loss is large enough to matter, YaRN's rotary factor is not 1, QK-Clip acts. Keys and
# values of four heads exist at a time: of ten 4, 4 and 2, of the five of a TP rank 4 and 1.
HEADS = 10
COMMON = (
    "train.steps=2", "optim.qk_clip_threshold=0.05", "model.language.aux_loss_coeff=0.1",
    "model.language.yarn={factor: 4.0, original_max_position: 32, mscale_all_dim: 0.0}",
    f"model.language.num_heads={HEADS}",
)  # fmt: skip
LAYOUTS = {
    "DP2 x CP2, EP4": dict(dp=2, cp=2, ep=4),
    "CP2 x TP2": dict(cp=2, tp=2),
}
# One step in float64, every gradient.
FLOAT64 = "train.dtype=float64", "data.rows_per_step=4"
GRADIENTS = {"CP2 x TP2, float64": dict(cp=2, tp=2), "CP4, float64": dict(cp=4)}
PROCESSES = 4


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    """Results by job name, in one process and in four."""

    def job(action, *overrides, **axes):
        layout = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1} | axes
        settings = [f"layout.{axis}={size}" for axis, size in layout.items()]
        return action, (f"data.root={data_root}", *COMMON, *settings, *overrides)

    many = {name: job("shared_rows", **axes) for name, axes in LAYOUTS.items()}
    many["frozen"] = job("leaf_gradients", "train.frozen=[language_model]", pp=2, cp=2)
    bfloat16 = "model.language.experts_per_token=8", "data.rows_per_step=2"
    for name, axes in GRADIENTS.items():
        remade = ["train.recompute=[mla_up]"] if "TP" in name else []
        many[name] = job("shared_gradients", *FLOAT64, *remade, **axes)
    many["bfloat16"] = job("bfloat16_gradients", *bfloat16, cp=4)
    single = {
        "one process": job("shared_rows"),
        "float64, one process": job("shared_gradients", *FLOAT64),
        "bfloat16, one process": job("bfloat16_gradients", *bfloat16),
        "no balance loss": job("leaf_gradients", "model.language.aux_loss_coeff=0.0"),
    }
    folder = tmp_path_factory.mktemp("sequence")
    one = run_jobs(single, folder / "one", 1)
    return one | run_jobs(many, folder / "many", PROCESSES, timeout=200.0)


def assert_same_gradients(found, wanted):
    scale = wanted.abs().max()
    assert scale > 0
    assert (found - wanted).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("name", LAYOUTS)
def test_shared_rows_train_as_in_one_process(name, found):
    shared, alone = found[name], found["one process"]
    assert_same_gradients(shared["leaves"]["gradients"], alone["leaves"]["gradients"])
    assert shared["leaves"]["moved"]
    assert shared["shapes"] == alone["shapes"]
    for step, wanted in zip(shared["steps"], alone["steps"], strict=True):
        for count in ("vision_tokens", "loss_tokens", "items", "clipped_heads"):
            assert step[count] == wanted[count], count
        for number in ("loss", "grad_norm", "max_logit"):
            assert step[number] == pytest.approx(wanted[number], rel=1e-5), number
        assert_same_losses(step, wanted)
    assert sum(step["clipped_heads"] for step in shared["steps"]) > 0
    assert all(step["vision_tokens"] > 0 for step in shared["steps"])


@pytest.mark.parametrize("name", GRADIENTS)
def test_float64_is_float64_up_to_the_loss(name, found):
    """Megatron-Core's cross entropy rounds to float32, which shifted shared rows by 1e-8."""
    step, wanted = found[name]["line"], found["float64, one process"]["line"]
    assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)
    assert_same_losses(step, wanted, rel=1e-12)


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_gradient_and_every_heads_maximum_is_that_of_one_process(name, found):
    """Each rank has the gradients of its own queries.

    The gradient of the key/value projection, and of the norm below it, is correct only as the sum
    over all ranks.
    """
    shared, alone = found[name], found["float64, one process"]
    for what in ("gradients", "maxima"):
        assert shared[what].keys() == alone[what].keys()
        for key, wanted in alone[what].items():
            assert (shared[what][key] - wanted).abs().max() <= 1e-10 * wanted.abs().max(), key
    assert len(alone["maxima"]) == 4
    assert all(len(max_N) == HEADS for max_N in alone["maxima"].values())
    assert any("kv_b_proj" in key for key in alone["gradients"])


@pytest.mark.parametrize("name", GRADIENTS)
def test_latents_are_gathered_and_nothing_wider(name, found):
    config = load_config("tiny_cpu", [*SMALL, *COMMON, *FLOAT64])
    language = config.model.language
    width = language.kv_lora_rank + language.qk_rope_dim
    # Each tensor-parallel rank contributes its share of a row, and again in the backward pass.
    tokens = config.tokens_per_step() // GRADIENTS[name].get("tp", 1)
    wanted = language.num_layers * tokens * width * ITEMSIZE[config.train.dtype]
    assert found[name]["summed"] == wanted
    assert found[name]["gathered"] == wanted * (2 if "TP" in name else 1)


def test_bfloat16_loses_no_more_where_latents_are_shared(found):
    """Gradients sent in bfloat16 are summed over heads and ranks in float32."""
    alone, shared = found["bfloat16, one process"]["errors"], found["bfloat16"]["errors"]
    assert min(alone.values()) > 1e-4  # proves that bfloat16 was used
    for what, error in alone.items():
        assert shared[what] <= 1.25 * error, (what, alone, shared)
    assert found["bfloat16"]["summed"] == 2 * found["bfloat16"]["gathered"] > 0


def test_a_frozen_language_model_passes_the_gradients_of_the_captions_alone(found):
    """Frozen routers cannot learn balance, so their balance loss is off, also for the encoder."""
    frozen, free = found["frozen"], found["one process"]["leaves"]
    assert_same_gradients(frozen["gradients"], found["no balance loss"]["gradients"])
    scale = free["gradients"].abs().max()
    assert (frozen["gradients"] - free["gradients"]).abs().max() > 1e-3 * scale
    assert free["moved"]
    assert not frozen["moved"]
    assert free["buffers"] > 0
    assert frozen["buffers"] == 0


def held_by_plain_loop(tokens, num_cp, num_tp, part):
    """Return the positions of the row that a part holds, token by token."""
    cp_rank, tp_rank = divmod(part, num_tp)
    chunk = tokens // (2 * num_cp)
    mine = [
        t for t in range(tokens) if num_cp == 1 or t // chunk in (cp_rank, 2 * num_cp - 1 - cp_rank)
    ]
    size = len(mine) // num_tp
    return mine[tp_rank * size : (tp_rank + 1) * size]


@pytest.mark.parametrize("num_cp", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tp", [1, 2, 3, 4])
def test_parts_and_granules(num_cp, num_tp):
    parts = SequenceParts(144, num_cp, num_tp)
    for part in range(parts.num_parts):
        places = parts.positions(part)
        assert places.dtype == np.int64
        assert places.tolist() == held_by_plain_loop(144, num_cp, num_tp, part)
        for offset, place in enumerate(places.tolist()):
            granule, inside = divmod(place, parts.granule)
            assert parts.holder[granule] == part
            assert parts.offset[granule] + inside == offset
    order = [cp * num_tp + tp for tp in range(num_tp) for cp in range(num_cp)]
    ends = np.concatenate([parts.positions(part) for part in order])
    assert ends[parts.gathered()].tolist() == list(range(144))
    assert parts.granule == 144 or parts.num_parts > 1


def test_causal_work_is_even():
    """Counts visible query-key pairs for a document as long as the row."""
    parts = SequenceParts(4096, 8)
    pairs = [int((parts.positions_cp(rank) + 1).sum()) for rank in range(8)]
    assert max(pairs) == min(pairs)


def test_a_row_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="100 tokens .* 8 chunks"):
        SequenceParts(100, 4)


REFUSED = {
    "rows": (["layout.cp=3", "layout.ep=1"], ("layout.cp=3", "512 tokens")),
    "heads": (["layout.tp=8"], ("model.language.num_heads=4", "layout.tp=8")),
    "vocabulary": (["layout.tp=4", "model.language.vocab_size=1790"], ("vocab_size=1790",)),
    "experts": (["layout.ep=8", "layout.cp=2"], ("layout.ep=8", "layout.cp=2", "= 4")),
}


@pytest.mark.parametrize(("overrides", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_layouts_that_do_not_divide_are_refused(overrides, named):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", overrides)
    assert all(part in str(error.value) for part in named)
