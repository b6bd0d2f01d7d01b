"""Reports the blend of a run as plain values for its log."""

from typing import Any

from data_pipeline.plan.planner import Planner


def blend_report(planner: Planner) -> dict[str, Any]:
    """Return a summary of the blend, ready for JSON.

    Per source: the number of samples, of chosen samples, and of split, shrunk and refused ones
    among these; the longest sample; mean tokens per draw; its share of the draws and of the
    tokens; and the share of media tokens in its tokens. For the blend: the expected share of media
    tokens. All shares are those at the start of the run.
    """
    mixture = planner.mixture
    weights = mixture.segments[0].weights
    rate = [w * t.tokens / t.samples for w, t in zip(weights, planner.totals)]
    sources: dict[str, Any] = {}
    vision = 0.0
    for i, (source, total) in enumerate(zip(planner.sources, planner.totals)):
        inside = total.vision_tokens / total.tokens
        vision += rate[i] / sum(rate) * inside
        sources[total.name] = {
            **source.counts,
            "mean_tokens": total.tokens / total.samples,
            "draw_share": weights[i] / sum(weights),
            "token_share": rate[i] / sum(rate),
            "vision_share": inside,
        }
    return {
        "sources": sources,
        "vision_token_ratio": vision,
        "manifest": planner.manifest,
        "blend": [[s.start, list(s.weights)] for s in mixture.segments],
        "ends_at": mixture.end,
    }


def mixtures(planner: Planner) -> dict[str, Any]:
    """Return the mixtures of a planner for the run's record, keyed by source name.

    `blend`: [position, {source: draws in UNITS}] of each segment that has begun or is fixed;
    `changes`: [first step, position, new sources] of each `train --change-data`.
    """
    state, names = planner.state_dict(), planner.config.source_names
    return {
        "blend": [
            [start, {name: n for name, n in zip(names, weights, strict=True) if n}]
            for start, weights in state["blend"]
        ],
        "changes": state["changes"],
    }
