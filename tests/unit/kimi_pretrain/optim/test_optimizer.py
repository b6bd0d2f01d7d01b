"""Tests the public optimizer's state, rules and QK-Clip in one process; test_muon.py trains it."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from kimi_pretrain.optim import AttentionHeads, MuonClip, Split
from kimi_pretrain.optim.groups import ModelShape
from tests import ROOT
from tests.resume import assert_resumes_anywhere
from tests.unit.kimi_pretrain.optim.oracles import clip_by_hand, draw


def test_a_stack_of_fused_experts_equals_its_matrices():
    """Compares a stack [experts, gate rows and up rows, columns] with one parameter per matrix."""
    stack = nn.Parameter(draw((3, 10, 8), "stack"))
    alone = [nn.Parameter(stack.detach()[e, r : r + 5].clone()) for e in range(3) for r in (0, 5)]
    rule = {"*": Split(rows=(5, 5), stacked=True)}
    one = MuonClip([("w", stack)], lr=0.02, rules=rule, ns_dtype="float32")
    many = MuonClip(
        [(f"{i}", p) for i, p in enumerate(alone)], 0.02, {"*": "muon"}, ns_dtype="float32"
    )
    for step in range(4):
        stack.grad = draw((3, 10, 8), "grad", step)
        for i, param in enumerate(alone):
            param.grad = stack.grad[i // 2, 5 * (i % 2) : 5 * (i % 2) + 5].clone()
        one.step()
        many.step()
    torch.testing.assert_close(
        stack.detach().reshape(6, 5, 8), torch.stack([*map(torch.detach, alone)])
    )
    assert one.state[stack]["momentum_buffer"].shape == (3, 10, 8)


class Run:
    """Small model with its optimizer and schedule; `next` runs one step."""

    def __init__(self, dtype=torch.float32, **settings):
        torch.manual_seed(0)
        self.model = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.0, batch_first=True, dtype=dtype
        )
        rules = {"self_attn.in_proj_weight": Split(rows=(8, 8, 8)), "*": "muon"}
        decayed = [(n, p) for n, p in self.model.named_parameters() if p.ndim > 1]
        plain = [(n, p) for n, p in self.model.named_parameters() if p.ndim == 1]
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 3e-2}]
        self.optimizer = MuonClip(groups, lr=1e-2, rules=rules, **settings)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def __next__(self) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        dtype = next(self.model.parameters()).dtype
        x = draw((3, 5, 8), "batch", self.schedule.last_epoch).to(dtype)
        self.model(x).float().square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def state_dict(self) -> dict:
        parts = self.model, self.optimizer, self.schedule
        return dict(zip(("model", "optimizer", "schedule"), (part.state_dict() for part in parts)))

    def load_state_dict(self, state: dict) -> None:
        for name, saved in state.items():
            getattr(self, name).load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resume_anywhere_is_bit_exact(dtype):
    assert_resumes_anywhere(lambda: Run(dtype), steps=5)


def test_the_state_dict_is_torch_s(tmp_path):
    run = Run(torch.bfloat16)
    next(run)
    torch.save(run.optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    named = dict(run.model.named_parameters())
    assert list(state["state"]) == list(range(len(named)))
    for group in state["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            entry = state["state"][index]
            moments = {"momentum_buffer"} if named[name].ndim > 1 else {"exp_avg", "exp_avg_sq"}
            assert entry.keys() == {"step", "master", *moments}
            assert entry["step"] == 1
            for part in ("master", *moments):
                assert (entry[part].shape, entry[part].dtype) == (named[name].shape, torch.float32)
    whole = run.optimizer.full_state_dict()
    assert whole is not None
    assert whole["state"].keys() == state["state"].keys()
    assert run.optimizer.full_state_dict() is not None


def test_schedules_and_groups_are_torch_s():
    """Compares with rates set by hand, as a scheduler writes them into groups."""
    scheduled, by_hand = Run(), Run()
    by_hand.schedule.step = lambda: None
    for step in range(4):
        for group in by_hand.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 + math.cos(math.pi * step / 20)) / 2
        by_hand.schedule.last_epoch = step
        found, expected = next(scheduled), next(by_hand)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


def test_momentum_and_betas_may_be_scheduled():
    run = Run()
    cycle = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=1e-2, total_steps=10)
    next(run)
    before = run.optimizer.param_groups[0]["betas"]
    cycle.step()
    assert run.optimizer.param_groups[0]["betas"] != before
    next(run)
    run.optimizer.param_groups[0]["momentum"] = 0.0
    next(run)
    weight = run.model.linear1.weight
    assert torch.equal(run.optimizer.state[weight]["momentum_buffer"], weight.grad)


def test_a_parameter_without_gradient_is_left_alone_and_counts_its_own_steps():
    """AdamW corrects the bias of its averages by the number of updates of each parameter."""
    mine, theirs = (nn.Parameter(draw((7,), "w")) for _ in range(2))
    other = nn.Parameter(draw((4, 4), "other"))
    optimizer = MuonClip([("w", mine), ("other", other)], lr=0.1, rules={"*": "muon"})
    oracle = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(6):
        present = step % 3 != 0
        mine.grad = theirs.grad = draw((7,), "grad", step) if present else None
        other.grad = draw((4, 4), "other", step)
        before = mine.detach().clone()
        optimizer.step()
        oracle.step()
        assert present or torch.equal(mine, before)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    steps = [float(optimizer.state[param]["step"]) for param in (mine, other)]
    assert steps == [4, 6]
    fresh = MuonClip([("w", mine), ("other", other)], lr=0.1, rules={"*": "muon"})
    fresh.load_state_dict(optimizer.state_dict())
    assert [float(fresh.state[param]["step"]) for param in (mine, other)] == steps


def test_weights_loaded_after_construction_reach_the_masters():
    run, other = Run(torch.bfloat16), Run(torch.bfloat16)
    for param in other.model.parameters():
        param.data.add_(1.0)
    run.model.load_state_dict(other.model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(next(run).values(), next(other).values()))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_deep_copy_goes_on_as_the_original_and_leaves_it_alone(steps):
    run = Run(torch.bfloat16)
    for _ in range(steps):
        next(run)
    before = {name: param.detach().clone() for name, param in run.model.named_parameters()}
    twin = copy.deepcopy(run)
    found = [next(twin) for _ in range(3)]
    for name, param in run.model.named_parameters():
        assert torch.equal(param, before[name]), name
    for weights in found:
        for name, weight in next(run).items():
            assert torch.equal(weights[name], weight), name
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        pickle.dumps(run.optimizer)


def test_a_closure_is_called_with_gradients_and_gives_the_loss():
    run, twin = Run(), Run()
    x = draw((3, 5, 8), "batch", 0)

    def closure() -> float:
        loss = run.model(x).square().sum()
        loss.backward()
        return loss.item()

    expected = run.model(x).square().sum().item()
    assert run.optimizer.step(closure) == expected
    assert all(torch.equal(p, w) for p, w in zip(run.model.parameters(), next(twin).values()))


# QK-Clip -----------------------------------------------------------------------------------------

HEADS, WIDTH, IN, TOKENS = 3, 4, 6, 9


def logits(query: Tensor, key: Tensor) -> Tensor:
    """Return logits [heads, tokens, tokens] of weights [heads * WIDTH, IN].

    A single key head serves all query heads.
    """
    x = draw((TOKENS, IN), "x").to(query.dtype)
    q = (x @ query.T).view(TOKENS, -1, WIDTH).movedim(1, 0)
    k = (x @ key.T).view(TOKENS, -1, WIDTH).movedim(1, 0)
    return q @ k.mT


def clipped(params: dict[str, nn.Parameter], heads: AttentionHeads, old: Tensor, tau: float):
    """Clip one layer after a step without change; return the number of clipped heads, and gamma."""
    rules = {"*": "muon"}
    optimizer = MuonClip(
        params.items(), 0.0, rules, weight_decay=0.0, attention=[heads], qk_clip_threshold=tau
    )
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    maxima = old.amax((1, 2))
    return optimizer.qk_clip(maxima[None]), (tau / maxima).clamp(max=1)


@pytest.mark.parametrize("fused", [False, True])
def test_qk_clip_brings_the_largest_logits_to_the_threshold(fused):
    rows = HEADS * WIDTH
    weight = nn.Parameter(draw((3 * rows, IN), "qkv").double())
    if fused:
        params = {"qkv": weight}
        heads = AttentionHeads(("qkv", 0, rows), ("qkv", rows, 2 * rows))
    else:
        params = {n: nn.Parameter(w.clone()) for n, w in zip("qkv", weight.detach().chunk(3))}
        heads = AttentionHeads("q", "k")
    old = logits(*weight.detach().chunk(3)[:2])
    tau = float(old.amax((1, 2)).median())
    count, gamma = clipped(params, heads, old, tau)
    parts = (
        list(params.values())[0].detach().chunk(3)
        if fused
        else [p.detach() for p in params.values()]
    )
    torch.testing.assert_close(logits(*parts[:2]), gamma[:, None, None] * old)
    assert count == int((gamma < 1).sum()) == 1
    assert torch.equal(parts[2], draw((3 * rows, IN), "qkv").double().chunk(3)[2])


def test_qk_clip_of_heads_that_share_a_key_scales_the_query_alone():
    params = {
        "q": nn.Parameter(draw((HEADS * WIDTH, IN), "q")),
        "k": nn.Parameter(draw((WIDTH, IN), "k")),
    }
    key = params["k"].detach().clone()
    old = logits(params["q"].detach(), key)
    count, gamma = clipped(params, AttentionHeads("q", None), old, 1.0)
    torch.testing.assert_close(logits(params["q"].detach(), key), gamma[:, None, None] * old)
    assert count == HEADS
    assert torch.equal(params["k"], key)


def test_qk_clip_of_latent_attention():
    shape = ModelShape(HEADS, 4, 2, 5, 6)
    params = {"q": nn.Parameter(draw((18, 6), "q")), "kv_b": nn.Parameter(draw((27, 6), "kv"))}
    expected = [param.detach().clone() for param in params.values()]
    old = torch.tensor([200.0, 50.0, 400.0])
    heads = AttentionHeads("q", "kv_b", rope_rows=2, value_rows=5)
    _, gamma = clipped(params, heads, old[:, None, None], 100.0)
    clip_by_hand(*expected, gamma, shape)
    for param, weight in zip(params.values(), expected, strict=True):
        torch.testing.assert_close(param.detach(), weight)


def test_maxima_without_a_factor_clip_nothing():
    params = {"q": nn.Parameter(draw((12, 4), "q")), "k": nn.Parameter(draw((12, 4), "k"))}
    heads = [AttentionHeads("q", "k")]
    optimizer = MuonClip(params.items(), 0.1, {"*": "muon"}, attention=heads)
    before = params["q"].detach().clone()
    assert optimizer.qk_clip(torch.tensor([[-math.inf, math.inf, math.nan]])) == 0
    assert torch.equal(params["q"], before)
    with pytest.raises(ValueError, match=r"maxima are \(3,\), expected \[layers, heads\] of the 1"):
        optimizer.qk_clip(torch.zeros(3))
    with pytest.raises(ValueError, match="12 rows of 'q' are not those of 5 heads"):
        optimizer.qk_clip(torch.full((1, 5), 200.0))


def test_qk_clip_as_a_hook_reaches_masters_too():
    params = {n: nn.Parameter(draw((12, 4), n).bfloat16()) for n in "qk"}
    heads = [AttentionHeads("q", "k")]
    optimizer = MuonClip(params.items(), 0.0, {"*": "muon"}, weight_decay=0.0, attention=heads)
    maxima = torch.tensor([[400.0, 1.0, 1.0]])
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.qk_clip(maxima))
    params["q"].grad = torch.zeros_like(params["q"])
    optimizer.step()
    assert torch.equal(params["q"][:4], draw((12, 4), "q").bfloat16()[:4] / 2)
    master = optimizer.state[params["q"]]["master"]
    assert torch.equal(master, params["q"].float())


# Refusals ----------------------------------------------------------------------------------------


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


SHARED = weight(4, 4)
ACROSS = nn.Parameter(torch.ones(4, 3, 2).transpose(0, 1))
ABSENT = nn.Parameter(torch.ones(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("params", "rules", "complaint"),
    [
        ([weight(2, 2)], {"*": "muon"}, r"rules go by name; give model\.named_parameters"),
        (
            [("w", weight(2, 2)), ("x", weight(2))],
            {"x": "muon"},
            r"'w' \(2, 2\) is None; give 'muon'",
        ),
        ([("w", weight(2, 2))], lambda name, param: "sgd", "is 'sgd'; give 'muon', 'adamw' or"),
        ([("w", weight(2, 2, 2))], {"*": "muon"}, r"Split\(stacked=True\) for a stack"),
        ([("w", weight(5, 2))], {"w": Split((2, 2))}, r"\(5, 2\) has 5 rows, .* 1 x \(2, 2\) = 4"),
        ([("w", weight(4, 2))], {"w": Split(stacked=True)}, "cannot be read as Split"),
        ([("w", weight(2))], lambda name, param: "muon", "cannot be read as Split"),
        ([{"params": [("w", weight(2))]}, {"params": [("w", weight(2))]}], {}, "'w'. given twice"),
        ([{"params": [("w", weight(2))], "momentum": 1.0}], {}, "momentum is 1.0"),
        ([{"params": [("w", weight(2))], "lr": -1.0}], {}, "lr is -1.0"),
        ([("a", SHARED), ("b", SHARED)], {"*": "muon"}, "'a' and 'b' are one parameter"),
        ([("w", ACROSS)], {"*": Split(stacked=True)}, "'w' is not contiguous"),
        ([("w", ABSENT)], {"*": "muon"}, "'w' is on the meta device"),
    ],
)
def test_what_cannot_be_trained_is_refused(params, rules, complaint):
    with pytest.raises(ValueError, match=complaint):
        MuonClip(params, lr=0.1, rules=rules)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rules": {"wieght": Split(rows=(4, 4)), "*": "muon"}}, r"'wieght'; .* \['weight'\]"),
        ({"rules": {"module.weight": "adamw", "*": "muon"}}, "no parameter's name matches"),
        ({"qk_clip_threshold": 0.0}, "qk_clip_threshold is 0.0"),
        ({"qk_clip_threshold": float("nan")}, "qk_clip_threshold is nan"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"ns_dtype": "float16"}, "ns_dtype is 'float16'"),
        ({"bucket_elements": 0}, "bucket_elements is 0"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (0.9,)}, "betas is"),
        (
            {"attention": [AttentionHeads(("weight", 2, 99), None)]},
            r"no rows of 'weight', a .*8, 4",
        ),
        ({"attention": [AttentionHeads("weight", "k")]}, "there is no parameter 'k'"),
        (
            {"attention": [AttentionHeads("weight", "weight")]},
            "rows 0 to 8 of 'weight' are given tw",
        ),
    ],
)
def test_settings_that_would_train_something_else_are_refused(settings, complaint):
    given = {"lr": 0.1, "rules": {"*": "muon"}} | settings
    with pytest.raises(ValueError, match=complaint):
        MuonClip([("weight", weight(8, 4))], **given)


def test_a_state_of_another_model_or_optimizer_is_refused():
    def built(*names: str) -> MuonClip:
        return MuonClip([(name, weight(2, 2)) for name in names], 0.1, {"*": "adamw"})

    state = built("a", "b").state_dict()
    with pytest.raises(ValueError, match="the state is of 'a' where this model has 'b'"):
        built("b", "a").load_state_dict(state)
    del state["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match=r"has no \['lr'\]"):
        built("a", "b").load_state_dict(state)
    state["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        built("a", "b").load_state_dict(state)
    theirs = torch.optim.AdamW([weight(2, 2), weight(2, 2)]).state_dict()
    with pytest.raises(ValueError, match="of another optimizer"):
        built("a", "b").load_state_dict(theirs)


def test_groups_and_memory_are_fixed():
    run = Run()
    with pytest.raises(RuntimeError, match="give all parameter groups"):
        run.optimizer.add_param_group({"params": [("w", weight(2))]})
    run.model.linear1.weight.data = run.model.linear1.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"the memory of 'linear1\.weight' was replaced"):
        next(run)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state["param_groups"].pop(), r"groups of \[4\] parameters in the state"),
        (lambda state: state["state"].pop(2), r"lacks 'optim\.momentum\."),
        (lambda state: state["state"][2].update(momentum_buffer=torch.ones(3)), r"\(3,\) in the"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, complaint):
    trained, fresh = Run(), Run()
    next(trained)
    saved = trained.optimizer.state_dict()
    change(saved)
    with pytest.raises(ValueError, match=complaint):
        fresh.optimizer.load_state_dict(saved)
    assert fresh.optimizer.param_groups[0]["lr"] == 1e-2
    assert not any(s["step"] for s in fresh.optimizer.state.values())
    assert all(torch.equal(a, b) for a, b in zip(next(fresh).values(), next(Run()).values()))


def test_the_room_loads_torch_on_first_use_and_never_megatron():
    code = (
        "import sys, kimi_pretrain.optim as o; assert 'torch' not in sys.modules; o.MuonClip; "
        "assert not {m.split('.')[0] for m in sys.modules} & {'megatron', 'data_pipeline'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
