"""Summarizes the loader results and renders them as a page."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.result import named, spread, table, verdicts, yes

# Rounds of each loader, each with the figures of its cells: {"litdata": [{cell name: {...}}, ...]}
Rounds = Mapping[str, Sequence[Mapping[str, Any]]]


def summary(rounds: Rounds, cells: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return samples per second and the median time to the first batch, by loader and cell."""
    found: dict[str, dict[str, Any]] = {}
    for loader, passes in rounds.items():
        found[loader] = {}
        for cell in cells:
            given = [each[cell] for each in passes if cell in each]
            speeds = [g["samples_per_s"] for g in given if g["samples_per_s"] and not g["error"]]
            errors = [g["error"] for g in given if g["error"]]
            if speeds:
                firsts = [g["first_s"] for g in given if g["first_s"] and not g["error"]]
                found[loader][cell] = {
                    "median": median(speeds), "min": min(speeds), "max": max(speeds),
                    "rounds": len(speeds), "first_batch_s": median(firsts),
                    "cpu_us_per_sample": median(
                        1e6 * g["cpu_s"] / g["samples_per_s"] / g["seconds"] for g in given
                        if not g["error"]
                    ),
                }  # fmt: skip
            if errors:
                found[loader].setdefault(cell, {})["errors"] = errors
    return found


def ratios(rounds: Rounds, cells: Sequence[str], ours: str, peers: Sequence[str]) -> dict[str, Any]:
    """Return our speed over that of each peer and of the best peer, by cell; medians of rounds."""
    found: dict[str, Any] = {}
    for cell in cells:
        per_round: dict[str, list[float]] = {peer: [] for peer in peers} | {"best peer": []}
        for number, mine in enumerate(rounds[ours]):
            own = _speed(mine, cell)
            others = {p: _speed(rounds[p][number], cell) for p in peers if p in rounds}
            known = {peer: speed for peer, speed in others.items() if speed}
            if own and known:
                for peer, speed in known.items():
                    per_round[peer].append(own / speed)
                per_round["best peer"].append(own / max(known.values()))
        found[cell] = {
            peer: {"median": median(r), "min": min(r), "max": max(r)}
            for peer, r in per_round.items() if r
        }  # fmt: skip
    return found


def _speed(figures: Mapping[str, Any], cell: str) -> float | None:
    found = figures.get(cell)
    return found["samples_per_s"] if found and not found["error"] else None


# Setup of the loaders, which the page shows before the figures.
_SETTINGS = """All read the same bytes, in shards of 8 MiB of samples (20 of them). A pass begins in
a new process, with everything imported; imports are not timed. *raw* hands out every JPEG as
`bytes` (litdata gives views of a mapped file, which are copied so that they can leave the process),
*pixels* decodes by Pillow and stacks each batch into one torch tensor; w0, w1 and w2 are the
loader's own workers, which are threads in ours and processes in the others. Cold from S3 means an
empty cache and a server on the same machine, which takes its share of the cores.

Shuffling is not equally strong: ours and litdata permute inside one shard or chunk, webdataset
(detshuffle) and Energon mix in a buffer of 1,000, mosaicml-streaming (py1e) in all. Ours compares
the CRC-32 of every file, *unchecked* leaves that out; the others have no checksums per sample."""


def page(report: Mapping[str, Any]) -> str:
    """Return the results as a Markdown page."""
    about = report["about"]
    lines = [
        "# Loaders side by side",
        "",
        f"{about['date']}, {about['machine']}, Python {about['python']}. {about['samples']:,} "
        f"JPEGs of 224 x 224 pixels (mean {about['mean_bytes']:,} bytes) with captions; batches of "
        f"{about['batch']}; medians of {about['rounds']} rounds in which the loaders took turns "
        "(least - most). Samples per second count from before a loader is built to its last batch. "
        f"Load of the machine at the start: {about['load_before'][0]}.",
        "",
        f"Versions: {named(about['versions'])}.",
        "",
        _SETTINGS,
    ]
    lines += [f"\n**{note}**" for note in about["notes"]]
    if report["targets"]:
        columns = {"target": "target", "found": "found", "met": "met"}
        lines += ["", *verdicts(report["targets"], columns)[:-1]]
    for place, title in (("disk", "Local disk, warm"), ("s3", "S3 (SeaweedFS), cold")):
        lines += _speed_section(report, place, title)
    for section in ("resume", "elastic", "requests"):
        if report[section]:
            lines += _SECTIONS[section](report[section])
    decode = report["decode"]
    lines += [
        "",
        f"Decoding one image: Pillow alone {decode['pillow_us']} us, `moonvit3d.media.read_image` "
        f"{decode['read_image_us']} us.",
    ]
    return "\n".join(lines) + "\n"


def _speed_section(report: Mapping[str, Any], place: str, title: str) -> list[str]:
    columns = [cell for cell in report["about"]["cells"] if cell.startswith(place)]
    if not columns:
        return []
    lines = ["", f"## {title}: samples per second", "", *_speeds(report["speed"], columns)]
    if report["ratios"]:
        lines += ["", "Ours over theirs, round by round:", ""]
        lines += _ratio_table(report["ratios"], columns)
    alone = [cell for cell in columns if cell.endswith("w0")]
    lines += ["", "Microseconds of processor time per sample, in the loader's own process:", ""]
    rows = [
        [loader, *(f"{f[c]['cpu_us_per_sample']:.1f}" if "median" in f.get(c, {}) else "-"
                   for c in alone)]
        for loader, f in report["speed"].items()
    ]  # fmt: skip
    return lines + table(["loader", *(cell.split(" ", 1)[1] for cell in alone)], rows)


def _resume_section(resume: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, r["workers"], _ms(r["fresh_first_batch_s"]), _ms(r["resumed_first_batch_s"]),
         f"{r['later_by_ms']:.1f} ms", yes(r["same_samples"]), yes(r["same_bytes"]),
         f"{r['state_bytes']} B" if r["state_bytes"] else "none", r["error"][:80]]
        for name, found in resume.items() for r in found
    ]  # fmt: skip
    head = ["loader", "workers", "first batch fresh", "resumed", "later by", "same samples",
            "same bytes", "state", "note"]  # fmt: skip
    return ["", "## Going on at three quarters, in a new process", "", *table(head, rows)]


def _elastic_section(elastic: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, f"{r['other_world_ordered']}/{r['steps']}",
         f"{r['other_world_as_sets']}/{r['steps']}",
         f"{r['resumed_ordered']}/{r['resumed_steps']}",
         f"{r['resumed_as_sets']}/{r['resumed_steps']}", r["error"][:80]]
        for name, r in elastic.items()
    ]  # fmt: skip
    head = ["loader", "2 ranks = 4 ranks", "as sets", "going on with 4 ranks", "as sets", "note"]
    return ["", "## Ordered global steps with another number of ranks", "", *table(head, rows)]


def _requests_section(requests: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, *(counts[e][what] for e in ("epochs_1", "epochs_2")
                 for what in ("shards", "other", "MiB")),
         counts["epochs_1"]["error"] or counts["epochs_2"]["error"]]
        for name, counts in requests.items()
    ]  # fmt: skip
    head = ["loader", "once: shards", "other", "MiB", "twice: shards", "other", "MiB", "note"]
    title = "## Requests to S3, all samples once and twice in one process"
    return ["", title, "", *table(head, rows)]


_SECTIONS = {
    "resume": _resume_section,
    "elastic": _elastic_section,
    "requests": _requests_section,
}


def _speeds(speed: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    rows = []
    for loader, figures in speed.items():
        row: list[str] = [loader]
        for cell in columns:
            found = figures.get(cell, {})
            if "median" in found:
                row.append(spread(found, ",.0f"))
            else:
                row.append((found.get("errors") or ["-"])[0][:60])
        rows.append(row)
    return table(["loader", *(cell.split(" ", 1)[1] for cell in columns)], rows)


def _ratio_table(ratios_: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    peers = list(dict.fromkeys(peer for cell in columns for peer in ratios_[cell]))
    rows = []
    for peer in peers:
        found = [ratios_[cell].get(peer) for cell in columns]
        rows.append(
            [
                peer,
                *(
                    f"{f['median']:.2f} ({f['min']:.2f} - {f['max']:.2f})" if f else "-"
                    for f in found
                ),
            ]
        )
    return table(["over", *(cell.split(" ", 1)[1] for cell in columns)], rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
