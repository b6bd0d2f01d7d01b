"""What a comparison of two runs says to a person: what differs first, and what that suggests. Pure.

The guesses follow from the order of things in a step: it reads data, computes a loss, then
gradients, and updates weights from them and from what the optimizer remembers. Whatever differs
first is the cause or comes right after it.
"""

from collections.abc import Sequence
from typing import Any

from kimi_pretrain.verify.resume import READ, Comparison, Difference

_OPTIMIZER = "optim."
_BIAS = "e_score_correction_bias"


def differences(c: Comparison) -> list[str]:
    """Return a sentence for each place that was looked at and is not the same, in order."""
    told: list[str] = []
    if c.before:
        told.append(f"before the stop, {_step(c.before)}")
    if c.restored:
        told.append(f"as the run went on after step {c.stop}, {_numbers(c.restored)}")
    if c.restored_tensors:
        told.append(f"as the run went on after step {c.stop}, {_tensors(c.restored_tensors)}")
    if c.after:
        told.append(_step(c.after))
    if c.end:
        told.append(f"at the end, {_numbers(c.end)}")
    if c.end_tensors:
        told.append(f"at the end, {_tensors(c.end_tensors, c.tensors)}{_apart(c)}")
    if not told and not c.passed:
        told.append("nothing was compared")
    return told


def suggestion(c: Comparison) -> str:
    """Return where to look for the cause of what differs."""
    return next(text for found, text in _guesses(c) if found)


def _guesses(c: Comparison) -> list[tuple[bool, str]]:
    """Return (it looks like that, what to say), the surest sign first."""
    names = {one.name for one in c.after}
    state = {one.name for one in (*c.restored, *(() if c.restored else c.end))}
    restored = c.restored_tensors or ()
    first = bool(c.after) and c.after[0].step == c.stop + 1
    watched = c.restored_tensors is not None
    known = "weights, optimizer and loader were restored as they were, so "
    return [
        (
            bool(c.before),
            "the two runs part before the stop, so this configuration does not come out the same "
            "twice on this machine, and nothing can be said of its resume: look for operations "
            "that are not deterministic",
        ),
        (
            any(name.startswith("loader.") for name in state) or bool(names & {*READ}),
            "the steps after the stop read other samples: the loader's state was not saved, or "
            "not restored as it was",
        ),
        (
            "lr" in names or "optimizer_steps" in state or "optim.step" in restored,
            "the count of updates was not restored: the learning rate and AdamW's correction "
            "follow it",
        ),
        (
            any(name.endswith(_BIAS) for name in restored),
            "the routing biases were not saved, or not restored as they were: they are no "
            "parameters, and are easily forgotten",
        ),
        (
            any(not name.startswith(_OPTIMIZER) for name in restored),
            "weights were not saved, or not restored as they were",
        ),
        (bool(restored), _of_optimizer(restored)),
        (
            first and "loss" in names,
            (known if watched else "")
            + "the first loss after the stop differs for another reason: a random number whose "
            "generator nothing restores, or a value that no checkpoint holds",
        ),
        (
            first and "grad_norm" in names,
            "the first loss after the stop is the same and its gradient is not: something in the "
            "backward pass is random, or remembers what no checkpoint holds",
        ),
        (
            bool(c.after) or bool(c.end_tensors),
            (known if watched else "the optimizer's state was not restored as it was, or ")
            + "an update came out differently from the same gradient: a random number, or a value "
            "that no checkpoint holds, in the optimizer",
        ),
        (bool(c.end) or bool(c.restored), "what the run counts besides tensors was not restored"),
        (True, "neither run got beyond the stop; see the logs of both"),
    ]


def _of_optimizer(names: Sequence[str]) -> str:
    parts = sorted({name.split(".")[1] for name in names})
    what = {
        "momentum": "Muon's momentum",
        "exp_avg": "AdamW's mean of gradients",
        "exp_avg_sq": "AdamW's mean of squares",
        "master": "the fp32 masters of the weights",
    }
    told = " and ".join(what.get(part, part) for part in parts)
    return f"the optimizer's state was not saved, or not restored as it was: {told}"


def _step(found: Sequence[Difference]) -> str:
    return f"step {found[0].step} is the first that differs: {_numbers(found)}"


def _numbers(found: Sequence[Difference]) -> str:
    first = found[0]
    if first.name == "line":
        missing = "resumed" if not first.found else "uninterrupted"
        return f"the {missing} run never did it"
    told = f"{first.name} is {_short(first.found)}, was {_short(first.wanted)}"
    return told + _more([one.name for one in found[1:]], "")


def _tensors(names: Sequence[str], of: int | None = None) -> str:
    count = f"{len(names)} of {of}" if of else f"{len(names)}"
    verb = "tensor is" if len(names) == 1 and not of else "tensors are"
    return f"{count} {verb} not the same, first {names[0]}"


def _apart(c: Comparison) -> str:
    if c.first is None:
        return ""
    if not c.first.elements:
        return " (another shape or type)"
    largest = "not finite" if c.first.largest is None else f"{c.first.largest:.2g}"
    return (
        f" ({c.first.differing:,} of its {c.first.elements:,} numbers, the largest difference is "
        f"{largest})"
    )


def _more(names: Sequence[str], nothing: str) -> str:
    if not names:
        return nothing
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f" (so do {', '.join(names[:4])}{more})" if len(names) > 1 else f" (so does {names[0]})"


def _short(value: Any) -> str:
    """Return a value as Python writes it, which gives a float all its digits; hashes are cut."""
    if value is None:
        return "missing"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 24 else f"{text[:12]}..."
