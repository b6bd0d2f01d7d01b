"""The two jobs that `kimi-pretrain verify dep` compares, and what they leave behind.

Job A runs the user's layout with the Decoupled Encoder Process. Job B is one process with the
encoder inside the graph: no exchange, no second forward, no parallelism. Both start from the same
weights, take the same step of the same data and leave their divided gradients in files. Job A also
writes down which experts its tokens chose; job B follows it where a token is at a tie.
"""

import json
from pathlib import Path
from typing import Any

from kimi_pretrain.config import Config, parse_config
from kimi_pretrain.sections import DepConfig, LayoutConfig
from kimi_pretrain.verify.compare import StepFacts, StepRoutes

CLEAN = "clean"  # folder of the step without a fault
FACTS = "facts.json"


def decoupled(config: Config) -> Config:
    """Return the configuration of job A: the user's own, reading no further than it has to."""
    values = config.model_dump(mode="json")
    values["dep"]["placement"] = "decoupled"
    return parse_config(_reading_little(values), where="verify dep")


def reference(config: Config) -> Config:
    """Return the configuration of job B: the same model and data in one process, without DEP."""
    values = config.model_dump(mode="json")
    plain = DepConfig(placement="colocated", max_patches_per_chunk=config.dep.max_patches_per_chunk)
    values["layout"] = LayoutConfig().model_dump(mode="json")
    values["dep"] = plain.model_dump(mode="json")
    return parse_config(_reading_little(values), where="verify dep, reference")


def _reading_little(values: dict[str, Any]) -> dict[str, Any]:
    values["data"] |= {"workers": 0, "prefetch_steps": 0}
    values["train"]["threads"] = None  # set by the environment, for the processes of each job
    return values


def read_facts(folder: Path) -> tuple[StepFacts, dict[str, Any]] | str:
    """Return what a job says of a step and of its vision plan, or why a fault was not planted.

    Raises:
        FileNotFoundError: the job never came so far.
    """
    content = json.loads((folder / FACTS).read_text())
    if "obstacle" in content:
        return content["obstacle"]
    facts = content["step"]
    for name in ("losses", "differing"):
        facts[name] = tuple(facts[name])
    facts["routes"] = tuple(StepRoutes(**step) for step in facts.get("routes", ()))
    return StepFacts(**facts), content["plan"]
