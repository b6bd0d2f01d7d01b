"""QK-Clip inside the model: maxima against brute force, the clip's effect, fused kernels."""

import pytest
import torch

from kimi_pretrain.config import ConfigError, load_config
from tests.dist.jobs import layout, run_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

THRESHOLD = 1.0
STILL = (  # with this learning rate no bit of a weight changes
    "optim.lr=1e-30", "optim.min_lr=0.0", f"optim.qk_clip_threshold={THRESHOLD}",
    "model.language.q_lora_rank=null", "train.rows_per_microbatch=2", "data.rows_per_step=8",
    *layout(),
)  # fmt: skip


@pytest.fixture(scope="module")
def results(data_root, tmp_path_factory):
    root = f"data.root={data_root}"
    jobs = {
        "wiring": ("kernel_wiring", (root, *layout())),
        "proof": ("clip_proof", (root, *STILL)),
    }
    for name, scale in (("free", 1.0), ("frozen", 0.0)):
        attention = f"optim.groups={{attention: {{lr_scale: {scale}}}}}"
        low = "optim.qk_clip_threshold=0.05"
        jobs[name] = "losses", (root, "train.steps=1", low, attention, *layout())
    return run_jobs(jobs, tmp_path_factory.mktemp("clip"), 1)


@pytest.fixture(scope="module")
def proof(results):
    return results["proof"]


def test_maxima_are_those_of_all_pairs_of_all_microbatches(proof):
    brute = proof["brute"].amax(1)
    torch.testing.assert_close(proof["first"], brute, rtol=1e-5, atol=1e-7)
    assert torch.equal(proof["max_logits"], proof["first"].amax(1).double())
    # The test is not vacuous: there are padding and many documents, and maxima in several
    # microbatches.
    assert proof["padding"] > 0
    assert proof["brute"].shape[1] == 4 < proof["documents"]
    assert (proof["brute"].argmax(1).flatten().bincount(minlength=4) > 0).sum() > 1


def test_the_clip_brings_a_head_to_the_threshold_and_leaves_the_others(proof):
    first, second = proof["first"], proof["second"]
    over = first > THRESHOLD
    assert proof["clipped_heads"] == over.sum() >= 2
    assert over[0].tolist() == [False, True, False, False]
    assert over[2, 3]
    # The first layer's inputs are unchanged, so its logits scale by gamma.
    assert second[0, 1].item() == pytest.approx(THRESHOLD, rel=1e-5)
    assert torch.equal(second[0, ~over[0]], first[0, ~over[0]])


def test_attention_that_is_frozen_by_its_rate_is_not_clipped(results):
    (free,), (frozen,) = results["free"], results["frozen"]
    assert free["max_logit"] == frozen["max_logit"]
    assert free["clipped_heads"] > 0 == frozen["clipped_heads"]


def test_an_evaluation_leaves_no_maxima(proof):
    assert proof["after evaluation"].shape == proof["first"].shape
    assert (proof["after evaluation"] == -torch.inf).all()


def test_skipped_steps_are_counted_and_outlive_a_resume(proof):
    assert (proof["skipped"], proof["updates"]) == (1, 3)
    assert (proof["skipped when resumed"], proof["updates when resumed"]) == (1, 3)


@pytest.fixture(scope="module")
def wiring(results):
    return results["wiring"]


def test_kernels_that_are_not_there_are_one_clear_error(wiring):
    for kind in ("flex", "transformer_engine"):
        for part in (f"train.attention={kind}", "CUDA", "train.attention=portable"):
            assert part in wiring["refusals"][kind], part


def test_our_side_of_flex_attention(wiring):
    """On a CPU the operator computes the same as its Triton code on a GPU."""
    flex, portable = wiring["flex"], wiring["portable"]
    assert wiring["flex modules"] == ["FlexCoreAttention"] * 4
    assert flex["loss"] == pytest.approx(portable["loss"], rel=1e-6)
    torch.testing.assert_close(flex["maxima"], portable["maxima"], rtol=1e-5, atol=1e-7)
    assert (flex["again"] == -torch.inf).all()
    assert_same_gradients(flex["grads"], portable["grads"])


def assert_same_gradients(found, wanted):
    """Compare in fp32; in bf16 some tokens route to another expert."""
    for name, grad in wanted.items():
        error = torch.linalg.vector_norm(found[name] - grad)
        assert error <= 1e-5 * torch.linalg.vector_norm(grad), name


def test_our_side_of_transformer_engine_s_attention(wiring):
    """Uses a plain kernel with the same interface; the real one has not been run."""
    fused, portable = wiring["transformer_engine"], wiring["portable"]
    assert wiring["fused modules"] == len(fused["maxima"]) == 4
    assert fused["loss"] == pytest.approx(portable["loss"], rel=1e-6)
    torch.testing.assert_close(fused["maxima"], portable["maxima"], rtol=1e-5, atol=1e-7)
    assert (fused["again"] == -torch.inf).all()
    assert wiring["kept by the kernels"] == [None] * 4
    assert_same_gradients(fused["grads"], portable["grads"])
    assert all(size & (size - 1) == 0 for size in wiring["sizes"])
    assert wiring["longest"] <= max(wiring["sizes"]) < 2 * wiring["longest"]


def test_documents_as_kernels_take_them(wiring):
    assert wiring["borders"] == ([0, 0, 6, 11, 15], [0, 4, 10, 16, 20])
    assert wiring["plain borders"] == ([0, 4, 9], [0, 4, 9])
    assert wiring["only padding"] == ([0, 0], [0, 9])
    kernel = wiring["kernel"]
    for side in ("q", "kv"):
        assert kernel[f"cu_seqlens_{side}"].tolist() == [0, 0, 6, 11, 15]
        assert kernel[f"cu_seqlens_{side}_padded"].tolist() == [0, 4, 10, 16, 20]
        assert kernel[f"cu_seqlens_{side}"].dtype == torch.int32
        assert kernel[f"max_seqlen_{side}"] == 8
    assert (kernel["qkv_format"], kernel["pad_between_seqs"]) == ("thd", True)


def test_maxima_of_a_rank_s_heads_among_all(wiring):
    low = -torch.inf
    expected = [[0, 1, low, low, low, low], [low, low, 0, 1, low, low], [low, low, low, low, 0, 1]]
    assert [heads.tolist() for heads in wiring["heads"]] == expected


TE = "train.attention=transformer_engine"
REFUSED = {
    "type": ([TE, "train.dtype=float32"], ("train.dtype=float32",)),
    "context": ([TE, "train.dtype=bfloat16", "layout.cp=2", "layout.ep=1"], ("layout.cp=2",)),
    "flex's type": (["train.attention=flex", "train.dtype=float64"], ("train.dtype=float64",)),
    "name": (["train.attention=flash"], ("train.attention", "flash")),
}


@pytest.mark.parametrize(("overrides", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_kernels_do_not_take_is_refused(overrides, named):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", overrides)
    assert all(part in str(error.value) for part in named)
    assert load_config("tiny_cpu").train.attention == "auto"
