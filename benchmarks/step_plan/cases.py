"""Configurations whose steps are predicted and measured: sizes, layouts, media shares."""

from dataclasses import dataclass, field

# Sizes of the language model, which override benchmarks/dep/config.yaml.
SMALL = (
    "model.vision.out_width=192", "model.language.hidden_size=192", "model.language.num_heads=3",
    "model.language.dense_ffn_size=768", "model.language.expert_ffn_size=192",
    "model.language.q_lora_rank=96", "model.language.kv_lora_rank=48",
)  # fmt: skip
MEDIUM = (
    "model.vision.out_width=256", "model.language.hidden_size=256", "model.language.num_heads=4",
    "model.language.dense_ffn_size=1024", "model.language.expert_ffn_size=256",
    "model.language.q_lora_rank=96", "model.language.kv_lora_rank=64",
)  # fmt: skip
SIZES = {"192": SMALL, "256": MEDIUM, "320": ()}
TEXT = ("data.sources={words: 1.0}", "data.vision_token_ratio=null")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        layout: keys of the `layout` section.
        hidden: width of the language model, a key of `SIZES` or the value that other overrides set.
        layers: layers of the language model; the first is dense.
        rows: rows of a step.
        per_microbatch: rows of a microbatch.
        media: media share of the tokens.
        experts: experts of a layer.
    """

    layout: dict[str, int] = field(default_factory=dict)
    hidden: str = "256"
    layers: int = 4
    rows: int = 8
    per_microbatch: int = 2
    media: float = 0.0
    experts: int = 4

    @property
    def name(self) -> str:
        """Description of the configuration in words."""
        layout = " ".join(f"{key}{value}" for key, value in self.layout.items())
        return (
            f"{layout}, {self.layers} layers of {self.hidden}, {self.experts} experts, "
            f"{self.rows} rows by {self.per_microbatch}, {self.media:.0%} media"
        )

    @property
    def overrides(self) -> list[str]:
        """Overrides of benchmarks/dep/config.yaml."""
        layout = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1} | self.layout
        media = (f"data.vision_token_ratio={self.media}",) if self.media else TEXT
        return [
            *SIZES.get(self.hidden, ()),
            *(f"layout.{key}={value}" for key, value in layout.items()),
            f"model.language.num_layers={self.layers}", f"data.rows_per_step={self.rows}",
            f"train.rows_per_microbatch={self.per_microbatch}",
            f"model.language.num_experts={self.experts}", *media,
            "dep.ranks_per_node=1",  # traffic between the processes then has the rate of --network
        ]  # fmt: skip


PP, VPP, DP, EP = {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2}, {"dp": 2, "ep": 2}
CASES = (
    Case(PP, "320", 4, rows=8, per_microbatch=2),
    Case(PP, "256", 4, rows=8, per_microbatch=1, media=0.25),
    Case(PP, "192", 8, rows=16, per_microbatch=2, media=0.1),
    Case(VPP, "192", 4, rows=8, per_microbatch=2),
    Case(VPP, "256", 8, rows=8, per_microbatch=1),
    Case(VPP, "320", 4, rows=8, per_microbatch=2, media=0.25),
    Case(DP, "256", 4, rows=8, per_microbatch=2),
    Case(DP, "192", 4, rows=12, per_microbatch=2, media=0.25),
    Case(DP, "320", 6, rows=4, per_microbatch=1, media=0.15),
    Case(EP, "192", 6, rows=8, per_microbatch=2),
    Case(EP, "256", 4, rows=8, per_microbatch=2, media=0.25),
    Case(EP, "320", 3, rows=8, per_microbatch=4, media=0.1, experts=8),
)
