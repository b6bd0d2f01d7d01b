"""Settings of the runs: the demo's model and corpus in one process, and the runs of both parts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ADAMW, MUON, MUONCLIP = "AdamW", "Muon", "MuonClip"
# AdamW with embedding and head at Muon's rate, which shows their part of Muon's lead.
CONTROL = "AdamW, faster ends"
CLIP, RATES = "clip", "rates"
PARTS = (CLIP, RATES)
PRESET = "tiny_cpu"

# The demo's job in one process: half the rows per step, one mix of sources throughout, no cache and
# no limit on requests (the data are in a folder), nothing saved or timed. The language model keeps
# the demo's widths. Fewer layers, fewer experts and a thin encoder give a step of half a second, so
# that many runs are possible.
ONE_PROCESS = (
    "layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1",
    "model.language.num_layers=3", "model.language.num_experts=4",
    "model.vision.depth=1", "model.vision.width=64", "model.vision.mlp_width=128",
    "data.rows_per_step=8", "data.schedule=[]", "data.cache=null", "data.requests_per_second=null",
    "train.rows_per_microbatch=8", "checkpoint.every=null", "train.trace_step=null",
    "train.efficiency_pairs=0", "train.threads=1",
)  # fmt: skip

# Too small for meaningful figures; shows only that everything runs.
QUICK = (
    "model.vision.width=32", "model.vision.depth=1", "model.vision.heads=2",
    "model.vision.mlp_width=64", "model.vision.out_width=64", "model.language.num_layers=2",
    "model.language.hidden_size=64", "model.language.dense_ffn_size=96",
    "model.language.expert_ffn_size=32", "model.language.num_experts=2", "data.rows_per_step=4",
    "train.rows_per_microbatch=4", "data.pack_window=64", "data.max_epochs={}",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Scope of the training.

    Attributes:
        parts: parts to run, from `PARTS`.
        threshold: tau of QK-Clip.
        clip_lr: learning rate of the clip part, at which plain Muon's logits grow without bound.
        clip_steps, rates_steps: length of a run of each part.
        clip_seeds, rates_seeds: seeds of data order and initial weights; the sweep uses the first
            seed.
        rates: learning rates of the sweep, the same for every optimizer.
        control_rates: learning rates of the control's sweep, see `control_runs`.
        tail_steps: number of last steps whose mean loss is the final loss of a run.
        overrides: config overrides of every run, `section.key=value`.
        quick: True for a smoke run, whose figures mean nothing.
    """

    parts: Sequence[str] = PARTS
    threshold: float = 30.0
    clip_lr: float = 0.06
    clip_steps: int = 150
    clip_seeds: Sequence[int] = (0, 1, 2)
    rates: Sequence[float] = (0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
    control_rates: Sequence[float] = (0.00015625, 0.0003125, 0.000625, 0.00125, 0.0025)
    rates_steps: int = 100
    rates_seeds: Sequence[int] = (0, 1, 2)
    tail_steps: int = 20
    overrides: Sequence[str] = ONE_PROCESS
    quick: bool = False


def quick_plan() -> Plan:
    """Return the plan of a smoke run, which takes seconds and whose figures mean nothing."""
    return Plan(
        threshold=0.3,
        clip_lr=0.05,
        clip_steps=6,
        clip_seeds=(0,),
        rates=(0.02,),
        control_rates=(0.005,),
        rates_steps=2,
        rates_seeds=(0, 1),
        tail_steps=1,
        overrides=(*ONE_PROCESS, *QUICK),
        quick=True,
    )


@dataclass(frozen=True)
class Run:
    """One training run; `scale` multiplies the rate of embedding and head."""

    part: str
    optimizer: str
    lr: float
    seed: int
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Name that is unique among the runs and valid as a folder name."""
        optimizer = re.sub(r"\W+", "_", self.optimizer.lower())
        return f"{self.part}_{optimizer}_{self.lr:g}_{self.seed}"


def optimizer_overrides(run: Run, threshold: float) -> tuple[str, ...]:
    """Return the overrides that differ between the optimizers; everything else is the same."""
    adamw = "optim.matrices=adamw", "optim.qk_clip_threshold=null"
    ends = f"{{embedding: {{lr_scale: {run.scale}}}, head: {{lr_scale: {run.scale}}}}}"
    return {
        ADAMW: adamw,
        CONTROL: (*adamw, f"optim.groups={ends}"),
        MUON: ("optim.qk_clip_threshold=null",),
        MUONCLIP: (f"optim.qk_clip_threshold={threshold}",),
    }[run.optimizer]


def schedule_overrides(part: str, lr: float, steps: int) -> tuple[str, ...]:
    """Return the schedule: warm-up to lr over a twelfth of the steps, then a constant rate.

    In the rates part, the second half decays to a tenth on a cosine, because these runs are
    compared by their final loss.
    """
    warmup = max(1, steps // 12)
    decay = steps // 2 if part == RATES else 0
    return (
        f"optim.lr={lr}", f"optim.min_lr={lr / 10}", f"optim.warmup_steps={warmup}",
        f"optim.stable_steps={steps - warmup - decay}", f"optim.decay_steps={decay}",
    )  # fmt: skip


def overrides_of(run: Run, plan: Plan, root: str) -> tuple[str, ...]:
    """Return all overrides of a run on the corpus at `root`."""
    steps = plan.clip_steps if run.part == CLIP else plan.rates_steps
    return (
        *plan.overrides,
        *optimizer_overrides(run, plan.threshold),
        *schedule_overrides(run.part, run.lr, steps),
        f"data.root={root}",
        f"data.seed={run.seed}",
        f"train.seed={run.seed}",
        f"train.steps={steps}",
        f"guard.skips_in_row={steps + 1}",  # a run that diverges is a result, too
    )


def clip_runs(plan: Plan) -> list[Run]:
    """Return the runs with and without the clip, ordered by seed."""
    return [
        Run(CLIP, name, plan.clip_lr, seed) for seed in plan.clip_seeds for name in (MUON, MUONCLIP)
    ]


def sweep_runs(plan: Plan) -> list[Run]:
    """Return the sweep: every optimizer at every rate, with the first seed."""
    first = plan.rates_seeds[0]
    return [Run(RATES, name, lr, first) for name in (ADAMW, MUON, MUONCLIP) for lr in plan.rates]


def control_runs(plan: Plan, muon: float) -> list[Run]:
    """Return the sweep of AdamW with embedding and head fixed at Muon's best rate.

    A rate that equals Muon's is left out, because the plain sweep already contains that run.
    """
    first = plan.rates_seeds[0]
    return [Run(RATES, CONTROL, lr, first, muon / lr) for lr in plan.control_rates if lr != muon]
