"""What the blend of a run comes to, as plain values for its log."""

from typing import Any

from data_pipeline.plan.planner import Planner


def blend_report(planner: Planner) -> dict[str, Any]:
    """Return what the blend comes to, ready for JSON.

    Per source: samples; how many are chosen, and of these split, shrunk and refused; the longest of
    them; mean tokens of a draw, share of draws, of tokens, and of media tokens in its own tokens;
    for the whole: the expected share of media tokens. Shares are those at the start.
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
    """Return the mixtures that a planner goes on with, as a run notes them, by names of sources.

    `blend`: [position, {source: draws in UNITS}] of each stretch that has begun, or was decided on;
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
