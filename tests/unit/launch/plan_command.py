"""Helpers for the tests of `kimi-pretrain plan` on the small real corpus."""

import json

from typer.testing import CliRunner

from data_pipeline.index.manifest import read_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import load_config
from kimi_pretrain.dep.planner import VisionPlanner
from launch.cli.main import app

runner = CliRunner()
SMALL = (
    "data.sources={pictures: 1.0, words: 1.0}", "data.tokenizer=tokenizer.tiktoken",
    "data.vision_token_ratio=0.2", "data.seq_len=128", "data.rows_per_step=8",
    "data.pack_window=64", "data.schedule=[]", "data.max_epochs={}", "data.augment={}",
    "data.cache=null", "data.limits={image: 256, frame: 64}", "train.rows_per_microbatch=1",
    "dep={max_patches_per_chunk: 4096, ranks_per_node: 2}",
    "dep.cost={per_patch: 6.0e-5, per_patch_squared: 8.0e-8, per_item: 1.5e-4}",
)  # fmt: skip
NO_MEDIA = ("data.sources={words: 1.0}", "data.vision_token_ratio=null")
# The layout of tiny_cpu has 2 stages x 2 replicas; ranks 0 and 1 are the first stage.
RANKS, REPLICAS = 4, 2
STAGES_OF_TWO = ("layout.vpp=1", "layout.stages=null", "data.rows_per_step=16")


def run(root, *arguments: str, config: str = "tiny_cpu", code: int = 0):
    given = ["plan", "--config", config, *SMALL, f"data.root={root}", *arguments]
    result = runner.invoke(app, given)
    assert result.exit_code == code, result.output
    return result


def found_by(root, *arguments: str, **options) -> dict:
    return json.loads(run(root, "--json", *arguments, **options).stdout.splitlines()[-1])


def plans_of(root, steps: int, *overrides: str):
    """Yield the plans that a training run's planners make, step by step."""
    config = load_config("tiny_cpu", [*SMALL, *overrides])
    store = FolderStore(root)
    planner = Planner([read_index(store, name) for name in config.data.source_names], config.data)
    state, vision = planner.state_dict(), VisionPlanner(config)
    for _ in range(steps):
        plan, state = planner.plan(state)
        yield plan, vision.plan(plan)


def cost(patches: int) -> float:
    return 6e-5 * patches + 8e-8 * patches**2 + 1.5e-4


def seconds_of(patches, ranks, parts=None) -> list[float]:
    """Return each rank's seconds by a loop over items; split items run at 85% of full speed."""
    seconds = [0.0] * RANKS
    for i, size in enumerate(patches):
        many = 1 if parts is None else int(parts[i])
        for member in range(many):
            slower = many * 0.85 if many > 1 else 1.0
            seconds[int(ranks[i]) + member] += cost(int(size)) / slower
    return seconds


def one_line_error(result) -> str:
    assert result.stdout == ""
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    return line
