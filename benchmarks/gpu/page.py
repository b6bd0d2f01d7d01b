"""Page of `make gpu`: outcome and main figures of each part, from the result files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.result import named, table, yes

Found = Mapping[str, Any]


def page(found: Found, device: str, folder: Path) -> str:
    """Return the page.

    Args:
        found: results of the runner.
        device: "cuda" or "cpu".
        folder: folder of the result files; files of parts that did not run this time are included.
    """
    about = found["about"]
    rows = []
    for part in PARTS:
        one = found["parts"].get(part.name)
        told = [one["outcome"], f"{one['seconds']:.0f}"] if one else ["not run now", ""]
        rows.append([part.name, part.about, *told, f"{part.seconds:.0f}"])
    lines = [
        f"# Everything that has a {device.upper()} form",
        "",
        f"{about['date']}, {about['machine']}; {named(about['versions'])}. Made by "
        "`benchmarks/gpu/run.py`; docs/GPU.md says how.",
        "",
        *(["**In a short form: no figure here is to be quoted.**", ""] if device == "cpu" else []),
        *table(["part", "what", "outcome", "seconds", "limit"], rows),
        "",
    ]
    for part in PARTS:
        file = part.result(device, folder)
        one = found["parts"].get(part.name)
        if one is not None and one["outcome"] != "ok":
            lines += [f"## {part.name}: {one['outcome']}", "", "```", one["output"], "```", ""]
        if file.is_file():
            lines += [f"## {part.name}", "", *_figures(part.name, file), ""]
    return "\n".join(lines) + "\n"


def _figures(name: str, file: Path) -> list[str]:
    try:
        found = json.loads(file.read_text())
        lines = FIGURES[name](found)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return [f"`{file.name}` could not be read: {error!r}"]
    rows = [[one["target"], one["found"], yes(one["met"])] for one in found.get("targets", ())]
    lines += ["", *table(["target", "measured", "met"], rows)] if rows else []
    return [*lines, "", f"More in `{file.name}`."]


def _offload(found: Found) -> list[str]:
    both = found["ways"]["both"]["copies"]["median"]
    return [f"Both ways at once: {2 * found['bytes'] / both / 1e9:.1f} GB/s together."]


def _attention(found: Found) -> list[str]:
    rows = [
        [one["row"], one["form"], f"{one['forward']['median'] * 1e3:.2f}",
         f"{one['both']['median'] * 1e3:.2f}", f"{one['tokens'] / one['both']['median']:,.0f}"]
        for one in found["rows"]
    ]  # fmt: skip
    return table(["row", "form", "forward, ms", "and backward, ms", "tokens/s"], rows)


def _memory(found: Found) -> list[str]:
    rows = [
        [name, f"{one['seconds']['median'] * 1e3:.1f}", f"{one['peak_bytes'] / 2**20:,.0f}"]
        for name, one in found["policies"]["policies"].items()
    ]
    return table(["policy", "step, ms", "peak, MiB"], rows)


def _tests(found: Found) -> list[str]:
    rows = [
        [one["name"], one["outcome"], f"{one['seconds']:.1f}"]
        for one in found["tests"]
        if found["about"]["device"] == "cuda" or one["outcome"] != "skipped"
    ]
    counts = ", ".join(f"{number} {outcome}" for outcome, number in found["counts"].items())
    return [f"{counts}.", "", *table(["test", "outcome", "seconds"], rows)]


def _calibration(found: Found) -> list[str]:
    cost = ", ".join(f"{name} {value:.3g}" for name, value in found["cost"].items())
    language = found["language_model"]
    passes = ", ".join(f"{name} {value:.3g}" for name, value in language["passes"].items())
    return [
        f"{found['device']}, {found['dtype']}: {cost}; error of the fit: median "
        f"{found['median_error']:.1%}, worst {found['worst_error']:.1%}.",
        "",
        f"A microbatch of {language['tokens']} tokens: {passes}; {language['experts']} experts.",
    ]


def _vit(found: Found) -> list[str]:
    rows = [
        [one["mix"], one["pass"], one["speed_ratio"], one["memory_ratio"],
         one["moonvit3d"]["of_matmul_peak"]]
        for one in found["results"]
    ]  # fmt: skip
    return table(["mix", "pass", "x transformers' speed", "x its memory", "of matmul peak"], rows)


def _muon(found: Found) -> list[str]:
    rows = [
        [name, f"{one['ours']['step']['median']:.3g}", f"{one['ratio']['step']['median']:.2f}"]
        for name, one in found["layers"].items()
    ]
    return table(["layer", "step, s", "x torch.optim.Muon's speed"], rows)


FIGURES: dict[str, Callable[[Found], list[str]]] = {
    "offload": _offload,
    "attention": _attention,
    "memory": _memory,
    "tests": _tests,
    "calibration": _calibration,
    "vit": _vit,
    "muon": _muon,
}
