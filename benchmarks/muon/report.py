"""Renders the results as a Markdown page and checks the targets. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.result import named, spread, table, verdicts

QUIET_LOAD = 0.5
AT_LEAST = {"moonlight": 1.2, "k2": 1.5}  # minimum speed over torch.optim.Muon's
WORSE, FLOOR = 1.25, 0.02  # bound on the bf16 error: WORSE times torch's error plus FLOOR
PEAK_SHARE = 0.6  # minimum share of the measured matmul peak, on a GPU

Found = Mapping[str, Any]


def targets(found: Found) -> list[dict[str, Any]]:
    """Return each target with the measured value."""
    rows = []
    for name, ratio in AT_LEAST.items():
        for part in ("step", "newton_schulz") if name in found["layers"] else ():
            seen = found["layers"][name]["ratio"][part]
            rows.append(
                {
                    "target": f"{name}: {_PARTS[part]} at least {ratio} x torch.optim.Muon's speed",
                    "found": spread(seen, ".2f"),
                    "met": seen["median"] >= ratio,
                }
            )
    if found["about"]["device"] == "cuda" and "k2" in found["layers"]:
        layer = found["layers"]["k2"]
        share = _share(layer["flops"]["ours"], layer["ours"]["newton_schulz"], found)
        rows.append(
            {
                "target": f"k2: Newton-Schulz at least {PEAK_SHARE:.0%} of the matmul peak",
                "found": f"{share:.0%}",
                "met": share >= PEAK_SHARE,
            }
        )
    rows.append(_accuracy_target(found["accuracy"]))
    return rows


def _accuracy_target(studies: Sequence[Found]) -> dict[str, Any]:
    """Return the bound that tests/unit/test_bench_muon.py checks, over every kind of matrix."""
    pairs = [
        (errors["ours, bf16"][0], errors["torch, bf16"][0])
        for study in studies
        for errors in study["errors"].values()
    ]
    return {
        "target": f"error in bf16 at most {WORSE} x torch.optim.Muon's + {FLOOR}",
        "found": f"{max(own - WORSE * theirs for own, theirs in pairs):+.4f} at worst; "
        f"{sum(own <= theirs for own, theirs in pairs)} of {len(pairs)} matrices below torch's",
        "met": all(own <= WORSE * theirs + FLOOR for own, theirs in pairs),
    }


_COLUMNS = {"target": "target", "found": "measured, median (least - most)", "met": "met"}
_PARTS = {"step": "whole optimizer step", "newton_schulz": "Newton-Schulz"}


def page(found: Found) -> str:
    """Return the whole page."""
    about = found["about"]
    lines = [
        f"# Muon against torch.optim.Muon: measured on {about['device'].upper()}",
        "",
        f"{about['date']}, {about['machine']}, {about['threads']} threads; "
        f"{named(about['versions'])}. Made by `benchmarks/bench_muon.py` in {about['seconds']} s.",
        "",
        *_warnings(about),
        *verdicts(found["targets"], _COLUMNS),
        *_layers(found),
        *_shapes(found),
        *_accuracy(found["accuracy"]),
        *_orders(found["orders"]),
    ]
    return "\n".join(lines) + "\n"


def _warnings(about: Found) -> list[str]:
    lines = []
    if about["quick"]:
        lines += [f"**Every width over {about['scale']}: no figure here is to be quoted.**", ""]
    if about["load_before"][0] > QUIET_LOAD:
        lines += [
            f"**Read with care: the load was {about['load_before'][0]:g} before the start. Ratios "
            "were taken in turns and suffer less than seconds; accuracy and counts do not.**",
            "",
        ]
    return lines


def _layers(found: Found) -> list[str]:
    rows = []
    for layer in found["layers"].values():
        for side in ("ours", "torch", "adamw"):
            if side not in layer:
                continue
            count = layer["flops"].get(side)
            inside = layer[side].get("newton_schulz")
            rows.append(
                [
                    layer["title"], _SIDES[side], spread(layer[side]["step"], ".3g"),
                    spread(inside, ".3g") if inside else "",
                    f"{count / 1e12:.2f}" if count else "",
                    f"{_share(count, inside, found):.0%}" if count and inside else "",
                ]
            )  # fmt: skip
    peak, size = found["matmul"]["flops_per_second"] / 1e12, found["matmul"]["size"]
    about = [
        f"{layer['title']}: {layer['parameters'] / 1e6:.0f}M parameters in {layer['matrices']} "
        f"matrices; the weights of the two sides differ by "
        f"{layer['apart_after_one_step']:.1%} at most after one step (both are bf16)"
        for layer in found["layers"].values()
    ]
    return [
        "## One optimizer step",
        "",
        "fp32 weights, gradients and momentum, Newton-Schulz in bf16, 5 steps. The sides take "
        "turns in one process; medians (least - most), ratios inside a round. "
        "`torch.optim.Muon(adjust_lr_fn='match_rms_adamw')` gets every piece of a fused matrix as "
        f"a parameter of its own, which is the same arithmetic. {'; '.join(about)}.",
        "",
        *table(
            ["layer", "", "step, s", "Newton-Schulz, s", "TFLOP", "of the matmul peak"], rows
        ),
        "",
        f"TFLOP: what is really multiplied. The peak is the fastest of five bf16 products of "
        f"{size} x {size}: {peak:.2f} TFLOP/s. A share above 100% is a cache's.",
        "",
    ]  # fmt: skip


_SIDES = {"ours": "ours", "torch": "torch.optim.Muon", "adamw": "torch.optim.AdamW"}


def _share(count: float, seconds: Found, found: Found) -> float:
    return count / seconds["median"] / found["matmul"]["flops_per_second"]


def _shapes(found: Found) -> list[str]:
    rows = [
        [
            " x ".join(map(str, one["shape"])),
            "direct" if set(one["segments"]) == {1} else "+".join(map(str, one["segments"])),
            f"{one['flops']['torch'] / one['flops']['ours']:.2f}",
            spread(one["ratio"], ".2f"),
            spread(one["seconds"]["ours"], ".3g"),
            spread(one["seconds"]["torch"], ".3g"),
        ]
        for one in found["shapes"]
    ]
    head = ["matrix", "steps on one Gram matrix", "faster by count", "measured", "ours, s",
            "torch, s"]  # fmt: skip
    return ["## Newton-Schulz of single matrices", "", *table(head, rows), ""]


def _accuracy(studies: Sequence[Found]) -> list[str]:
    lines = [
        "## Accuracy",
        "",
        "Against the direct iteration in fp64 from the same fp32 matrix: relative error in the "
        "Frobenius norm / spectral norm of the difference (singular values of the result lie near "
        "one, so 0.01 is 1%). \"direct\" is `orthogonalise_reference`, full products and no Gram "
        "form; \"torch\" is torch.optim.Muon's own.",
        "",
    ]  # fmt: skip
    for study in studies:
        forms = list(next(iter(study["errors"].values())))
        rows = [
            [kind, *(f"{_short(cells[form][0])} / {_short(cells[form][1])}" for form in forms)]
            for kind, cells in study["errors"].items()
        ]
        shape = " x ".join(map(str, study["shape"]))
        parts = "+".join(map(str, study["segments"]))
        lines += [f"{shape}, steps {parts}:", "", *table(["matrix", *forms], rows), ""]
    return lines


def _orders(study: Found) -> list[str]:
    names = list(next(iter(study["errors"].values())))
    rows = [[kind, *map(_short, cells.values())] for kind, cells in study["errors"].items()]
    return [
        "## Where the Gram matrix is taken anew",
        "",
        f"{' x '.join(map(str, study['shape']))} in bf16: relative error in the Frobenius norm by "
        "the steps that run on each Gram matrix. 1+1+1+1+1 is the direct form with symmetric "
        "products; ours is 3+2 where the Gram form is chosen.",
        "",
        *table(["matrix", *names], rows),
        "",
    ]


def _short(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 else f"{value:.0e}" if value else "0"
