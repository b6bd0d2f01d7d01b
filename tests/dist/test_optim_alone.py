"""Distributed optimizer in one process: resume, masters, partial updates, refusals."""

from dataclasses import replace

import pytest
import torch

from kimi_pretrain.optim import muonclip
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import NamedTensor, as_matrix
from kimi_pretrain.optim.muon import adamw_update
from kimi_pretrain.optim.muonclip import UNSENT_ELEMENTS, DistributedMuonClip
from kimi_pretrain.optim.newton_schulz import update_scale
from kimi_pretrain.optim.replica_group import ReplicaGroup
from kimi_pretrain.optim.step_stats import UpdateFigures
from tests.dist.optim_worker import ALONE, CONFIG, SHAPE, Job, Toy
from tests.resume import assert_resumes_anywhere

pytestmark = pytest.mark.dist

ATTENTION = "language_model.model.layers.1.self_attn."
Q, KV = ATTENTION + "q_b_proj.weight", ATTENTION + "kv_b_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resume_anywhere_is_bit_exact(dtype):
    assert_resumes_anywhere(lambda: Job(ALONE, dtype), steps=8)


def test_state_has_the_promised_names_and_dtypes():
    state = Job(ALONE, torch.bfloat16).optimizer.state_dict()
    norm = "language_model.model.norm.weight"
    names = {f"optim.{p}.{norm}" for p in ("exp_avg", "exp_avg_sq", "master")}
    names |= {f"optim.momentum.{Q}", f"optim.master.{Q}"}
    assert names <= state.keys()
    assert all(state[name].dtype == torch.float32 for name in names)
    fp32 = Job(ALONE).optimizer.state_dict()
    assert not [name for name in fp32 if ".master." in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_clip_reaches_weights_and_masters(dtype):
    job = Job(ALONE, dtype).train(0, 2)
    before = job.save()
    gamma = torch.tensor([0.25, 1.0, 1.0, 0.5])
    job.optimizer.apply_qk_clip(Q, KV, gamma, SHAPE)
    after = job.save()
    q_factor = torch.tensor(
        [[0.5] * 4 + [0.25] * 2, [1.0] * 6, [1.0] * 6, [0.5**0.5] * 4 + [0.5] * 2]
    )
    kv_factor = torch.tensor(
        [[0.5] * 4 + [1.0] * 4, [1.0] * 8, [1.0] * 8, [0.5**0.5] * 4 + [1.0] * 4]
    )
    for name, factor in ((Q, q_factor), (KV, kv_factor)):
        for part, key in (("weights", name), ("state", f"optim.master.{name}")):
            if key in before[part]:
                expected = (before[part][key].float() * factor.reshape(-1, 1)).to(
                    after[part][key].dtype
                )
                torch.testing.assert_close(after[part][key], expected, rtol=1e-6, atol=0)
    others = [name for name in before["weights"] if name not in (Q, KV)]
    assert all(torch.equal(before["weights"][n], after["weights"][n]) for n in others)


def test_a_rank_without_the_layer_has_nothing_to_clip():
    job = Job(ALONE)
    before = job.save()["weights"]
    names = Q.replace("1", "9"), KV.replace("1", "9")
    job.optimizer.apply_qk_clip(*names, torch.full((4,), 0.5), SHAPE)
    assert all(torch.equal(before[name], weight) for name, weight in job.toy.weights.items())


@pytest.mark.parametrize("names", [(KV, Q), (Q, Q), (Q, KV.replace("1", "9")), ("q", "kv")])
def test_qk_clip_refuses_names_that_are_no_pair(names):
    with pytest.raises(ValueError, match="of one layer"):
        Job(ALONE).optimizer.apply_qk_clip(*names, torch.ones(4), SHAPE)


@pytest.mark.parametrize(
    ("gamma", "shape", "told"),
    [
        (torch.ones(2), SHAPE, r"q_b_proj.*gamma \(2,\) do not fit 4 heads of 6 rows"),
        (torch.ones(()), SHAPE, r"gamma \(\) do not fit 4 heads"),
        (torch.ones(4), replace(SHAPE, qk_rope_dim=3), r"q_b_proj.* 4 heads of 7 rows"),
        (torch.ones(4), replace(SHAPE, v_dim=5), r"kv_b_proj.* 4 heads of 9 rows"),
        # Two heads divide all rows, so the wrong scaling would be a silent error.
        (torch.ones(2), replace(SHAPE, num_heads=2), r"q_b_proj.* 2 heads of 6 rows"),
    ],
)
def test_qk_clip_refuses_sizes_that_do_not_fit(gamma, shape, told):
    job = Job(ALONE)
    before = job.save()["weights"]
    with pytest.raises(ValueError, match=told):
        job.optimizer.apply_qk_clip(Q, KV, gamma / 2, shape)
    assert all(torch.equal(before[name], weight) for name, weight in job.toy.weights.items())


def test_weights_loaded_without_state_reach_the_masters():
    job = Job(ALONE, torch.bfloat16)
    weight = job.toy.weights[Q]
    weight.fill_(2.0)
    job.optimizer.sync_masters()
    job.toy.backward(0)
    job.optimizer.step(0.0)
    assert torch.equal(weight, torch.full_like(weight, 2.0))


def test_the_report_measures_the_updates_of_each_group():
    job = Job(ALONE)
    job.toy.backward(0)
    before = job.save()["weights"]
    figures = job.optimizer.step(1e-2).figures()
    updates: dict[str, list[torch.Tensor]] = {}
    for name, old in before.items():
        # W' = (1 - lr wd) W - lr U, so U follows from the weights before and after.
        update = (old * (1 - 1e-3) - job.toy.weights[name]).flatten() / 1e-2
        updates.setdefault(SHAPE.rule_of(name, old.shape).group, []).append(update)
    assert figures.elements == {g: sum(x.numel() for x in updates[g]) for g in sorted(updates)}
    for group, parts in updates.items():
        expected = torch.cat(parts).square().mean().sqrt().item()
        assert figures.update_rms[group] == pytest.approx(expected, rel=1e-3), group
    assert figures.newton_schulz_seconds > 0


def test_the_report_holds_the_worst_orthogonality_error():
    """Expects the maximum of sqrt(mean((1 - s^2)^2)) over all update pieces, s: singular values."""
    job = Job(ALONE)
    job.backward(0)
    before = job.save()["weights"]
    figures = job.optimizer.step(1e-2).figures()
    errors = []
    for name, old in before.items():
        update = as_matrix(old * (1 - 1e-3) - job.toy.weights[name]) / 1e-2 if old.ndim > 1 else old
        for piece in SHAPE.rule_of(name, old.shape).pieces:
            shape = piece.shape(update.shape)
            part = piece.rows(update).reshape(shape) / update_scale(*shape)
            values = torch.linalg.svdvals(part.double())
            errors.append((1 - values.square()).square().mean().sqrt().item())
    assert len(errors) > 20
    assert figures.orthogonality_error == pytest.approx(max(errors), rel=1e-2)
    silent = CONFIG.replace(measure_orthogonality=False)
    job = Job(ALONE, config=silent)
    job.backward(0)
    assert job.optimizer.step(1e-2).figures().orthogonality_error is None


def test_the_scale_multiplies_gradients_and_may_be_a_tensor():
    """Tests the momentum, because a step of Muon or AdamW hardly depends on the gradient size."""
    for scale in (0.125, torch.tensor(0.125), torch.tensor(0.125, dtype=torch.float64)):
        job = Job(ALONE)
        job.toy.backward(0)
        grads = {name: grad.clone() for name, grad in job.toy.grads.items()}
        job.optimizer.step(1e-2, scale)
        assert torch.equal(job.optimizer.state_dict()[f"optim.momentum.{Q}"], 0.125 * grads[Q])
        assert all(torch.equal(job.toy.grads[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [7, 40])  # less than a norm or a row; several rows
def test_adamw_in_parts_changes_no_bit(monkeypatch, elements, dtype):
    """Covers all tensors: norms, a convolution, transposed experts."""
    sizes: list[int] = []

    def update(weight: torch.Tensor, *args) -> torch.Tensor:
        sizes.append(weight.numel())
        return adamw_update(weight, *args)

    adamw = CONFIG.replace(matrices="adamw")
    whole = Job(ALONE, dtype, adamw).train(0, 3).save()
    monkeypatch.setattr(muonclip, "adamw_update", update)
    monkeypatch.setattr(muonclip, "ADAMW_ELEMENTS", elements)
    parts = Job(ALONE, dtype, adamw).train(0, 3).save()
    assert max(sizes) == max(elements, 32)  # the projector's rows of 32 are not cut
    for kind, tensors in whole.items():
        assert parts[kind].keys() == tensors.keys()
        assert all(torch.equal(parts[kind][name], tensor) for name, tensor in tensors.items())


def test_what_is_not_sent_is_updated_more_at_a_time(monkeypatch):
    limits: dict[str, int] = {}
    monkeypatch.setattr(ReplicaGroup, "of", lambda ranks: ReplicaGroup(None, ranks, 0))
    gathered = lambda self, value: [value] * len(self.ranks)  # noqa: E731
    monkeypatch.setattr(ReplicaGroup, "all_gather_object", gathered)
    monkeypatch.setattr(muonclip, "cut_rounds", lambda *args: limits.update(args[-1]) or [])
    ranks = {"dense": (0, 1), "expert": (0,), "encoder": (0, 1, 2)}
    DistributedMuonClip([], ranks, CONFIG, SHAPE)
    sent = CONFIG.bucket_elements
    assert limits == {"dense": sent, "expert": UNSENT_ELEMENTS, "encoder": sent}
    assert OptimConfig.model_fields["bucket_elements"].default < UNSENT_ELEMENTS


def test_no_tensors_at_all():
    optimizer = DistributedMuonClip([], ALONE.groups, CONFIG, SHAPE)
    assert optimizer.step(1e-3).figures() == UpdateFigures()
    assert float(optimizer.grad_square_sum()) == 0
    assert list(optimizer.state_dict()) == ["optim.step"]


def test_wrong_input_is_refused():
    named = Toy(ALONE, torch.float32).named()
    with pytest.raises(ValueError, match="given twice"):
        DistributedMuonClip([*named, named[0]], ALONE.groups, CONFIG, SHAPE)
    with pytest.raises(ValueError, match="groups are \\['dense'\\]"):
        DistributedMuonClip(named, {"dense": None}, CONFIG, SHAPE)
    short = NamedTensor(named[0].name, named[0].data, lambda: torch.zeros(3), "dense")
    with pytest.raises(ValueError, match=r"gradient of .* is \(3,\)"):
        DistributedMuonClip([short], ALONE.groups, CONFIG, SHAPE).step(1e-3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop(f"optim.momentum.{Q}"), "lacks 'optim.momentum"),
        (lambda state: state.pop("optim.step"), "lacks 'optim.step'"),
        (lambda state: state.update({f"optim.momentum.{Q}": torch.zeros(3)}), r"\(3,\)"),
        (
            lambda state: state.update({f"optim.momentum.{Q}": torch.zeros(24, 10).half()}),
            "float16",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, complaint):
    saved = Job(ALONE).train(0, 1).save()["state"]
    change(saved)
    job = Job(ALONE)
    with pytest.raises(ValueError, match=complaint):
        job.optimizer.load_state_dict(saved)
    assert job.optimizer.steps == 0
    assert all(not tensor.any() for tensor in job.optimizer.state_dict().values())
